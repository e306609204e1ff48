"""Triton kernels that quantise keys and values and store them in their blocks.

One program reads a whole head of a token, finds its largest number, divides, rounds, and writes the values and the
scale. Stage F's `rotate_and_store`, given scales, does this right after the rotation, so quantising costs no launch and
no read; `store` is for stage D's layers, which rotate separately.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from beyond.quantization.formats import LARGEST, Quantized
from stage_f_graph_tp.kernels import elementwise
from stage_f_graph_tp.kernels.elementwise import nearest, scale_of


def rotate_and_store(
    qkv: Tensor,
    num_heads: int,
    rotary: tuple[Tensor, Tensor],
    positions: Tensor,
    layer_cache: tuple[Quantized, Quantized],
    *rest: Any,
    pdl: bool = True,
) -> Tensor:
    """Launch stage F's `rotate_and_store` for an 8-bit cache; same arguments and result."""
    values, scales = zip(*layer_cache, strict=True)
    return elementwise.rotate_and_store(qkv, num_heads, rotary, positions, values, *rest, scales=scales, pdl=pdl)


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
    k_scale = scale_of(tl.max(tl.abs(k), 1), LARGEST)
    v_scale = scale_of(tl.max(tl.abs(v), 1), LARGEST)
    dtype: tl.constexpr = k_values.dtype.element_ty
    tl.store(k_values + slot * slot_stride + offset, nearest(k / k_scale[:, None], dtype), mask=inside)
    tl.store(v_values + slot * slot_stride + offset, nearest(v / v_scale[:, None], dtype), mask=inside)
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
