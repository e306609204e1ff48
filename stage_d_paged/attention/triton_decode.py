"""Triton kernel for decode: one query per sequence, keys and values read through a block table.

Read it in four steps; each is a function:

1. **Block table** (`look_up`, `slots_of`). Key `i` of a sequence is stored in block `table[i // BLOCK_SIZE]` of the
   pool, at offset `i % BLOCK_SIZE`.
2. **Online softmax** (`online_softmax`). A program reads its keys one tile at a time and keeps a running maximum, a
   running sum and a running weighted sum of the values. The scores are never stored (Dao 2023, arXiv:2307.08691).
3. **Splits** (`decode_kernel`). A decode step reads every key and value once and does almost no arithmetic with them:
memory bandwidth limits its speed, and full bandwidth needs many loads in flight on every multiprocessor. One program
per
   (sequence, KV head) pair would leave most of the chip idle for a small batch. So the context is split ("flash
   decoding", Dao et al. 2023): split `i` reads the tiles `i, i + splits, i + 2 * splits, …`.
4. **Combine** (`combine`). The split of a sequence that finishes last merges the partial results:

       softmax over a union: o = sum_i 2^(lse_i - lse) * o_i,  lse = log2 sum_i 2^lse_i

The query heads that share a KV head (grouped-query attention) are packed as the rows of one matrix product, padded to
16 rows, the smallest that the tensor cores take: each key is read once for the whole group. The grid depends only on
shapes and on `max_context_len`. The kernel reads the lengths on the device, so the CPU does not need them.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .decode_plan import DecodeConfig, plan_decode
from .interface import AttentionMetadata

LOG2_E = 1.4426950408889634


@triton.jit
def look_up(table, start, last, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Read the block ids of the keys start … start + BLOCK_N - 1 (below `last`); one id if one block holds them all."""
    key = start if BLOCK_SIZE % BLOCK_N == 0 else start + tl.arange(0, BLOCK_N)
    return tl.load(table + key // BLOCK_SIZE, mask=key < last, other=0)


@triton.jit
def slots_of(block, start, key, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute the slots in the pool of the keys `start + key`, int64 [BLOCK_N], from the block ids of `look_up`."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return block.to(tl.int64) * BLOCK_SIZE + start % BLOCK_SIZE + key
    return block.to(tl.int64) * BLOCK_SIZE + (start + key) % BLOCK_SIZE


@triton.jit
def first_visible(context_len, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the start of the tile that contains the first of the last WINDOW keys."""
    return tl.maximum(context_len - WINDOW, 0) // BLOCK_N * BLOCK_N


@triton.jit
def online_softmax(
    q,
    k_cache,
    v_cache,
    table,
    block,
    first,
    step,
    context_len,
    pool_column,
    slot_stride,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr = 0,
):
    """Attend to the tiles of BLOCK_N keys that begin at first, first + step, … below `context_len`.

    `q` is [GROUP_PAD, HEAD_PAD]; `block` is `look_up` of the first tile; `pool_column` [1, HEAD_PAD] is the offset of a
    head's numbers within a slot. With a WINDOW, only the last WINDOW keys count. Returns (values [GROUP_PAD, HEAD_PAD],
    log2 of the sum of all weights [GROUP_PAD]); without any key these are zeros and -inf.
    """
    key = tl.arange(0, BLOCK_N)
    inside = (tl.arange(0, HEAD_PAD) < HEAD_DIM)[None, :]
    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for start in range(first, context_len, step):
        valid = start + key < context_len
        if WINDOW > 0:
            valid = valid & (start + key >= context_len - WINDOW)
        slot = slots_of(block, start, key, BLOCK_SIZE, BLOCK_N)
        # Issue the next tile's lookup here: at the top of the next iteration it would cost a stage of the load
        # pipeline.
        block = look_up(table, start + step, context_len, BLOCK_SIZE, BLOCK_N)
        pool_offset = slot[:, None] * slot_stride + pool_column
        k = tl.load(k_cache + pool_offset, mask=valid[:, None] & inside, other=0.0)  # [BLOCK_N, HEAD_PAD]
        v = tl.load(v_cache + pool_offset, mask=valid[:, None] & inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2  # [GROUP_PAD, BLOCK_N]
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - new_highest)
        p = tl.exp2(scores - new_highest[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        highest = new_highest
    total = tl.where(total == 0.0, 1.0, total)  # without any key
    return acc / total[:, None], highest + tl.log2(total)


@triton.jit
def combine(
    out_rows,
    partial_out,
    partial_lse,
    first,
    splits,
    num_splits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    AHEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """Merge the `splits` partial results of each of GROUP rows: one (sequence, KV head) pair.

    Most of its time is waiting for memory, so the loads of AHEAD splits are in flight together, and nothing is stored
    before the end. ".cg" bypasses the L1 cache, which does not see writes of other multiprocessors.
    """
    row = tl.arange(0, ROWS)
    split = tl.arange(0, SPLITS_PAD)
    column = tl.arange(0, HEAD_PAD)
    part = (first + tl.minimum(row, GROUP - 1)) * num_splits  # rows beyond the group repeat its last row
    lse = tl.load(
        partial_lse + part[:, None] + split[None, :],
        mask=(split < splits)[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    highest = tl.max(lse, 1)
    total = tl.sum(tl.exp2(lse - highest[:, None]), 1)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    for start in range(0, splits, AHEAD):
        for ahead in tl.static_range(AHEAD):
            at = part + start + ahead
            present = start + ahead < splits
            weight = tl.load(partial_lse + at, mask=present, other=float("-inf"), cache_modifier=".cg")
            values = tl.load(
                partial_out + at[:, None] * HEAD_DIM + column[None, :],
                mask=present & (column < HEAD_DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            acc += tl.exp2(weight - highest)[:, None] * values
    acc = acc / total[:, None]
    inside = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(out_rows + row[:, None] * HEAD_DIM + column[None, :], acc.to(out_rows.dtype.element_ty), mask=inside)


@triton.jit
def write_result(
    acc,
    lse,
    out_rows,
    partial_out,
    partial_lse,
    counter,
    first,
    split,
    splits,
    num_splits,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    AHEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """Store one split's result; the last of several splits to arrive at `counter` combines them all.

    `out_rows` points at the output of the group's first head; `first` is that head's row, counted over the batch.
    """
    row = tl.arange(0, GROUP_PAD)
    column = tl.arange(0, HEAD_PAD)
    inside = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    if splits == 1:
        tl.store(out_rows + row[:, None] * HEAD_DIM + column[None, :], acc.to(out_rows.dtype.element_ty), mask=inside)
    else:
        part = (first + row) * num_splits + split
        tl.store(partial_out + part[:, None] * HEAD_DIM + column[None, :], acc, mask=inside)
        tl.store(partial_lse + part, lse, mask=row < GROUP)
        tl.debug_barrier()  # every thread's part is written before one thread counts it
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(counter, 0)  # ready for the next launch
            combine(
                out_rows,
                partial_out,
                partial_lse,
                first,
                splits,
                num_splits,
                GROUP,
                ROWS,
                SPLITS_PAD,
                AHEAD,
                HEAD_DIM,
                HEAD_PAD,
            )


# Not specialised on sizes that change from step to step, because each new specialisation would be compiled.
@triton.jit(do_not_specialize=["num_splits", "split_keys", "table_width"])
def decode_kernel(
    out,  # [tokens, heads, head_dim]
    query,  # [tokens, heads, head_dim]
    k_cache,  # [blocks, block_size, kv_heads, head_dim]
    v_cache,
    block_tables,  # [seqs, table_width]
    context_lens,  # [seqs]
    cu_seqlens_q,  # [seqs + 1]
    partial_out,  # float32 [seqs, heads, splits, head_dim]
    partial_lse,  # float32 [seqs, heads, splits]
    arrival_counters,  # int32 [seqs, kv_heads], zero before and after
    scale_log2,
    query_stride,
    slot_stride,
    table_width,
    num_splits,
    split_keys,
    MIXED: tl.constexpr,  # the batch also has sequences with several queries, which the prefill kernel handles
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,  # rows of the matrix product
    ROWS: tl.constexpr,  # rows when combining: the power of two from GROUP up
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,  # keys that a query sees; 0: all
):
    # Neighbouring programs take the heads of the same keys: together they read whole rows of the pool.
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
    # Length, first block and query are independent, so the three loads are in flight together. (The first block may be
    # an unused entry of the table; then none of its keys is read.)
    context_len = tl.load(context_lens + seq)
    first = 0
    if WINDOW > 0:
        first = first_visible(context_len, WINDOW, BLOCK_N)
    block = look_up(table, first + split * BLOCK_N, table_width * BLOCK_SIZE, BLOCK_SIZE, BLOCK_N)
    query_offset = token * query_stride + (head + row) * HEAD_DIM + column
    q = tl.load(query + query_offset, mask=(row < GROUP) & (column < HEAD_DIM), other=0.0)  # [GROUP_PAD, HEAD_PAD]
    splits = tl.maximum(tl.minimum(num_splits, tl.cdiv(context_len - first, split_keys)), 1)  # splits that have work
    if split >= splits:
        return
    acc, lse = online_softmax(
        q,
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


def decode(
    query: torch.Tensor,  # [tokens, heads, head_dim]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, head_dim]
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,  # [tokens, heads, head_dim], contiguous
    arrival_counters: torch.Tensor,  # int32 [seqs * kv_heads] at least, zeros; left as zeros
    sm_count: int,
    config: DecodeConfig | None = None,
    window: int = 0,
) -> None:
    """Write to `out` the attention of every sequence that has exactly one query; leave other rows unchanged."""
    tables, lengths = metadata.block_tables, metadata.context_lens
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
    decode_kernel[plan.programs,](
        out,
        query,
        k_cache,
        v_cache,
        tables,
        lengths,
        metadata.cu_seqlens_q,
        partial_out,
        partial_lse,
        arrival_counters,
        scale * LOG2_E,
        query.stride(0),
        k_cache.stride(1),
        tables.stride(0),
        plan.num_splits,
        plan.split_keys,
        MIXED=metadata.max_query_len > 1,
        **plan.constants,
    )
