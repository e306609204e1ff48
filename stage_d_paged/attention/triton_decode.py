"""Triton kernel for decode: one query a sequence, split over the length of the context.

A decode step reads every key and value once and does almost no arithmetic with them: its speed is memory bandwidth, and
bandwidth needs many loads in flight on every multiprocessor. One program a (sequence, KV head) pair would leave most of
the chip idle for a small batch, so the context is split ("flash decoding", Dao et al. 2023): split i takes key blocks
i, i + splits, i + 2 * splits, …, and whichever split of a sequence finishes last combines the partial results.

    softmax over a union: o = sum_i 2^(lse_i - lse) * o_i,  lse = log2 sum_i 2^lse_i

The query heads that share a KV head are the rows of one matrix product (padded to 16 rows, the smallest that the matrix
units take), so each key is read once for the whole group. The grid depends only on shapes and on `max_context_len`;
lengths are read on the device, so a captured CUDA graph stays right when the lengths change.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from . import AttentionMetadata
from .early_start import early_start

LOG2_E = 1.4426950408889634
MAX_SPLITS = 64


@dataclass(frozen=True)
class DecodeConfig:
    """Tuning of the decode kernel; `choose_decode_config` has the measured choices."""

    block_n: int  # keys a step of a program
    num_warps: int
    num_stages: int  # key blocks in flight
    programs_per_sm: int  # the context is split until the grid has this many programs a multiprocessor,
    split_keys: int = 64  # but no part is shorter than this: combining has its cost
    least_splits: int = 1  # two even out what sequences of unequal lengths cost


def choose_decode_config(head_dim: int, element_size: int, pairs: int, sm_count: int) -> DecodeConfig:
    """The fastest of those tried on an H200. `pairs` is sequences × KV heads."""
    if element_size == 4:  # float32 at full precision has no matrix unit: small tiles
        return DecodeConfig(16, num_warps=4, num_stages=2, programs_per_sm=4, least_splits=2)
    if pairs < sm_count:  # few programs, each alone on its multiprocessor: wide, for the shortest way through
        return DecodeConfig(64, num_warps=4, num_stages=2, programs_per_sm=8)
    # Enough programs to hide one another's waits: one warp each, which never waits for other warps.
    if head_dim <= 64:
        return DecodeConfig(32, num_warps=1, num_stages=4, programs_per_sm=8, least_splits=2)
    if pairs <= 4 * sm_count:
        return DecodeConfig(32, num_warps=1, num_stages=2, programs_per_sm=8, least_splits=2)
    return DecodeConfig(64, num_warps=4, num_stages=3, programs_per_sm=1)


@triton.jit
def look_up(table, start, last, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each of the keys start … start + BLOCK_N - 1 (below `last`), or the one page that holds them all."""
    key = start if PAGE % BLOCK_N == 0 else start + tl.arange(0, BLOCK_N)
    return tl.load(table + key // PAGE, mask=key < last, other=0)


@triton.jit
def _combine(
    out_row, partial_out, partial_lse, first, splits, num_splits,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SPLITS_PAD: tl.constexpr, AHEAD: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Merge the `splits` partial results of each of GROUP rows: one (sequence, KV head).

    What costs here is waiting for memory, so the loads of AHEAD splits are in flight together and nothing is stored
    before the end. ".cg" goes past the L1 cache, which does not see what other multiprocessors wrote.
    """
    row = tl.arange(0, ROWS)
    split = tl.arange(0, SPLITS_PAD)
    column = tl.arange(0, HEAD_PAD)
    part = (first + tl.minimum(row, GROUP - 1)) * num_splits  # rows past the group repeat its last
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
            there = start + ahead < splits
            weight = tl.load(partial_lse + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            values = tl.load(
                partial_out + at[:, None] * HEAD_DIM + column[None, :],
                mask=there & (column < HEAD_DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            acc += tl.exp2(weight - highest)[:, None] * values
    acc = acc / total[:, None]
    out_offset = row[:, None] * HEAD_DIM + column[None, :]
    inside = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(out_row + out_offset, acc.to(out_row.dtype.element_ty), mask=inside)


# Not specialised on sizes that change from step to step: each new specialisation would be a compilation.
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
    arrivals,  # int32 [seqs, kv_heads], zero before and after
    scale_log2,
    query_stride,
    slot_stride,
    table_width,
    num_splits,
    split_keys,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,  # rows of the matrix product
    ROWS: tl.constexpr,  # rows when combining: the power of two from GROUP up
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    AHEAD: tl.constexpr,
    MIXED: tl.constexpr,  # the batch also has sequences of several queries, which are not this kernel's
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,  # see early_start.py
):
    # Neighbouring programs take the heads of one stretch of keys: together they read whole rows of the pool.
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(0) // KV_HEADS % num_splits
    seq = (tl.program_id(0) // KV_HEADS // num_splits).to(tl.int64)
    token = seq
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if MIXED:
        token = tl.load(cu_seqlens_q + seq).to(tl.int64)
        if tl.load(cu_seqlens_q + seq + 1) - token != 1:
            if EARLY:
                tl.extra.cuda.gdc_wait()
            return
    row = tl.arange(0, GROUP_PAD)
    column = tl.arange(0, HEAD_PAD)
    key = tl.arange(0, BLOCK_N)
    inside = (column < HEAD_DIM)[None, :]
    rows_inside = (row < GROUP)[:, None] & inside
    head_offset = (kv_head * GROUP + row)[:, None] * HEAD_DIM + column[None, :]
    table = block_tables + seq * table_width
    pool_column = kv_head * HEAD_DIM + column[None, :]
    # Length, first page and query do not depend on one another: the three loads travel together. (The first page may
    # be an unused entry of the table; then no key of it is read.) Lengths and pages are known before the step begins;
    # the query and the newest key are the work of the kernel in front.
    context_len = tl.load(context_lens + seq)
    page = look_up(table, split * BLOCK_N, table_width * PAGE, PAGE, BLOCK_N)
    splits = tl.maximum(tl.minimum(num_splits, tl.cdiv(context_len, split_keys)), 1)  # those that have work
    if EARLY:
        if split >= splits:
            return  # the first split of each sequence waits
        tl.extra.cuda.gdc_wait()
    q = tl.load(query + token * query_stride + head_offset, mask=rows_inside, other=0.0)  # [GROUP_PAD, HEAD_PAD]
    if split >= splits:
        return

    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    step = splits * BLOCK_N
    for start in range(split * BLOCK_N, context_len, step):
        valid = start + key < context_len
        if PAGE % BLOCK_N == 0:
            slot = page.to(tl.int64) * PAGE + start % PAGE + key
        else:
            slot = page.to(tl.int64) * PAGE + (start + key) % PAGE
        # Looked up a step early: inside the step the lookup would cost a stage of the load pipeline.
        page = look_up(table, start + step, context_len, PAGE, BLOCK_N)
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
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a padding sequence has no keys: zeros

    heads = KV_HEADS * GROUP
    if splits == 1:
        tl.store(out + token * (heads * HEAD_DIM) + head_offset, acc.to(out.dtype.element_ty), mask=rows_inside)
    else:
        first = seq * heads + kv_head * GROUP
        part = (first + row) * num_splits + split
        tl.store(partial_out + part[:, None] * HEAD_DIM + column[None, :], acc, mask=rows_inside)
        tl.store(partial_lse + part, highest + tl.log2(total), mask=row < GROUP)
        tl.debug_barrier()  # every thread's part is written before one thread announces it
        counter = arrivals + seq * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(counter, 0)  # ready for the next launch
            out_row = out + (token * heads + kv_head * GROUP) * HEAD_DIM
            _combine(
                out_row, partial_out, partial_lse, first, splits, num_splits,
                GROUP, ROWS, SPLITS_PAD, AHEAD, HEAD_DIM, HEAD_PAD,
            )  # fmt: skip


def decode(
    query: torch.Tensor,  # [tokens, heads, head_dim]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, head_dim]
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,  # [tokens, heads, head_dim], contiguous
    arrivals: torch.Tensor,  # int32 [seqs * kv_heads] at least, zeros; left as zeros
    sm_count: int,
    config: DecodeConfig | None = None,
) -> None:
    """Write to `out` the attention of every sequence that has exactly one query; other rows are left alone."""
    page, kv_heads = k_cache.shape[1:3]
    _, heads, head_dim = query.shape
    tables, lengths = metadata.block_tables, metadata.context_lens
    num_splits, split_keys, num_partial, settings = _plan(
        len(lengths), metadata.max_context_len, metadata.max_query_len > 1, heads, kv_heads, head_dim, page,
        query.dtype, sm_count, config,
    )  # fmt: skip
    partial = torch.empty(num_partial + num_partial // head_dim, dtype=torch.float32, device=query.device)
    decode_kernel[len(lengths) * num_splits * kv_heads,](
        out, query, k_cache, v_cache, tables, lengths, metadata.cu_seqlens_q, partial, partial[num_partial:], arrivals,
        scale * LOG2_E, query.stride(0), k_cache.stride(1), tables.stride(0), num_splits, split_keys,
        **settings, **early_start(query.device),
    )  # fmt: skip


@lru_cache(maxsize=64)
def _plan(
    seqs: int, max_context_len: int, mixed: bool, heads: int, kv_heads: int, head_dim: int, page: int,
    dtype: torch.dtype, sm_count: int, config: DecodeConfig | None,
) -> tuple[int, int, int, dict[str, object]]:  # fmt: skip
    """How a launch is cut: splits, the least keys of one, numbers in their results, and the kernel's constants.

    All layers of a step ask for the same, and finding it out takes as long as half a launch: hence the cache.
    """
    config = config or choose_decode_config(head_dim, dtype.itemsize, seqs * kv_heads, sm_count)
    wanted = max(sm_count * config.programs_per_sm // (seqs * kv_heads), config.least_splits)
    split_keys = max(config.split_keys, config.block_n)
    num_splits = max(1, min(wanted, MAX_SPLITS, triton.cdiv(max_context_len, split_keys)))
    group = heads // kv_heads
    settings = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "GROUP_PAD": max(16, triton.next_power_of_2(group)),
        "ROWS": triton.next_power_of_2(group),
        "HEAD_DIM": head_dim,
        "HEAD_PAD": triton.next_power_of_2(head_dim),
        "PAGE": page,
        "BLOCK_N": config.block_n,
        "SPLITS_PAD": MAX_SPLITS,
        "AHEAD": 16 if config.num_warps == 4 else 8,  # as many as one warp has registers for
        "MIXED": mixed,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return num_splits, split_keys, seqs * heads * num_splits * head_dim, settings
