"""Triton kernel for decode over an 8-bit cache: stage D's kernel, with half the bytes to read.

The scales are not applied to the tiles. A key's scale multiplies its *score*, a value's scale its *weight*:

    q · (s k) = s (q · k)            sum_i p_i (s_i v_i) = sum_i (p_i s_i) v_i

so a tile of 64 keys of 128 numbers takes 64 multiplications, not 8192. The 8-bit values are exact in bfloat16 (and in
float16), so the tensor cores multiply the stored values; the sums are float32.

Keys and values are the left operands, queries the right ones: the tensor cores' tiles are at least 16 high but only 8
wide, and a group has a few heads. Stage D's order pads a group of 7 heads to 16, this order to 8.

Block table, splits and combine are stage D's functions.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from beyond.quantization.conversion import keep_layout, to_16_bits
from beyond.quantization.formats import Quantized
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.attention.decode_plan import DecodeConfig, plan_decode
from stage_d_paged.attention.triton_decode import LOG2_E, first_visible, look_up, slots_of, write_result


@triton.jit
def quantized_online_softmax(
    q,
    k_values,
    v_values,
    k_scales,
    v_scales,
    table,
    block,
    first,
    step,
    context_len,
    kv_head,
    slot_stride,
    scale_log2,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Attend to the tiles of BLOCK_N keys that begin at first, first + step, … below `context_len`.

    `q` is [GROUP_PAD, HEAD_PAD]; `block` is `look_up` of the first tile. Returns (values [GROUP_PAD, HEAD_PAD], log2 of
    the sum of all weights [GROUP_PAD]); without any key these are zeros and -inf.
    """
    key = tl.arange(0, BLOCK_N)
    column = tl.arange(0, HEAD_PAD)[None, :]
    q = tl.trans(q)
    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([HEAD_PAD, GROUP_PAD], tl.float32)
    for start in range(first, context_len, step):
        valid = start + key < context_len
        if WINDOW > 0:
            valid = valid & (start + key >= context_len - WINDOW)
        inside = valid[:, None] & (column < HEAD_DIM)
        slot = slots_of(block, start, key, BLOCK_SIZE, BLOCK_N)
        # Look the next tile up here: at the top of the next iteration it would cost a stage of the load pipeline.
        block = look_up(table, start + step, context_len, BLOCK_SIZE, BLOCK_N)
        offset = slot[:, None] * slot_stride + kv_head * HEAD_DIM + column
        scale_offset = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        k = tl.load(k_values + offset, mask=inside, other=0.0)  # [BLOCK_N, HEAD_PAD], 8 bits
        v = tl.load(v_values + offset, mask=inside, other=0.0)
        k_scale = tl.load(k_scales + scale_offset, mask=valid, other=0.0)  # [BLOCK_N]
        v_scale = tl.load(v_scales + scale_offset, mask=valid, other=0.0)
        scores = tl.dot(to_16_bits(k, q.dtype), q, input_precision=PRECISION)  # [BLOCK_N, GROUP_PAD]
        scores = tl.where(valid[:, None], scores * (k_scale * scale_log2)[:, None], float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 0))
        shrink = tl.exp2(highest - new_highest)
        p = tl.exp2(scores - new_highest[None, :])
        total = total * shrink + tl.sum(p, 0)
        weighted = (p * v_scale[:, None]).to(q.dtype)
        v = tl.trans(to_16_bits(keep_layout(v), q.dtype))
        acc = tl.dot(v, weighted, acc * shrink[None, :], input_precision=PRECISION)
        highest = new_highest
    total = tl.where(total == 0.0, 1.0, total)  # without any key
    return tl.trans(acc) / total[:, None], highest + tl.log2(total)


