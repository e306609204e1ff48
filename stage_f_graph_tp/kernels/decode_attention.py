"""Stage D's decode attention, started by programmatic dependent launch (`pdl.py`).

The loop over the keys and the combine are stage D's functions. New is only what a program does while the kernel in
front still runs: lengths and block tables are known before the step begins, so it loads those first; the query and the
newest key are the work of the kernel in front, so it waits before it reads them.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.attention.decode_plan import plan_decode
from stage_d_paged.attention.triton_decode import LOG2_E, decode, look_up, online_softmax, write_result
from stage_d_paged.attention.triton_paged import Kernels
from stage_f_graph_tp.kernels.pdl import pdl_settings, start_next, wait_for_previous


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
):
    """Attend with one query per sequence; the arguments are those of stage D's `decode_kernel`."""
    start_next(PDL)
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(0) // KV_HEADS % num_splits
    seq = (tl.program_id(0) // KV_HEADS // num_splits).to(tl.int64)
    row = tl.arange(0, GROUP_PAD)[:, None]
    column = tl.arange(0, HEAD_PAD)[None, :]
    head = kv_head * GROUP  # the first query head of the group
    table = block_tables + seq * table_width
    context_len = tl.load(context_lens + seq)
    block = look_up(table, split * BLOCK_N, table_width * BLOCK_SIZE, BLOCK_SIZE, BLOCK_N)
    splits = tl.maximum(tl.minimum(num_splits, tl.cdiv(context_len, split_keys)), 1)  # those that have work
    if split >= splits:
        return  # without a wait: the first split of each sequence waits
    wait_for_previous(PDL)
    query_offset = seq * query_stride + (head + row) * HEAD_DIM + column
    q = tl.load(query + query_offset, mask=(row < GROUP) & (column < HEAD_DIM), other=0.0)  # [GROUP_PAD, HEAD_PAD]
    acc, lse = online_softmax(
        q,
        k_cache,
        v_cache,
        table,
        block,
        split * BLOCK_N,
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
) -> None:
    """Launch stage D's decode attention by PDL; arguments as its `decode`, which serves mixed batches."""
    if metadata.max_query_len > 1:
        decode(query, k_cache, v_cache, metadata, scale, out, arrival_counters, sm_count)
        return
    tables, lengths = metadata.block_tables, metadata.context_lens
    plan = plan_decode(
        len(lengths), metadata.max_context_len, query.shape[1], *k_cache.shape[1:], query.dtype, sm_count
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
        **plan.constants,
        **pdl_settings(query.device),
    )


DEPENDENT = Kernels(decode=dependent_decode)
