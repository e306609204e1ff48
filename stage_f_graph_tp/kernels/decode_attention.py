"""Stage D's decode attention, launched by programmatic dependent launch (`pdl.py`).

The look-up of blocks and the combine are stage D's functions. Only the start is new, while the previous kernel still
runs. Lengths and block tables are known before the step begins, so a program loads them first. The previous kernel
writes the query and the newest key, so the program waits before it reads them.

All other keys and values were written by earlier steps. So the loop over the keys begins before the wait: the compiler
issues the loads of its first tiles ahead of the first iteration, and that iteration waits before it reads the query.
The first split adds the newest key after its loop. This is not allowed if a step writes more keys than the newest
one: if drafts have rows, or if a prompt shares a block that another prompt fills in this step
(`AttentionMetadata.one_new_key`). Then the program waits first, and the loop is stage D's `online_softmax`.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.attention.decode_plan import DecodeConfig, plan_decode
from stage_d_paged.attention.triton_decode import (
    LOG2_E,
    decode,
    first_visible,
    look_up,
    online_softmax,
    slots_of,
    write_result,
)
from stage_d_paged.attention.triton_paged import Kernels
from stage_f_graph_tp.kernels.pdl import pdl_settings, start_next, wait_for_previous


@triton.jit
def rescale(scores, highest, total, acc):
    """Return the weights of more scores, [GROUP_PAD, n], and the running maximum, sum and values with them in mind."""
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    return weights, new_highest, total * shrink + tl.sum(weights, 1), acc * shrink[:, None]


@triton.jit
def early_softmax(
    query,
    query_inside,
    k_cache,
    v_cache,
    table,
    block,
    first,
    step,
    context_len,
    split,
    pool_column,
    slot_stride,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Do what stage D's `online_softmax` does, but read all keys except the newest before the previous kernel ends.

    `query` holds addresses, [GROUP_PAD, HEAD_PAD]. The first split adds the newest key.
    """
    old = context_len - 1  # the keys of earlier steps
    key = tl.arange(0, BLOCK_N)
    inside = (tl.arange(0, HEAD_PAD) < HEAD_DIM)[None, :]
    q = tl.zeros([GROUP_PAD, HEAD_PAD], query.dtype.element_ty)
    highest, total = tl.full([GROUP_PAD], float("-inf"), tl.float32), tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for start in range(first, old, step):
        valid = start + key < old
        if WINDOW > 0:
            valid = valid & (start + key >= context_len - WINDOW)
        slot = slots_of(block, start, key, BLOCK_SIZE, BLOCK_N)
        block = look_up(table, start + step, old, BLOCK_SIZE, BLOCK_N)
        pool_offset = slot[:, None] * slot_stride + pool_column
        k = tl.load(k_cache + pool_offset, mask=valid[:, None] & inside, other=0.0)  # [BLOCK_N, HEAD_PAD]
        v = tl.load(v_cache + pool_offset, mask=valid[:, None] & inside, other=0.0)
        if start == first:
            wait_for_previous(PDL)
            q = tl.load(query, mask=query_inside, other=0.0)
        scores = tl.where(valid, tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2, float("-inf"))
        weights, highest, total, acc = rescale(scores, highest, total, acc)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    wait_for_previous(PDL)  # at once, unless the loop had no iteration
    if (split == 0) & (context_len > 0):
        newest = tl.load(table + old // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + old % BLOCK_SIZE
        pool_offset = newest * slot_stride + pool_column
        k = tl.load(k_cache + pool_offset, mask=inside, other=0.0).to(tl.float32)  # [1, HEAD_PAD]
        v = tl.load(v_cache + pool_offset, mask=inside, other=0.0).to(tl.float32)
        q = tl.load(query, mask=query_inside, other=0.0)
        score = tl.sum(q.to(tl.float32) * k, 1, keep_dims=True) * scale_log2  # [GROUP_PAD, 1]
        weights, highest, total, acc = rescale(score, highest, total, acc)
        acc += weights * v
    total = tl.where(total == 0.0, 1.0, total)  # without any key
    return acc / total[:, None], highest + tl.log2(total)


@triton.jit(do_not_specialize=["num_splits", "split_keys", "table_width"])
def dependent_decode_kernel(
    out,
    query,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    partial_out,
    partial_lse,
    arrival_counters,
    scale_log2,
    query_stride,
    slot_stride,
    table_width,
    num_splits,
    split_keys,
    PDL: tl.constexpr,
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
    ONE_NEW_KEY: tl.constexpr,
):
    """Attend with one query per sequence; arguments as of stage D's `decode_kernel`."""
    start_next(PDL)
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(0) // KV_HEADS % num_splits
    seq = (tl.program_id(0) // KV_HEADS // num_splits).to(tl.int64)
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
        return  # without a wait: the first split of each sequence waits
    query += seq * query_stride + (head + row) * HEAD_DIM + column
    query_inside = (row < GROUP) & (column < HEAD_DIM)
    if ONE_NEW_KEY:
        acc, lse = early_softmax(
            query,
            query_inside,
            k_cache,
            v_cache,
            table,
            block,
            first + split * BLOCK_N,
            splits * BLOCK_N,
            context_len,
            split,
            kv_head * HEAD_DIM + column,
            slot_stride,
            scale_log2,
            HEAD_DIM,
            HEAD_PAD,
            GROUP_PAD,
            BLOCK_SIZE,
            BLOCK_N,
            PRECISION,
            PDL,
            WINDOW,
        )
    else:
        wait_for_previous(PDL)
        acc, lse = online_softmax(
            tl.load(query, mask=query_inside, other=0.0),  # [GROUP_PAD, HEAD_PAD]
            k_cache,
            v_cache,
            table,
            block,
            first + split * BLOCK_N,
            splits * BLOCK_N,
            context_len,
            kv_head * HEAD_DIM + column,
            slot_stride,
            scale_log2,
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
        out + (seq * heads + head) * HEAD_DIM,
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


def dependent_decode(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
    arrival_counters: torch.Tensor,
    sm_count: int,
    window: int = 0,
) -> None:
    """Launch stage D's decode attention by PDL; arguments as of `decode`, which serves mixed batches."""
    if metadata.max_query_len > 1:
        decode(query, k_cache, v_cache, metadata, scale, out, arrival_counters, sm_count, window=window)
        return
    tables, lengths = metadata.block_tables, metadata.context_lens
    early = metadata.one_new_key and query.shape[2] <= 64 and 2 * len(lengths) * k_cache.shape[2] <= sm_count
    config = None
    if early and query.element_size() == 2:
        # Two tiles in flight and four programs per multiprocessor: all programs run at once, none in a second round.
        config = DecodeConfig(64, num_warps=4, num_stages=3, programs_per_sm=4)
    plan = plan_decode(
        len(lengths),
        metadata.max_context_len,
        query.shape[1],
        *k_cache.shape[1:],
        query.dtype,
        sm_count,
        config,
        window,
    )
    partial_out, partial_lse = plan.make_partials(query.device)
    dependent_decode_kernel[plan.programs,](
        out,
        query,
        k_cache,
        v_cache,
        tables,
        lengths,
        partial_out,
        partial_lse,
        arrival_counters,
        scale * LOG2_E,
        query.stride(0),
        k_cache.stride(1),
        tables.stride(0),
        plan.num_splits,
        plan.split_keys,
        ONE_NEW_KEY=early,
        **plan.constants,
        **pdl_settings(query.device),
    )


DEPENDENT = Kernels(decode=dependent_decode)
