"""Prefill over an 8-bit cache: dequantise the context once, then use stage D's kernel.

A prefill reads every key once for each tile of queries, hundreds of times for a long prompt. Converting a key at every
read would repeat the conversion as often, and Hopper's copy engine could not load it as an operand of the product. So a
layer's keys and values, for sequences with several queries, are first written to scratch memory in 16 bits, a small
part of the work of a long prompt. (A few queries after a long context lose time: they would read each key about once.)

Scratch memory has room for every entry of the block tables. If that exceeds `SCRATCH_BYTES` (many sequences in the same
step), stage D's kernel gets the 8-bit values and the scales.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from beyond.quantization.formats import Quantized
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.attention import triton_prefill as in_16_bits
from stage_d_paged.attention.triton_prefill import PrefillConfig

SCRATCH_BYTES = 1 << 28  # for the keys and values of one layer
TOKENS_PER_PROGRAM = 64


def choose_prefill_config(element_size: int, head_dim: int) -> PrefillConfig:
    """Choose the tiles; `element_size` is that of the queries."""
    if head_dim > 128:
        return in_16_bits.choose_prefill_config(element_size, False, 0, head_dim)
    if element_size == 4:  # tensor cores do not multiply float32 at full precision: small tiles
        return PrefillConfig(block_m=32, block_n=32, num_warps=8, num_stages=2)
    return PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)


@triton.jit(do_not_specialize=["table_width"])
def dequantize_blocks_kernel(
    keys,
    values,
    k_values,
    v_values,
    k_scales,
    v_scales,
    block_tables,
    context_lens,
    cu_seqlens_q,
    table_width,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,  # keys that a query sees; 0: all
):
    """Write TOKENS keys and values of one head as `value * scale`, to the block numbered as its table entry."""
    entry = tl.program_id(0)
    seq = entry // table_width
    kv_head = tl.program_id(1) % KV_HEADS
    token = tl.program_id(1) // KV_HEADS * TOKENS + tl.arange(0, TOKENS)
    context_len = tl.load(context_lens + seq)
    first = entry % table_width * BLOCK_SIZE  # first position of the block
    query_len = tl.load(cu_seqlens_q + seq + 1) - tl.load(cu_seqlens_q + seq)
    is_read = (query_len > 1) & (first < context_len)
    if WINDOW > 0:
        is_read = is_read & (first + BLOCK_SIZE > context_len - query_len + 1 - WINDOW)
    if is_read:
        block = tl.load(block_tables + entry).to(tl.int64)
        valid = (token < BLOCK_SIZE) & (first + token < context_len)
        column = tl.arange(0, HEAD_PAD)[None, :]
        inside = valid[:, None] & (column < HEAD_DIM)
        in_block = (token[:, None] * KV_HEADS + kv_head) * HEAD_DIM + column
        source = block * (BLOCK_SIZE * KV_HEADS * HEAD_DIM) + in_block
        target = entry.to(tl.int64) * (BLOCK_SIZE * KV_HEADS * HEAD_DIM) + in_block
        scale_offset = (block * KV_HEADS + kv_head) * BLOCK_SIZE + token
        k_scale = tl.load(k_scales + scale_offset, mask=valid, other=0.0)[:, None]
        v_scale = tl.load(v_scales + scale_offset, mask=valid, other=0.0)[:, None]
        k = tl.load(k_values + source, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_values + source, mask=inside, other=0.0).to(tl.float32)
        tl.store(keys + target, k * k_scale, mask=inside)
        tl.store(values + target, v * v_scale, mask=inside)


def dequantize_blocks(
    k_cache: Quantized, v_cache: Quantized, metadata: AttentionMetadata, dtype: torch.dtype, window: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy the blocks of all sequences with more than one query to scratch memory, in `dtype`.

    Returns keys and values, `[seqs * table_width, block_size, kv_heads, head_dim]`, and the block tables for them.
    Blocks of other sequences or before the window, and tokens past a context's end, are uninitialised.
    """
    seqs, width = metadata.block_tables.shape
    block_size, kv_heads, head_dim = k_cache.values.shape[1:]
    device = k_cache.values.device
    keys, values = torch.empty(2, seqs * width, block_size, kv_heads, head_dim, dtype=dtype, device=device)
    tokens = min(TOKENS_PER_PROGRAM, triton.next_power_of_2(block_size))
    dequantize_blocks_kernel[seqs * width, kv_heads * triton.cdiv(block_size, tokens)](
        keys,
        values,
        k_cache.values,
        v_cache.values,
        k_cache.scales,
        v_cache.scales,
        metadata.block_tables,
        metadata.context_lens,
        metadata.cu_seqlens_q,
        width,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        TOKENS=tokens,
        WINDOW=window,
        num_warps=4,
    )
    return keys, values, torch.arange(seqs * width, dtype=torch.int32, device=device).view(seqs, width)


def prefill(
    query: Tensor,  # [tokens, heads, head_dim]
    k_cache: Quantized,
    v_cache: Quantized,
    metadata: AttentionMetadata,
    scale: float,
    out: Tensor,  # [tokens, heads, head_dim], contiguous
    window: int = 0,
) -> None:
    """Write to `out` the attention of every sequence that has more than one query; other rows are left alone."""
    block_size, kv_heads, head_dim = k_cache.shape[1:]
    block_bytes = 2 * block_size * kv_heads * head_dim * query.element_size()
    if metadata.block_tables.numel() * block_bytes <= SCRATCH_BYTES:
        *caches, tables = dequantize_blocks(k_cache, v_cache, metadata, query.dtype, window)
        in_16_bits.prefill(query, *caches, replace(metadata, block_tables=tables), scale, out, window=window)
        return
    config, scales = choose_prefill_config(query.element_size(), head_dim), (k_cache.scales, v_cache.scales)
    in_16_bits.prefill(query, k_cache.values, v_cache.values, metadata, scale, out, config, scales, window)
