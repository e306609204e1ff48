"""Element-wise fusion: one Triton kernel for all of a layer's work between two matrix products.

A decode step's tensors are tiny: for 32 sequences of Qwen2.5-0.5B, all queries together are 57 KB. Time goes into
starting kernels and waiting for memory, not into arithmetic, so every saved launch saves a microsecond or more per
layer. Between the QKV product and attention, stage D runs a norm of the heads (Qwen3), three element-wise kernels for
the rotation, and the store into the blocks; `rotate_and_store` is one kernel for all of this. `silu_and_multiply`
computes the MLP's activation in one kernel instead of two. The matrix products already add the residual (stage D's
`Linear`).

**No kernel for the norm.** With the norm's weight `g` in the matrix, `W' = W diag(g)`, `rms_norm(x) Wᵀ` is
`x W'ᵀ / sqrt(mean(x²) + eps)`: one number per row. So the product takes the rows without normalising them. The kernel
after the product gets the same rows, computes their scale and multiplies by it (`Rows`).
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage_f_graph_tp.kernels.pdl import pdl_settings, start_next, wait_for_previous

MANY = 2048  # tokens; from here on there are far more programs than can run at once


class Rows(NamedTuple):
    """The input rows `[tokens, hidden]` of a product before their norm, and the norm's epsilon."""

    x: Tensor
    eps: float


@triton.jit
def _row_scale(x, x_stride, row, eps, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr):
    """`1 / sqrt(mean(x²) + eps)` of a row."""
    column = tl.arange(0, SIZE_PAD)
    values = tl.load(x + row * x_stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)


@triton.jit
def scale_of(most, LARGEST: tl.constexpr):
    """Return the scale that maps `most`, a row's largest absolute value, to LARGEST; 1 for rows of zeros."""
    return tl.where(most == 0.0, 1.0, most / LARGEST)


@triton.jit
def nearest(x, dtype: tl.constexpr):
    """Round to the nearest number of `dtype`, ties to even."""
    if dtype == tl.int8:
        shifted = x + 12582912.0  # 1.5 × 2^23: float32 has no fractions there, so the sum is rounded
        return (shifted - 12582912.0).to(tl.int8)
    return x.to(dtype)


