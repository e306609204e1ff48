"""Prefill over an 8-bit cache: dequantise the context once, and let stage D's kernel attend to it.

A prefill reads every key once for each tile of queries, hundreds of times for a long prompt. What is converted when it
is read is converted as often, and Hopper's copy engine cannot fetch it into the operands of the product. So a layer's
keys and values, of the sequences that have several queries, are written to scratch memory in 16 bits first, a small
part of the work of a long prompt. (A few queries behind a long context lose by it: they would read a key about once.)

Scratch memory has room for every entry of the block tables. Where that is more than `SCRATCH_BYTES` (many sequences
beside the prompt), `quantized_prefill_kernel` reads 8 bits instead: stage D's loop, with scales on scores and weights.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from beyond.quantization.conversion import to_16_bits
from beyond.quantization.formats import Quantized
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.attention.triton_decode import LOG2_E, look_up, slots_of
from stage_d_paged.attention.triton_prefill import PrefillConfig, find_sequence
from stage_d_paged.attention.triton_prefill import prefill as prefill_in_16_bits

SCRATCH_BYTES = 1 << 28  # for the keys and values of one layer
TOKENS_PER_PROGRAM = 64


def choose_prefill_config(element_size: int) -> PrefillConfig:
    """Choose the tiles; `element_size` is that of the queries."""
    if element_size == 4:  # tensor cores do not multiply float32 at full precision: small tiles
        return PrefillConfig(block_m=32, block_n=32, num_warps=8, num_stages=2)
    return PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)


@triton.jit
def _attend_to_keys(
    acc,
    total,
    highest,
    q,
    k_values,
    v_values,
    k_scales,
    v_scales,
    table,
    first,
    last,
    position,
    kv_head,
    scale_log2,
    slot_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Continue the online softmax of a query tile over the keys first … last - 1."""
    key = tl.arange(0, BLOCK_N)
    column = tl.arange(0, HEAD_PAD)[None, :]
    block = look_up(table, first, last, BLOCK_SIZE, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        valid = start + key < last
        slot = slots_of(block, start, key, BLOCK_SIZE, BLOCK_N)
        if BLOCK_SIZE % BLOCK_N == 0:  # the tile's scales are adjacent
            scale_offset = (block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + start % BLOCK_SIZE + key
        else:
            scale_offset = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        # The next tile's lookup is issued here: at the top of its own step it would cost a stage of the load pipeline.
        block = look_up(table, start + BLOCK_N, last, BLOCK_SIZE, BLOCK_N)
        offset = slot[:, None] * slot_stride + kv_head * HEAD_DIM + column
        inside = valid[:, None] & (column < HEAD_DIM) if MASKED else column < HEAD_DIM
        k = tl.load(k_values + offset, mask=inside, other=0.0)  # [BLOCK_N, HEAD_PAD], 8 bits
        v = tl.load(v_values + offset, mask=inside, other=0.0)
        k_scale = tl.load(k_scales + scale_offset, mask=valid, other=0.0)  # [BLOCK_N]
        v_scale = tl.load(v_scales + scale_offset, mask=valid, other=0.0)
        scores = tl.dot(q, tl.trans(to_16_bits(k, q.dtype)), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        scores = scores * k_scale[None, :]
        if MASKED:
            scores = tl.where((start + key)[None, :] <= position[:, None], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(p, 1)
        weighted = (p * v_scale[None, :]).to(q.dtype)
        acc = tl.dot(weighted, to_16_bits(v, q.dtype), acc * shrink[:, None], input_precision=PRECISION)
        highest = new_highest
    return acc, total, highest


# Not specialised on sizes that change from step to step: each new specialisation would be a compilation.
@triton.jit(do_not_specialize=["table_width", "num_seqs"])
def quantized_prefill_kernel(
    out,
    query,
    k_values,
    v_values,
    k_scales,
    v_scales,
    block_tables,
    context_lens,
    cu_seqlens_q,
    scale_log2,
    query_stride,
    slot_stride,
    table_width,
    num_seqs,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with one tile of queries per program; the arguments are those of stage D's kernel, and the scales."""
    TILE: tl.constexpr = BLOCK_M // GROUP  # tokens per query tile
    kv_head = tl.program_id(0) % KV_HEADS
    # The last tiles of a sequence have the most keys. They start first, so that short ones fill the end.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
    seq = find_sequence(tile, cu_seqlens_q, num_seqs, TILE)
    seq_start = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - seq_start
    tile_start = (tile - seq_start // TILE - seq) * TILE
    if (tile_start >= query_len) | (query_len <= 1):  # the decode kernel serves single queries
        return
    context_len = tl.load(context_lens + seq)
    cached = context_len - query_len

    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, HEAD_PAD)
    token = tile_start + row // GROUP  # within the sequence
    head = kv_head * GROUP + row % GROUP
    position = cached + token
    inside = ((row < TILE * GROUP) & (token < query_len))[:, None] & (column < HEAD_DIM)[None, :]
    flat_token = (seq_start + token).to(tl.int64)
    head_offset = head[:, None] * HEAD_DIM + column[None, :]
    q = tl.load(query + flat_token[:, None] * query_stride + head_offset, mask=inside, other=0.0)

    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    table = block_tables + seq.to(tl.int64) * table_width
    # Keys up to the tile's first query are seen by all of its queries.
    diagonal = tl.maximum((cached + tile_start + 1) // BLOCK_N * BLOCK_N, 0)
    end = tl.minimum(cached + tile_start + TILE, context_len)
    acc, total, highest = _attend_to_keys(
        acc,
        total,
        highest,
        q,
        k_values,
        v_values,
        k_scales,
        v_scales,
        table,
        0,
        diagonal,
        position,
        kv_head,
        scale_log2,
        slot_stride,
        KV_HEADS,
        HEAD_DIM,
        HEAD_PAD,
        BLOCK_SIZE,
        BLOCK_N,
        False,
        PRECISION,
    )
    acc, total, highest = _attend_to_keys(
        acc,
        total,
        highest,
        q,
        k_values,
        v_values,
        k_scales,
        v_scales,
        table,
        diagonal,
        end,
        position,
        kv_head,
        scale_log2,
        slot_stride,
        KV_HEADS,
        HEAD_DIM,
        HEAD_PAD,
        BLOCK_SIZE,
        BLOCK_N,
        True,
        PRECISION,
    )
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a padding sequence has no keys: zeros
    out_offset = flat_token[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + head_offset
    tl.store(out + out_offset, acc.to(out.dtype.element_ty), mask=inside)


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
):
    """Write TOKENS keys and values of one head as `value * scale`, to the block that is numbered as its table entry."""
    entry = tl.program_id(0)
    seq = entry // table_width
    kv_head = tl.program_id(1) % KV_HEADS
    token = tl.program_id(1) // KV_HEADS * TOKENS + tl.arange(0, TOKENS)
    context_len = tl.load(context_lens + seq)
    first = entry % table_width * BLOCK_SIZE  # of the block's positions
    is_prefill = tl.load(cu_seqlens_q + seq + 1) - tl.load(cu_seqlens_q + seq) > 1
    if is_prefill & (first < context_len):
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
    k_cache: Quantized, v_cache: Quantized, metadata: AttentionMetadata, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the blocks of all sequences that have more than one query once more, in `dtype`.

    Returns keys and values, `[seqs * table_width, block_size, kv_heads, head_dim]`, and the block tables for them.
    Blocks of other sequences, and tokens past a context's end, are uninitialised.
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
) -> None:
    """Write to `out` the attention of every sequence that has more than one query; other rows are left alone."""
    tokens, heads, head_dim = query.shape
    values = k_cache.values
    block_size, kv_heads = values.shape[1:3]
    block_bytes = 2 * block_size * kv_heads * head_dim * query.element_size()
    if metadata.block_tables.numel() * block_bytes <= SCRATCH_BYTES:
        *caches, tables = dequantize_blocks(k_cache, v_cache, metadata, query.dtype)
        prefill_in_16_bits(query, *caches, replace(metadata, block_tables=tables), scale, out)
        return
    seqs, group = metadata.context_lens.shape[0], heads // kv_heads
    config = choose_prefill_config(query.element_size())
    block_m = max(config.block_m, triton.next_power_of_2(group))
    tiles = tokens // (block_m // group) + seqs
    quantized_prefill_kernel[(tiles * kv_heads,)](
        out,
        query,
        values,
        v_cache.values,
        k_cache.scales,
        v_cache.scales,
        metadata.block_tables,
        metadata.context_lens,
        metadata.cu_seqlens_q,
        scale * LOG2_E,
        query.stride(0),
        values.stride(1),
        metadata.block_tables.stride(0),
        seqs,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        PRECISION="ieee" if query.dtype.itemsize == 4 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
