"""Triton kernels that multiply a few rows, and do in the same launch what stands before and after the product.

At a few dozen rows a matrix product is the reading of its weights, a few microseconds, and around it stand small
kernels of a microsecond or two, each with the end of one launch and the start of the next on either side. So here a
product takes them along:

    norm_qkv_rotate     norm of the rows · QKV · norm of the heads (Qwen3) · rotation · store into the pages
    norm_gate_up_silu   norm of the rows · gate and up · silu(gate) * up
    product_add         product · sum with the residual

**The norm costs nothing extra.** Every program needs the whole rows anyway, so it sums their squares on the way:
`rms_norm(x) Wᵀ = (x * g) Wᵀ / sqrt(mean(x²) + eps)`; the root divides the finished sums.

**Weights are the left operand.** A tile is `[weight rows, tokens]`, its many rows are weights and its few columns
tokens, because the tensor cores' tiles have a least height of 16 (64 for Hopper's largest) and a least width of 8.

**Pairs go together.** Rotation mixes columns i and i + head_dim/2 of a head, SwiGLU mixes gate i and up i. A program
computes both as two products with the same tokens, so that what follows is element-wise.

**Few rows of weights, many columns** (`down`): there would be fewer programs than multiprocessors, so the columns are
split. The last program of a tile to finish adds the parts up, always in the same order, so that the sum is the same in
every run.

With more rows the library's large tiles win; `FEW_ROWS` is where that was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS = 64  # tokens up to which these kernels were measured faster than library products with kernels between them


@triton.jit
def _weight_tile(weight, row, row_inside, column, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """`weight[row, column]`, of `SIZE` columns; without masks where the blocks divide the matrix."""
    place = weight + row[:, None] * SIZE + column[None, :]
    if EVEN:
        return tl.load(place)
    return tl.load(place, mask=row_inside[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _token_tile(x, x_stride, token, token_inside, column, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """`x[token, column]`."""
    place = x + token[:, None] * x_stride + column[None, :]
    if EVEN:
        return tl.load(place, mask=token_inside[:, None], other=0.0)
    return tl.load(place, mask=token_inside[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _normed_products(
    x, x_stride, token, token_inside, norm_weight, eps, weight, row1, row2, row_inside,
    SIZE: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows `row1` and `row2` of the weight times the normalised tokens: two tiles `[BLOCK_N, BLOCK_M]`, float32."""
    acc1 = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc2 = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        w1 = _weight_tile(weight, row1, row_inside, column, SIZE, EVEN)  # [BLOCK_N, BLOCK_K]
        w2 = _weight_tile(weight, row2, row_inside, column, SIZE, EVEN)
        values = _token_tile(x, x_stride, token, token_inside, column, SIZE, EVEN).to(tl.float32)
        gain = tl.load(norm_weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
        squares += tl.sum(values * values, 1)
        scaled = tl.trans((values * gain[None, :]).to(w1.dtype))  # [BLOCK_K, BLOCK_M]
        acc1 = tl.dot(w1, scaled, acc1, input_precision=PRECISION)
        acc2 = tl.dot(w2, scaled, acc2, input_precision=PRECISION)
    scale = tl.rsqrt(squares / SIZE + eps)[None, :]
    return acc1 * scale, acc2 * scale


@triton.jit
def _norm_qkv_rotate_kernel(
    x, x_stride, tokens, norm_weight, eps, weight, bias,
    query, k_cache, v_cache, slot_stride, cos, sin, positions, slot_mapping, head_norm_weight, head_norm_eps,
    SIZE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # head_dim / 2
    PAIRS: tl.constexpr,  # pairs (i, i + HALF) that a program works on
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = (HALF + PAIRS - 1) // PAIRS
    head = tl.program_id(0) // parts
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_inside = token < tokens
    pair = tl.program_id(0) % parts * PAIRS + tl.arange(0, PAIRS)
    pair_inside = pair < HALF
    row = head * (2 * HALF) + pair
    y1, y2 = _normed_products(
        x, x_stride, token, token_inside, norm_weight, eps, weight, row, row + HALF, pair_inside,
        SIZE, SIZE % BLOCK_K == 0 and HALF % PAIRS == 0, BLOCK_M, PAIRS, BLOCK_K, PRECISION,
    )  # fmt: skip
    if HAS_BIAS:
        y1 += tl.load(bias + row, mask=pair_inside, other=0.0).to(tl.float32)[:, None]
        y2 += tl.load(bias + row + HALF, mask=pair_inside, other=0.0).to(tl.float32)[:, None]
    inside = pair_inside[:, None] & token_inside[None, :]
    if head < HEADS + KV_HEADS:  # values are stored as they are
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(y1 * y1, 0) + tl.sum(y2 * y2, 0)) / (2 * HALF) + head_norm_eps)[None, :]
            y1 *= scale * tl.load(head_norm_weight + row, mask=pair_inside, other=0.0).to(tl.float32)[:, None]
            y2 *= scale * tl.load(head_norm_weight + row + HALF, mask=pair_inside, other=0.0).to(tl.float32)[:, None]
        position = tl.load(positions + token, mask=token_inside, other=0)
        angle = position[None, :] * (2 * HALF) + HALF + pair[:, None]  # the tables hold (cos, cos) and (-sin, sin)
        c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        turned = y1 * c - y2 * s
        y2 = y2 * c + y1 * s
        y1 = turned
    if head < HEADS:
        target = token.to(tl.int64)[None, :] * (HEADS * 2 * HALF) + row[:, None]
        tl.store(query + target, y1, mask=inside)
        tl.store(query + target + HALF, y2, mask=inside)
    else:
        slot = tl.load(slot_mapping + token, mask=token_inside, other=-1)[None, :]  # int64; -1 stores nothing
        inside &= slot >= 0
        if head < HEADS + KV_HEADS:
            target = slot * slot_stride + (row - HEADS * 2 * HALF)[:, None]
            tl.store(k_cache + target, y1, mask=inside)
            tl.store(k_cache + target + HALF, y2, mask=inside)
        else:
            target = slot * slot_stride + (row - (HEADS + KV_HEADS) * 2 * HALF)[:, None]
            tl.store(v_cache + target, y1, mask=inside)
            tl.store(v_cache + target + HALF, y2, mask=inside)