# Not specialised on sizes that change from step to step: each new specialisation would be a compilation.
@triton.jit(do_not_specialize=["num_splits", "split_keys", "table_width"])
def quantized_decode_kernel(
    out,
    query,
    k_values,
    v_values,
    k_scales,
    v_scales,
    block_tables,
    context_lens,
    cu_seqlens_q,
    partial_out,
    partial_lse,
    arrival_counters,
    scale_log2,
    query_stride,
    slot_stride,
    table_width,
    num_splits,
    split_keys,
    MIXED: tl.constexpr,  # the batch also has sequences of several queries, which the prefill kernel serves
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Attend with one query per sequence; arguments as of stage D's `decode_kernel`, and the scales."""
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(0) // KV_HEADS % num_splits
    seq = (tl.program_id(0) // KV_HEADS // num_splits).to(tl.int64)
    token = seq
    if MIXED:
        token = tl.load(cu_seqlens_q + seq).to(tl.int64)
        if tl.load(cu_seqlens_q + seq + 1) - token != 1:
            return
    row = tl.arange(0, GROUP_PAD)[:, None]
    column = tl.arange(0, HEAD_PAD)[None, :]
    head = kv_head * GROUP  # the first query head of the group
    table = block_tables + seq * table_width
    context_len = tl.load(context_lens + seq)
    first = 0
    if WINDOW > 0:
        first = first_visible(context_len, WINDOW, BLOCK_N)
    block = look_up(table, first + split * BLOCK_N, table_width * BLOCK_SIZE, BLOCK_SIZE, BLOCK_N)
    splits = tl.maximum(tl.minimum(num_splits, tl.cdiv(context_len - first, split_keys)), 1)  # splits that have work
    if split >= splits:
        return
    query_offset = token * query_stride + (head + row) * HEAD_DIM + column
    q = tl.load(query + query_offset, mask=(row < GROUP) & (column < HEAD_DIM), other=0.0)  # [GROUP_PAD, HEAD_PAD]
    acc, lse = quantized_online_softmax(
        q,
        k_values,
        v_values,
        k_scales,
        v_scales,
        table,
        block,
        first + split * BLOCK_N,
        splits * BLOCK_N,
        context_len,
        kv_head,
        slot_stride,
        scale_log2,
        KV_HEADS,
        HEAD_DIM,
        HEAD_PAD,
        GROUP_PAD,
        BLOCK_SIZE,
        BLOCK_N,
        PRECISION,
        WINDOW,
    )
    heads: tl.constexpr = KV_HEADS * GROUP
    write_result(
        acc,
        lse,
        out + (token * heads + head) * HEAD_DIM,
        partial_out,
        partial_lse,
        arrival_counters + seq * KV_HEADS + kv_head,
        seq * heads + head,
        split,
        splits,
        num_splits,
        GROUP,
        GROUP_PAD,
        ROWS,
        SPLITS_PAD,
        AHEAD,
        HEAD_DIM,
        HEAD_PAD,
    )


def choose_quantized_config(pairs: int, head_dim: int, element_size: int, stored: torch.dtype) -> DecodeConfig | None:
    """Choose the config measured on an H200 with 32 contexts of 640 and of 4096; None means stage D's choice.

    With int8 and heads of 128, one warp per program was the fastest, because it never waits for other warps. Other
    formats were only tried with two warps. `pairs` is sequences × KV heads: fewer than 64 were not tried, nor were
    heads of more than 128. `element_size` is the query's: float32 uses stage D's small tiles.
    """
    if pairs < 64 or element_size == 4 or head_dim > 128:
        return None
    if stored == torch.int8 and head_dim > 64:
        return DecodeConfig(32, num_warps=1, num_stages=3, programs_per_sm=8, min_splits=2)
    return DecodeConfig(64, num_warps=2, num_stages=3, programs_per_sm=4, min_splits=2)


def decode(
    query: Tensor,  # [tokens, heads, head_dim]
    k_cache: Quantized,
    v_cache: Quantized,
    metadata: AttentionMetadata,
    scale: float,
    out: Tensor,  # [tokens, heads, head_dim], contiguous
    arrival_counters: Tensor,  # int32 [seqs * kv_heads] at least, zeros; left as zeros
    sm_count: int,
    config: DecodeConfig | None = None,
    window: int = 0,
) -> None:
    """Write to `out` the attention of every sequence that has exactly one query; other rows are left alone."""
    tables, lengths, values = metadata.block_tables, metadata.context_lens, k_cache.values
    kv_heads, head_dim = values.shape[2:]
    if config is None:
        config = choose_quantized_config(len(lengths) * kv_heads, head_dim, query.element_size(), values.dtype)
    plan = plan_decode(
        len(lengths), metadata.max_context_len, query.shape[1], *values.shape[1:], query.dtype, sm_count, config, window
    )
    constants = plan.constants | {"GROUP_PAD": max(8, plan.constants["ROWS"])}  # columns of the products here
    partial_out, partial_lse = plan.make_partials(query.device)
    quantized_decode_kernel[plan.programs,](
        out,
        query,
        values,
        v_cache.values,
        k_cache.scales,
        v_cache.scales,
        tables,
        lengths,
        metadata.cu_seqlens_q,
        partial_out,
        partial_lse,
        arrival_counters,
        scale * LOG2_E,
        query.stride(0),
        values.stride(1),
        tables.stride(0),
        plan.num_splits,
        plan.split_keys,
        MIXED=metadata.max_query_len > 1,
        **constants,
    )
