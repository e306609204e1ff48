"""Triton kernels that quantise keys and values on their way into their blocks.

A head of a token is read whole by one program, which finds its largest number, divides, rounds and writes the values
and the scale. `rotate_and_store` does it right after the rotation (stage F's element-wise kernel with another end), so
that quantising costs no launch and no read; `store` is for stage D's layers, which have rotated already.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from beyond.quantization.formats import LARGEST, Quantized
from stage_f_graph_tp.kernels.elementwise import rotation_warps


@triton.jit
def _scale_of(most, LARGEST: tl.constexpr):
    """Return the scale of rows whose largest absolute number is `most`; 1 for rows of zeros."""
    return tl.where(most == 0.0, 1.0, most / LARGEST)


@triton.jit
def _to_8_bits(scaled, dtype: tl.constexpr):
    """Round to the nearest value of the format, ties to even."""
    if dtype == tl.int8:
        shifted = scaled + 12582912.0  # 1.5 × 2^23: float32 has no fractions there, so the sum is rounded
        return (shifted - 12582912.0).to(tl.int8)
    return scaled.to(dtype)


@triton.jit
def _rotate_and_store_kernel(
    qkv,
    query,
    k_values,
    v_values,
    k_scales,
    v_scales,
    cos,
    sin,
    positions,
    slot_mapping,
    norm_weight,
    qkv_stride,
    slot_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # head_dim / 2
    HALF_PAD: tl.constexpr,
    HEADS_PAD: tl.constexpr,  # a power of two, for all of them
    HAS_NORM: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Norm and rotate the heads of one token; write the queries as they are, keys and values in 8 bits."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, HEADS_PAD)  # [HEADS_PAD]; queries, then keys, then values
    head = row[:, None]
    column = tl.arange(0, HALF_PAD)[None, :]  # [1, HALF_PAD]
    inside = (head < HEADS + 2 * KV_HEADS) & (column < HALF)
    first = token * qkv_stride + head * (2 * HALF) + column
    x1 = tl.load(qkv + first, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(qkv + first + HALF, mask=inside, other=0.0).to(tl.float32)

    turns = head < HEADS + KV_HEADS  # values are stored as they are
    position = tl.load(positions + token)
    angle = position * (2 * HALF) + HALF + column  # the tables hold (cos, cos) and (-sin, sin)
    c = tl.load(cos + angle, mask=column < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=column < HALF, other=0.0).to(tl.float32)
    n1, n2 = x1, x2
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
        weighted = inside & turns
        weight = norm_weight + head * (2 * HALF) + column
        n1 = x1 * scale * tl.load(weight, mask=weighted, other=0.0).to(tl.float32)
        n2 = x2 * scale * tl.load(weight + HALF, mask=weighted, other=0.0).to(tl.float32)
    y1 = tl.where(turns, n1 * c - n2 * s, x1)
    y2 = tl.where(turns, n2 * c + n1 * s, x2)

    is_query = inside & (head < HEADS)
    target = token * (HEADS * 2 * HALF) + head * (2 * HALF) + column
    tl.store(query + target, y1, mask=is_query)
    tl.store(query + target + HALF, y2, mask=is_query)

    slot = tl.load(slot_mapping + token)  # int64; -1 stores nothing
    scale = _scale_of(tl.maximum(tl.max(tl.abs(y1), 1), tl.max(tl.abs(y2), 1)), LARGEST)  # [HEADS_PAD]
    z1 = _to_8_bits(y1 / scale[:, None], k_values.dtype.element_ty)
    z2 = _to_8_bits(y2 / scale[:, None], k_values.dtype.element_ty)
    scale_offset = slot // BLOCK_SIZE * (KV_HEADS * BLOCK_SIZE) + slot % BLOCK_SIZE
    is_key = (row >= HEADS) & (row < HEADS + KV_HEADS) & (slot >= 0)
    offset = slot * slot_stride + (head - HEADS) * (2 * HALF) + column
    tl.store(k_values + offset, z1, mask=inside & is_key[:, None])
    tl.store(k_values + offset + HALF, z2, mask=inside & is_key[:, None])
    tl.store(k_scales + scale_offset + (row - HEADS) * BLOCK_SIZE, scale, mask=is_key)
    is_value = (row >= HEADS + KV_HEADS) & (row < HEADS + 2 * KV_HEADS) & (slot >= 0)
    offset -= KV_HEADS * 2 * HALF
    tl.store(v_values + offset, z1, mask=inside & is_value[:, None])
    tl.store(v_values + offset + HALF, z2, mask=inside & is_value[:, None])
    tl.store(v_scales + scale_offset + (row - HEADS - KV_HEADS) * BLOCK_SIZE, scale, mask=is_value)


def rotate_and_store(
    qkv: Tensor,
    num_heads: int,
    rotary: tuple[Tensor, Tensor],
    positions: Tensor,
    layer_cache: tuple[Quantized, Quantized],
    slot_mapping: Tensor,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Norm the heads (where the model does), rotate queries and keys, store keys and values in 8 bits.

    Args and result are those of stage F's `rotate_and_store`; `layer_cache` holds `Quantized` keys and values.
    """
    tokens, all_heads, head_dim = qkv.shape
    k_cache, v_cache = layer_cache
    query = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    weight, eps = norm if norm is not None else (query, 0.0)
    _rotate_and_store_kernel[(tokens,)](
        qkv,
        query,
        k_cache.values,
        v_cache.values,
        k_cache.scales,
        v_cache.scales,
        *rotary,
        positions,
        slot_mapping,
        weight,
        qkv.stride(0),
        k_cache.values.stride(1),
        eps,
        HEADS=num_heads,
        KV_HEADS=(all_heads - num_heads) // 2,
        BLOCK_SIZE=k_cache.values.shape[1],
        HALF=head_dim // 2,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        HEADS_PAD=triton.next_power_of_2(all_heads),
        HAS_NORM=norm is not None,
        LARGEST=LARGEST[k_cache.values.dtype],
        num_warps=rotation_warps(tokens),
    )
    return query


