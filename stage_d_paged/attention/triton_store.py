"""Triton kernel: write the keys and values of new tokens into their blocks.

The model computes K and V for a flat batch; the slot mapping gives the place of each token's row in the pool. One
program copies one token's rows of K and V. Two `index_copy_` calls would not be enough: -1 in the slot mapping must
write nothing, and the host does not know these rows.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _store_kernel(
    key,
    value,
    k_cache,
    v_cache,
    slot_mapping,
    key_stride,
    value_stride,
    slot_stride,
    WIDTH: tl.constexpr,  # kv_heads * head_dim, which need not be a power of two (3 heads of 64)
    WIDTH_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    columns = tl.arange(0, WIDTH_PAD)
    inside = columns < WIDTH
    k = tl.load(key + token * key_stride + columns, mask=inside)
    v = tl.load(value + token * value_stride + columns, mask=inside)
    # slot is int64, because slot * slot_stride exceeds 2**31 in a pool of a few GiB.
    tl.store(k_cache + slot * slot_stride + columns, k, mask=inside)
    tl.store(v_cache + slot * slot_stride + columns, v, mask=inside)


def store(
    key: torch.Tensor,  # [tokens, kv_heads, head_dim]
    value: torch.Tensor,  # [tokens, kv_heads, head_dim]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, head_dim]
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,  # int64 [tokens]
) -> None:
    """Copy row t of `key` and `value` to slot `slot_mapping[t]`; -1 copies nothing."""
    tokens, kv_heads, head_dim = key.shape
    width = kv_heads * head_dim
    for name, tensor in (("key", key), ("value", value)):
        if tensor.stride(1) != head_dim or tensor.stride(2) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; a token's heads must be adjacent: {[head_dim, 1]}")
    _store_kernel[(tokens,)](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        k_cache.stride(1),
        WIDTH=width,
        WIDTH_PAD=1 << (width - 1).bit_length(),  # the power of two from `width` up
        num_warps=4,
    )
