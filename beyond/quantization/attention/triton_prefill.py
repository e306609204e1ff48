"""Triton kernel for prefill over an 8-bit cache: stage D's loop, with scales on scores and weights.

A tile of keys and values is read in 8 bits and converted in registers; `triton_decode.py` says why the scales need not
touch it. Stage D's kernel lets Hopper's copy engine fetch whole tiles into the operands of the product. Here the
conversion stands between the two, so tiles are loaded by the threads that convert them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from beyond.quantization.formats import Quantized
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.attention.triton_decode import LOG2_E, look_up, slots_of
from stage_d_paged.attention.triton_prefill import PrefillConfig, find_sequence


def choose_prefill_config(element_size: int) -> PrefillConfig:
    """Choose the tiles; `element_size` is that of the queries."""
    if element_size == 4:  # tensor cores do not multiply float32 at full precision: small tiles
        return PrefillConfig(block_m=32, block_n=32, num_warps=8, num_stages=2)
    return PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)


@triton.jit
def _attend_to_keys(
    acc, total, highest, q, k_values, v_values, k_scales, v_scales, table, first, last, position, kv_head, scale_log2,
    slot_stride, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax of a query tile over the keys first … last - 1."""
    key = tl.arange(0, BLOCK_N)
    column = tl.arange(0, HEAD_PAD)[None, :]
    block = look_up(table, first, last, BLOCK_SIZE, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        valid = start + key < last
        slot = slots_of(block, start, key, BLOCK_SIZE, BLOCK_N)
        # The next tile's lookup is issued here: at the top of its own step it would cost a stage of the load pipeline.
        block = look_up(table, start + BLOCK_N, last, BLOCK_SIZE, BLOCK_N)
        offset = slot[:, None] * slot_stride + kv_head * HEAD_DIM + column
        scale_offset = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        inside = valid[:, None] & (column < HEAD_DIM) if MASKED else column < HEAD_DIM
        k = tl.load(k_values + offset, mask=inside, other=0.0)  # [BLOCK_N, HEAD_PAD], 8 bits
        v = tl.load(v_values + offset, mask=inside, other=0.0)
        k_scale = tl.load(k_scales + scale_offset, mask=valid, other=0.0)  # [BLOCK_N]
        v_scale = tl.load(v_scales + scale_offset, mask=valid, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        scores = scores * (k_scale * scale_log2)[None, :]
        if MASKED:
            scores = tl.where((start + key)[None, :] <= position[:, None], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(p, 1)
        weighted = (p * v_scale[None, :]).to(q.dtype)
        acc = tl.dot(weighted, v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
        highest = new_highest
    return acc, total, highest


# Not specialised on sizes that change from step to step: each new specialisation would be a compilation.
@triton.jit(do_not_specialize=["table_width", "num_seqs"])
def quantized_prefill_kernel(
    out, query, k_values, v_values, k_scales, v_scales, block_tables, context_lens, cu_seqlens_q, scale_log2,
    query_stride, slot_stride, table_width, num_seqs,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
        acc, total, highest, q, k_values, v_values, k_scales, v_scales, table, 0, diagonal, position, kv_head,
        scale_log2, slot_stride, KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, BLOCK_N, False, PRECISION,
    )  # fmt: skip
    acc, total, highest = _attend_to_keys(
        acc, total, highest, q, k_values, v_values, k_scales, v_scales, table, diagonal, end, position, kv_head,
        scale_log2, slot_stride, KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a padding sequence has no keys: zeros
    out_offset = flat_token[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + head_offset
    tl.store(out + out_offset, acc.to(out.dtype.element_ty), mask=inside)


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
    seqs, group = metadata.context_lens.shape[0], heads // kv_heads
    config = choose_prefill_config(query.element_size())
    block_m = max(config.block_m, triton.next_power_of_2(group))
    tiles = tokens // (block_m // group) + seqs
    quantized_prefill_kernel[(tiles * kv_heads,)](
        out, query, values, v_cache.values, k_cache.scales, v_cache.scales, metadata.block_tables,
        metadata.context_lens, metadata.cu_seqlens_q, scale * LOG2_E, query.stride(0), values.stride(1),
        metadata.block_tables.stride(0), seqs,
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, HEAD_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size, BLOCK_M=block_m, BLOCK_N=config.block_n,
        PRECISION="ieee" if query.dtype.itemsize == 4 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