@triton.jit
def _rotate_and_store_kernel(
    qkv,
    query,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    cos,
    sin,
    positions,
    slot_mapping,
    norm_weight,
    bias,
    rows,
    qkv_stride,
    slot_stride,
    rows_stride,
    eps,
    rows_eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # head_dim / 2
    HALF_PAD: tl.constexpr,
    HEADS_PAD: tl.constexpr,  # a power of two, at least the number of all heads
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # width of `rows`; 0: the product was of normalised rows
    ROWS_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,  # largest number of the pool's dtype, if the pool has scales
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]  # [HEADS_PAD, 1]; queries, then keys, then values
    column = tl.arange(0, HALF_PAD)[None, :]  # [1, HALF_PAD]
    inside = (head < HEADS + 2 * KV_HEADS) & (column < HALF)
    turns = head < HEADS + KV_HEADS  # values are stored as they are
    position = tl.load(positions + token)
    angle = position * (2 * HALF) + HALF + column  # the tables hold (cos, cos) and (-sin, sin)
    c = tl.load(cos + angle, mask=column < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=column < HALF, other=0.0).to(tl.float32)
    slot = tl.load(slot_mapping + token)  # int64; -1 stores nothing
    in_head = head * (2 * HALF) + column
    start_next(PDL)
    wait_for_previous(PDL)
    x1 = tl.load(qkv + token * qkv_stride + in_head, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(qkv + token * qkv_stride + in_head + HALF, mask=inside, other=0.0).to(tl.float32)
    if ROWS > 0:
        scale = _row_scale(rows, rows_stride, token, rows_eps, ROWS, ROWS_PAD)
        x1 *= scale
        x2 *= scale
    if HAS_BIAS:
        x1 += tl.load(bias + in_head, mask=inside, other=0.0).to(tl.float32)
        x2 += tl.load(bias + in_head + HALF, mask=inside, other=0.0).to(tl.float32)
    n1, n2 = x1, x2
    if HAS_NORM:
        scales = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
        weighted = inside & turns
        n1 = x1 * scales * tl.load(norm_weight + in_head, mask=weighted, other=0.0).to(tl.float32)
        n2 = x2 * scales * tl.load(norm_weight + in_head + HALF, mask=weighted, other=0.0).to(tl.float32)
    y1 = tl.where(turns, n1 * c - n2 * s, x1)
    y2 = tl.where(turns, n2 * c + n1 * s, x2)

    is_query = inside & (head < HEADS)
    target = token * (HEADS * 2 * HALF) + in_head
    tl.store(query + target, y1, mask=is_query)
    tl.store(query + target + HALF, y2, mask=is_query)
    if k_scales is not None:
        row = tl.arange(0, HEADS_PAD)
        scale = scale_of(tl.maximum(tl.max(tl.abs(y1), 1), tl.max(tl.abs(y2), 1)), LARGEST)  # [HEADS_PAD]
        y1 = nearest(y1 / scale[:, None], k_cache.dtype.element_ty)
        y2 = nearest(y2 / scale[:, None], k_cache.dtype.element_ty)
        scale_offset = (slot // BLOCK_SIZE * KV_HEADS + row - HEADS) * BLOCK_SIZE + slot % BLOCK_SIZE
        tl.store(k_scales + scale_offset, scale, mask=(row >= HEADS) & (row < HEADS + KV_HEADS) & (slot >= 0))
        scale_offset -= KV_HEADS * BLOCK_SIZE
        is_value = (row >= HEADS + KV_HEADS) & (row < HEADS + 2 * KV_HEADS) & (slot >= 0)
        tl.store(v_scales + scale_offset, scale, mask=is_value)
    is_key = inside & (head >= HEADS) & turns & (slot >= 0)
    key_offset = slot * slot_stride + (head - HEADS) * (2 * HALF) + column
    tl.store(k_cache + key_offset, y1, mask=is_key)
    tl.store(k_cache + key_offset + HALF, y2, mask=is_key)
    is_value = inside & (head >= HEADS + KV_HEADS) & (slot >= 0)
    value_offset = key_offset - KV_HEADS * 2 * HALF
    tl.store(v_cache + value_offset, y1, mask=is_value)
    tl.store(v_cache + value_offset + HALF, y2, mask=is_value)


def largest(dtype: torch.dtype) -> float:
    """Return the largest finite number of a dtype."""
    return float((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)


def rotation_warps(tokens: int) -> int:
    """Choose the warps per token: many while few programs run, fewer if that lets more programs run at once."""
    return 8 if tokens < MANY else 4


def rotate_and_store(
    qkv: Tensor,
    num_heads: int,
    rotary: tuple[Tensor, Tensor],
    positions: Tensor,
    layer_cache: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    norm: tuple[Tensor, float] | None = None,
    rows: Rows | None = None,
    bias: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    pdl: bool = True,
) -> Tensor:
    """Normalise the heads (if the model does), rotate queries and keys, store keys and values in their blocks.

    Args:
        qkv: `[tokens, heads + 2 kv_heads, head_dim]`, the heads of a token adjacent.
        num_heads: query heads.
        rotary: the tables of stage D's `RotaryEmbedding`: cos and signed sin, each `[positions, 2, head_dim / 2]`.
        positions: `[tokens]`, int64.
        layer_cache: keys and values, each `[blocks, block_size, kv_heads, head_dim]`.
        slot_mapping: `[tokens]`, int64; -1 stores nothing.
        norm: the weight `[heads + kv_heads, head_dim]` and epsilon of the heads' RMSNorm.
        rows: the product's input, if its norm is still to be applied.
        bias: `[(heads + 2 kv_heads) * head_dim]`, if it is still to be added to the product.
        scales: of keys and of values, float32 `[blocks, kv_heads, block_size]`; written if the cache stores each head
            of a token with a scale.

    Returns:
        The rotated queries, `[tokens, heads, head_dim]`. The arithmetic is float32, rounded once at the end.
    """
    tokens, all_heads, head_dim = qkv.shape
    k_cache, v_cache = layer_cache
    query = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    cos, sin = rotary
    weight, eps = norm if norm is not None else (query, 0.0)
    x, rows_eps = rows if rows is not None else (qkv, 0.0)
    width = 0 if rows is None else x.shape[1]
    _rotate_and_store_kernel[(tokens,)](
        qkv,
        query,
        k_cache,
        v_cache,
        *(scales or (None, None)),
        cos,
        sin,
        positions,
        slot_mapping,
        weight,
        query if bias is None else bias,
        x,
        qkv.stride(0),
        k_cache.stride(1),
        x.stride(0),
        eps,
        rows_eps,
        HEADS=num_heads,
        KV_HEADS=(all_heads - num_heads) // 2,
        HALF=head_dim // 2,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        HEADS_PAD=triton.next_power_of_2(all_heads),
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        ROWS=width,
        ROWS_PAD=triton.next_power_of_2(max(1, width)),
        BLOCK_SIZE=0 if scales is None else k_cache.shape[1],
        LARGEST=0.0 if scales is None else largest(k_cache.dtype),
        num_warps=rotation_warps(tokens),
        **pdl_settings(qkv.device, pdl),
    )
    return query


@triton.jit
def _silu_and_multiply_kernel(
    gate_up,
    out,
    rows,
    rows_stride,
    eps,
    INTERMEDIATE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # width of `rows`; 0: the product was of normalised rows
    ROWS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INTERMEDIATE
    start_next(PDL)
    wait_for_previous(PDL)
    gate = tl.load(gate_up + token * 2 * INTERMEDIATE + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + token * 2 * INTERMEDIATE + INTERMEDIATE + column, mask=inside).to(tl.float32)
    if ROWS > 0:
        scale = _row_scale(rows, rows_stride, token, eps, ROWS, ROWS_PAD)
        gate *= scale
        up *= scale
    tl.store(out + token * INTERMEDIATE + column, gate * tl.sigmoid(gate) * up, mask=inside)


def silu_and_multiply(gate_up: Tensor, rows: Rows | None = None, pdl: bool = True) -> Tensor:
    """Compute `silu(gate) * up`: `[tokens, 2 * intermediate]`, gate first, -> `[tokens, intermediate]`.

    `rows`: the product's input, if its norm is still to be applied.
    """
    tokens, width = gate_up.shape
    out = torch.empty(tokens, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    x, eps = rows if rows is not None else (gate_up, 0.0)
    size = 0 if rows is None else x.shape[1]
    most, warps = (1024, 4) if tokens < MANY else (8192, 8)
    block = min(most, triton.next_power_of_2(width // 2))
    grid = (tokens, triton.cdiv(width // 2, block))
    _silu_and_multiply_kernel[grid](
        gate_up,
        out,
        x,
        x.stride(0),
        eps,
        INTERMEDIATE=width // 2,
        BLOCK=block,
        ROWS=size,
        ROWS_PAD=triton.next_power_of_2(max(1, size)),
        num_warps=warps,
        **pdl_settings(gate_up.device, pdl),
    )
    return out


@triton.jit
def _rms_norm_kernel(x, weight, out, x_stride, eps, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PAD)
    inside = column < SIZE
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    start_next(PDL)
    wait_for_previous(PDL)
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    tl.store(out + row * SIZE + column, values * scale * weights, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, pdl: bool = True) -> Tensor:
    """Normalise each row of `[tokens, size]` (RMSNorm); one program per row keeps the row in registers."""
    tokens, size = x.shape
    out = torch.empty_like(x)
    pad = triton.next_power_of_2(size)
    warps = min(8, max(1, pad // 512))
    _rms_norm_kernel[(tokens,)](
        x, weight, out, x.stride(0), eps, SIZE=size, SIZE_PAD=pad, num_warps=warps, **pdl_settings(x.device, pdl)
    )
    return out