@triton.jit
def _store_kernel(
    key,
    value,
    k_values,
    v_values,
    k_scales,
    v_scales,
    slot_mapping,
    key_stride,
    value_stride,
    slot_stride,
    KV_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Write the keys and values of one token in 8 bits."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    row = tl.arange(0, HEADS_PAD)
    column = tl.arange(0, HEAD_PAD)[None, :]
    inside = (row < KV_HEADS)[:, None] & (column < HEAD_DIM)
    offset = row[:, None] * HEAD_DIM + column
    scale_offset = slot // BLOCK_SIZE * (KV_HEADS * BLOCK_SIZE) + slot % BLOCK_SIZE + row * BLOCK_SIZE
    k = tl.load(key + token * key_stride + offset, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(value + token * value_stride + offset, mask=inside, other=0.0).to(tl.float32)
    k_scale = _scale_of(tl.max(tl.abs(k), 1), LARGEST)
    v_scale = _scale_of(tl.max(tl.abs(v), 1), LARGEST)
    dtype: tl.constexpr = k_values.dtype.element_ty
    tl.store(k_values + slot * slot_stride + offset, _to_8_bits(k / k_scale[:, None], dtype), mask=inside)
    tl.store(v_values + slot * slot_stride + offset, _to_8_bits(v / v_scale[:, None], dtype), mask=inside)
    tl.store(k_scales + scale_offset, k_scale, mask=row < KV_HEADS)
    tl.store(v_scales + scale_offset, v_scale, mask=row < KV_HEADS)


def store(key: Tensor, value: Tensor, k_cache: Quantized, v_cache: Quantized, slot_mapping: Tensor) -> None:
    """Quantise row t of `key` and `value`, `[tokens, kv_heads, head_dim]`, into slot `slot_mapping[t]`; -1: nothing."""
    tokens, kv_heads, head_dim = key.shape
    for name, tensor in (("key", key), ("value", value)):
        if tensor.stride(1) != head_dim or tensor.stride(2) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; a token's heads must be adjacent: {[head_dim, 1]}")
    _store_kernel[(tokens,)](
        key,
        value,
        k_cache.values,
        v_cache.values,
        k_cache.scales,
        v_cache.scales,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        k_cache.values.stride(1),
        KV_HEADS=kv_heads,
        HEADS_PAD=triton.next_power_of_2(kv_heads),
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=k_cache.values.shape[1],
        LARGEST=LARGEST[k_cache.values.dtype],
        num_warps=4,
    )