@triton.jit
def _norm_gate_up_silu_kernel(
    x, x_stride, tokens, norm_weight, eps, weight, out,
    SIZE: tl.constexpr, INTERMEDIATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_inside = token < tokens
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside = row < INTERMEDIATE
    gate, up = _normed_products(
        x, x_stride, token, token_inside, norm_weight, eps, weight, row, row + INTERMEDIATE, row_inside,
        SIZE, SIZE % BLOCK_K == 0 and INTERMEDIATE % BLOCK_N == 0, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    target = token.to(tl.int64)[None, :] * INTERMEDIATE + row[:, None]
    tl.store(out + target, gate * tl.sigmoid(gate) * up, mask=row_inside[:, None] & token_inside[None, :])


@triton.jit
def _product_add_kernel(
    x, x_stride, tokens, weight, residual, residual_stride, partial, arrivals,
    SIZE: tl.constexpr, OUT_SIZE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_inside = token < tokens
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside = row < OUT_SIZE
    split = tl.program_id(2)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    steps: tl.constexpr = (SIZE + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)  # of BLOCK_K columns, for each split
    even: tl.constexpr = SIZE % (SPLITS * BLOCK_K) == 0 and OUT_SIZE % BLOCK_N == 0
    for step in range(steps):
        column = (split * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        w = _weight_tile(weight, row, row_inside, column, SIZE, even)  # [BLOCK_N, BLOCK_K]
        values = _token_tile(x, x_stride, token, token_inside, column, SIZE, even)
        acc = tl.dot(w, tl.trans(values), acc, input_precision=PRECISION)
    target = residual + token.to(tl.int64)[None, :] * residual_stride + row[:, None]
    inside = row_inside[:, None] & token_inside[None, :]
    if SPLITS == 1:
        tl.store(target, acc + tl.load(target, mask=inside, other=0.0).to(tl.float32), mask=inside)
    else:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts = partial + tile * (SPLITS * BLOCK_N * BLOCK_M) + place
        tl.store(parts + split * (BLOCK_N * BLOCK_M), acc)
        tl.debug_barrier()  # every thread's part is written before one thread announces it
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(arrivals + tile, 0)  # ready for the next launch
            total = tl.load(target, mask=inside, other=0.0).to(tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(parts + part * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            tl.store(target, total, mask=inside)


@dataclass(frozen=True)
class Tiles:
    """How a product is cut: weight rows (pairs of them, where they come in pairs) and columns of a program's tile."""

    rows: int
    columns: int = 128
    splits: int = 1  # parts that the columns are cut into
    num_warps: int = 4
    num_stages: int = 4


def norm_qkv_rotate(
    x: Tensor,
    norm: tuple[Tensor, float],
    weight: Tensor,
    bias: Tensor | None,
    num_heads: int,
    rotary: tuple[Tensor, Tensor],
    positions: Tensor,
    layer_cache: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    head_norm: tuple[Tensor, float] | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """From the residual stream to attention's input: rotated queries, and keys and values in their pages.

    Args:
        x: `[tokens, hidden]`.
        norm: weight `[hidden]` and epsilon of the RMSNorm before the product.
        weight, bias: the packed product, `[(heads + 2 kv_heads) * head_dim, hidden]` and its bias or None.
        num_heads: query heads.
        rotary: the tables of stage D's `RotaryEmbedding`: cos and signed sin, each `[positions, 2, head_dim / 2]`.
        positions: int64 `[tokens]`.
        layer_cache: keys and values, each `[blocks, block_size, kv_heads, head_dim]`.
        slot_mapping: int64 `[tokens]`; -1 stores nothing.
        head_norm: weight `[heads + kv_heads, head_dim]` and epsilon of the heads' RMSNorm.
        tiles: how to cut the product; None is what was measured fastest.

    Returns:
        The rotated queries, `[tokens, heads, head_dim]`. Sums are float32, rounded once at the end.
    """
    tokens, hidden = x.shape
    k_cache, v_cache = layer_cache
    kv_heads, head_dim = k_cache.shape[2:]
    half = head_dim // 2
    tiles = tiles or Tiles(rows=32)
    pairs = triton.next_power_of_2(half) if head_norm is not None else min(tiles.rows, triton.next_power_of_2(half))
    pairs = max(16, pairs)
    block_m = _token_block(tokens)
    query = torch.empty(tokens, num_heads, head_dim, dtype=x.dtype, device=x.device)
    head_weight, head_eps = head_norm if head_norm is not None else (weight, 0.0)
    grid = ((num_heads + 2 * kv_heads) * triton.cdiv(half, pairs), triton.cdiv(tokens, block_m))
    _norm_qkv_rotate_kernel[grid](
        x, x.stride(0), tokens, *norm, weight, weight if bias is None else bias,
        query, k_cache, v_cache, k_cache.stride(1), *rotary, positions, slot_mapping, head_weight, head_eps,
        SIZE=hidden, HEADS=num_heads, KV_HEADS=kv_heads, HALF=half, PAIRS=pairs,
        HAS_BIAS=bias is not None, HAS_NORM=head_norm is not None,
        BLOCK_M=block_m, BLOCK_K=_columns(tiles, hidden, x), PRECISION=_precision(x),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return query


def norm_gate_up_silu(x: Tensor, norm: tuple[Tensor, float], weight: Tensor, tiles: Tiles | None = None) -> Tensor:
    """`silu(gate) * up` of the normalised rows.

    Args:
        x: `[tokens, hidden]`.
        norm: weight `[hidden]` and epsilon of the RMSNorm before the product.
        weight: `[2 * intermediate, hidden]`, gate rows first.
        tiles: how to cut the product; None is what was measured fastest.

    Returns:
        `[tokens, intermediate]`.
    """
    tokens, hidden = x.shape
    intermediate = weight.shape[0] // 2
    tiles = tiles or Tiles(rows=32)
    block_m = _token_block(tokens)
    out = torch.empty(tokens, intermediate, dtype=x.dtype, device=x.device)
    _norm_gate_up_silu_kernel[triton.cdiv(intermediate, tiles.rows), triton.cdiv(tokens, block_m)](
        x, x.stride(0), tokens, *norm, weight, out,
        SIZE=hidden, INTERMEDIATE=intermediate,
        BLOCK_M=block_m, BLOCK_N=tiles.rows, BLOCK_K=_columns(tiles, hidden, x), PRECISION=_precision(x),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def product_add(x: Tensor, weight: Tensor, residual: Tensor, arrivals: Tensor, tiles: Tiles | None = None) -> Tensor:
    """`residual + x Wᵀ`, written over `residual`.

    Args:
        x: `[tokens, in_features]`.
        weight: `[out_features, in_features]`.
        residual: `[tokens, out_features]`.
        arrivals: int32 zeros, one for each tile of the product; left as zeros. Calls that share them must follow one
            another on one stream.
        tiles: how to cut the product; None is what was measured fastest.
    """
    tokens, in_features = x.shape
    out_features = weight.shape[0]
    tiles = tiles or Tiles(rows=32, splits=4 if in_features > 2 * out_features else 1)
    block_m = _token_block(tokens)
    blocks = triton.cdiv(out_features, tiles.rows), triton.cdiv(tokens, block_m)
    partial = residual
    if tiles.splits > 1:
        if blocks[0] * blocks[1] > len(arrivals):
            raise ValueError(f"{blocks[0] * blocks[1]} tiles, but {len(arrivals)} counters")
        size = blocks[0] * blocks[1] * tiles.splits * tiles.rows * block_m
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    _product_add_kernel[*blocks, tiles.splits](
        x, x.stride(0), tokens, weight, residual, residual.stride(0), partial, arrivals,
        SIZE=in_features, OUT_SIZE=out_features, SPLITS=tiles.splits,
        BLOCK_M=block_m, BLOCK_N=tiles.rows, BLOCK_K=_columns(tiles, in_features // tiles.splits, x),
        PRECISION=_precision(x), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return residual


def _token_block(tokens: int) -> int:
    return max(16, min(64, triton.next_power_of_2(tokens)))


def _columns(tiles: Tiles, size: int, x: Tensor) -> int:
    """Columns of a tile; half as many of float32, for they take the same shared memory."""
    return max(16, min(tiles.columns * 2 // x.element_size(), triton.next_power_of_2(size)))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
