"""Prefill kernel for Hopper, in Gluon: a warp that copies, and groups of warps that multiply.

The kernel computes what `triton_prefill.py` computes. There, all warps of a program do the same, and Triton waits for
every product before the softmax that reads it: tensor cores and exponentials take turns. Here the work is divided
(FlashAttention-3, Shah et al. 2024, arXiv:2407.08608):

- One warp, the **producer**, lets the copy engine fetch tiles of keys and values into a ring of STAGES buffers.
- Two groups of four warps, the **consumers**, own 64 rows of queries each and never wait for each other.

Heads of 128: a consumer starts the product of a tile's scores and the product of the previous tile's weights and
values, and computes the tile's weights during the second product. Heads of 64 need fewer registers, so two programs fit
on a multiprocessor: while one of the four consumers computes exponentials, the products of others run.

Barriers in shared memory (`mbarrier`) connect them: `full` when a tile has arrived, `empty` when both consumers have
read it. Gluon is Triton's language one level down: layouts, buffers and waits are written out. It runs on no CPU, so
the tests compare this kernel with the definition on a GPU only.
"""

# A launch passes plain numbers for constexpr arguments, and options of Triton's that no kernel declares. Gluon's types
# say nothing of constants and tensors: a layout may be a constexpr, and a number that a loop changes is a tensor.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .interface import AttentionMetadata
from .triton_decode import LOG2_E

ROWS = 64  # of a consumer: what one warp group multiplies
CONSUMERS = 2
COPY = 64  # keys per copy: a tile may span blocks


@dataclass(frozen=True)
class HopperConfig:
    """Tuning of the kernel: the fastest of those tried on an H200."""

    block_n: int  # keys per tile
    num_stages: int
    overlap: bool  # start the next scores before the values are multiplied
    registers: int  # per thread of a consumer
    max_registers: int | None  # per thread when the kernel starts; 80 lets two programs run on a multiprocessor


CONFIGS = {
    64: HopperConfig(block_n=64, num_stages=4, overlap=False, registers=104, max_registers=80),
    128: HopperConfig(block_n=128, num_stages=2, overlap=True, registers=240, max_registers=None),
}  # by head size
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 renamed it


@gluon.jit
def _copy_tile(
    pool, table, i, last_block, column, buffer, full, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Start the copies of tile i; keys beyond the last block are a copy of others, and weigh nothing."""
    mbarrier.expect(full, BLOCK_N * HEAD_DIM * 2)
    for j in gl.static_range(BLOCK_N // COPY):
        start = i * BLOCK_N + j * COPY
        block = gl.maximum(gl.load(table + gl.minimum(start // BLOCK_SIZE, last_block)), 0)
        for c in gl.static_range(HEAD_DIM // 64):
            part = buffer.slice(j * COPY, COPY, 0).slice(c * 64, 64, 1)
            tma.async_copy_global_to_shared(
                pool, [block * BLOCK_SIZE + start % BLOCK_SIZE, column + c * 64], full, part
            )


@gluon.jit
def _produce(
    k_pool, v_pool, table, last_block, column, tiles, shared,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Fetch all tiles, each as soon as the consumers have left its buffer."""
    _, k_tiles, v_tiles, barriers = shared
    k_full, v_full, k_empty, v_empty = barriers
    for i in range(tiles):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        _copy_tile(
            k_pool, table, i, last_block, column, k_tiles.index(stage), k_full.index(stage),
            HEAD_DIM, BLOCK_N, BLOCK_SIZE, COPY,
        )  # fmt: skip
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        _copy_tile(
            v_pool, table, i, last_block, column, v_tiles.index(stage), v_full.index(stage),
            HEAD_DIM, BLOCK_N, BLOCK_SIZE, COPY,
        )  # fmt: skip


@gluon.jit
def _clean(values, first, context_len, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr):
    """Zero the values of keys beyond the context: their weight is 0, but 0 · NaN is NaN."""
    if first + BLOCK_N > context_len:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
        key = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
        read = values.load(layout)
        values.store(gl.where((key < context_len)[:, None], read, gl.zeros_like(read)))
        fence_async_shared()
        barrier()


@gluon.jit
def _weigh(scores, highest, total, scale_log2):
    """Compute a tile's weights, and the running maximum and sum (online softmax)."""
    new_highest = gl.maximum(highest, gl.max(scores, 1) * scale_log2)
    p = gl.exp2(scores * scale_log2 - new_highest[:, None])
    shrink = gl.exp2(highest - new_highest)
    return p, new_highest, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _attend_overlapping(
    acc, total, highest, weights, first, last, q, k_tiles, v_tiles, barriers, position, context_len, scale_log2,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Multiply the weights of tile i - 1 by its values while the weights of tile i are computed, for i in a range."""
    k_full, v_full, k_empty, v_empty = barriers
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, score_layout))
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    ROWS: gl.constexpr = q.shape[0]
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=score_layout)
    for i in range(first, last):
        stage = i % STAGES
        before = (i - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
        scores = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        if MASKED:
            _clean(v_tiles.index(before), (i - 1) * BLOCK_N, context_len, HEAD_DIM, BLOCK_N)
        pending = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        barrier()  # all four warps have read the keys
        mbarrier.arrive(k_empty.index(stage), count=1)
        if MASKED:
            scores = gl.where((i * BLOCK_N + key)[None, :] <= position[:, None], scores, float("-inf"))
        p, highest, total, shrink = _weigh(scores, highest, total, scale_log2)
        acc = warpgroup_mma_wait(0, deps=[pending])
        barrier()
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, out_layout))[:, None]
        weights = gl.convert_layout(p.to(weights.dtype), gl.DotOperandLayout(0, out_layout, 2))
    return acc, total, highest, weights


@gluon.jit
def _attend_in_turns(
    acc, total, highest, first, last, q, k_tiles, v_tiles, barriers, position, context_len, scale_log2,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Continue the online softmax over the tiles first … last - 1, one step after the other."""
    k_full, v_full, k_empty, v_empty = barriers
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    ROWS: gl.constexpr = q.shape[0]
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, score_layout))
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=score_layout)
    for i in range(first, last):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        scores = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        barrier()  # all four warps have read the keys
        mbarrier.arrive(k_empty.index(stage), count=1)
        if MASKED:
            scores = gl.where((i * BLOCK_N + key)[None, :] <= position[:, None], scores, float("-inf"))
        p, highest, total, shrink = _weigh(scores, highest, total, scale_log2)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, out_layout))[:, None]
        weights = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, out_layout, 2))
        mbarrier.wait(v_full.index(stage), phase)
        if MASKED:
            _clean(v_tiles.index(stage), i * BLOCK_N, context_len, HEAD_DIM, BLOCK_N)
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(weights, v_tiles.index(stage), acc, is_async=True)])
        barrier()
        mbarrier.arrive(v_empty.index(stage), count=1)
    return acc, total, highest


@gluon.jit
def _consume(
    out, query, scale_log2, query_stride, place, shared,
    PART: gl.constexpr, TILE: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Compute the attention of one consumer's rows."""
    seq_start, query_len, tile_start, cached, context_len, kv_head, unmasked, tiles = place
    queries, k_tiles, v_tiles, barriers = shared
    k_full, v_full, k_empty, v_empty = barriers
    ROWS: gl.constexpr = queries.shape[1]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])

    q = queries.index(PART)
    row = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, load_layout))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, load_layout))
    token = tile_start + row // GROUP
    inside = (row < TILE * GROUP) & (token < query_len)
    offset = (seq_start + token).to(gl.int64) * query_stride + (kv_head * GROUP + row % GROUP) * HEAD_DIM
    q.store(gl.load(query + offset[:, None] + column[None, :], mask=inside[:, None], other=0.0))
    fence_async_shared()
    barrier()

    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    position = cached + tile_start + (PART * ROWS + gl.arange(0, ROWS, layout=row_layout)) // GROUP
    highest = gl.full([ROWS], float("-inf"), gl.float32, layout=row_layout)
    total = gl.zeros([ROWS], gl.float32, layout=row_layout)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=out_layout)
    if OVERLAP:  # the first tile's weights; its values are multiplied while the second tile's weights are computed
        key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, score_layout))
        zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=score_layout)
        mbarrier.wait(k_full.index(0), 0)
        scores = warpgroup_mma(q, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        barrier()
        mbarrier.arrive(k_empty.index(0), count=1)
        if unmasked == 0:
            scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        p, highest, total, _ = _weigh(scores, highest, total, scale_log2)
        weights = gl.convert_layout(p.to(query.dtype.element_ty), weight_layout)
        acc, total, highest, weights = _attend_overlapping(
            acc, total, highest, weights, 1, unmasked, q, k_tiles, v_tiles, barriers, position, context_len,
            scale_log2, HEAD_DIM, BLOCK_N, STAGES, False,
        )  # fmt: skip
        acc, total, highest, weights = _attend_overlapping(
            acc, total, highest, weights, gl.maximum(unmasked, 1), tiles, q, k_tiles, v_tiles, barriers, position,
            context_len, scale_log2, HEAD_DIM, BLOCK_N, STAGES, True,
        )  # fmt: skip
        last = (tiles - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((tiles - 1) // STAGES) & 1)
        _clean(v_tiles.index(last), (tiles - 1) * BLOCK_N, context_len, HEAD_DIM, BLOCK_N)
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(weights, v_tiles.index(last), acc, is_async=True)])
    else:
        acc, total, highest = _attend_in_turns(
            acc, total, highest, 0, unmasked, q, k_tiles, v_tiles, barriers, position, context_len, scale_log2,
            HEAD_DIM, BLOCK_N, STAGES, False, query.dtype.element_ty,
        )  # fmt: skip
        acc, total, highest = _attend_in_turns(
            acc, total, highest, unmasked, tiles, q, k_tiles, v_tiles, barriers, position, context_len, scale_log2,
            HEAD_DIM, BLOCK_N, STAGES, True, query.dtype.element_ty,
        )  # fmt: skip

    row = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, out_layout))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, out_layout))
    token = tile_start + row // GROUP
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, out_layout))[:, None]
    acc = gl.where((cached + token >= 0)[:, None], acc, 0.0)  # a padding sequence has no keys
    inside = (row < TILE * GROUP) & (token < query_len)
    offset = ((seq_start + token).to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP) * HEAD_DIM
    gl.store(out + offset[:, None] + column[None, :], acc.to(out.dtype.element_ty), mask=inside[:, None])


# Not specialised on sizes that change from step to step, because each new specialisation would be compiled.
@gluon.jit(do_not_specialize=["table_width", "num_seqs"])
def hopper_prefill_kernel(
    out,  # [tokens, heads, head_dim]
    query,  # [tokens, heads, head_dim]
    k_pool,  # TMA descriptors of [slots, kv_heads * head_dim] in tiles [COPY, 64]
    v_pool,
    block_tables,  # [seqs, table_width]
    context_lens,  # [seqs]
    cu_seqlens_q,  # [seqs + 1]
    scale_log2,
    query_stride,
    table_width,
    num_seqs,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    COPY: gl.constexpr,
    OVERLAP: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    TILE: gl.constexpr = 2 * ROWS // GROUP  # tokens per query tile
    kv_head = gl.program_id(0) % KV_HEADS
    tile = (gl.num_programs(0) - 1 - gl.program_id(0)) // KV_HEADS
    seq = 0  # the last sequence whose first tile is at or before `tile`, by bisection
    high = num_seqs
    while high - seq > 1:
        middle = (seq + high) // 2
        before = gl.load(cu_seqlens_q + middle) // TILE + middle <= tile
        seq = gl.where(before, middle, seq)
        high = gl.where(before, high, middle)
    seq_start = gl.load(cu_seqlens_q + seq)
    query_len = gl.load(cu_seqlens_q + seq + 1) - seq_start
    query_len = gl.where(query_len > 1, query_len, 0)  # the decode kernel handles single queries
    tile_start = (tile - seq_start // TILE - seq) * TILE
    context_len = gl.load(context_lens + seq)
    cached = context_len - query_len
    table = block_tables + seq.to(gl.int64) * table_width
    last_block = gl.maximum(context_len - 1, 0) // BLOCK_SIZE
    # A program without queries computes one tile and stores nothing: a branch around all would not save more.
    works = tile_start < query_len
    end = gl.minimum(cached + tile_start + TILE, context_len)
    tiles = gl.maximum(gl.where(works, (end + BLOCK_N - 1) // BLOCK_N, 0), 1)
    unmasked = gl.maximum(cached + tile_start + 1, 0) // BLOCK_N  # a padding sequence has negative positions
    unmasked = gl.where(works, gl.minimum(unmasked, tiles), 0)

    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(query.dtype.element_ty, [2, ROWS, HEAD_DIM], swizzled)
    k_tiles = gl.allocate_shared_memory(query.dtype.element_ty, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    v_tiles = gl.allocate_shared_memory(query.dtype.element_ty, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)  # consumers
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    barrier()
    barriers = (k_full, v_full, k_empty, v_empty)
    place = (seq_start, query_len, tile_start, cached, context_len, kv_head, unmasked, tiles)
    shared = (queries, k_tiles, v_tiles, barriers)
    gl.warp_specialize(
        [
            (_consume, (out, query, scale_log2, query_stride, place, shared,
                        0, TILE, KV_HEADS, GROUP, HEAD_DIM, BLOCK_N, STAGES, OVERLAP)),
            (_consume, (out, query, scale_log2, query_stride, place, shared,
                        1, TILE, KV_HEADS, GROUP, HEAD_DIM, BLOCK_N, STAGES, OVERLAP)),
            (_produce, (k_pool, v_pool, table, last_block, kv_head * HEAD_DIM, tiles, shared,
                        HEAD_DIM, BLOCK_N, STAGES, BLOCK_SIZE, COPY)),
        ],
        [4, 1],  # warps of the second consumer and of the producer; the first has the kernel's
        [REGISTERS, 24],  # their registers per thread
    )  # fmt: skip


MIN_TOKENS = 4096  # with fewer, the smaller tiles of `triton_prefill.py` occupy more multiprocessors


def takes(query: torch.Tensor, cache: torch.Tensor) -> bool:
    """Tell whether a prefill on Hopper is for this kernel: many tokens, 16 bits, heads of 64 or 128, whole copies."""
    narrow = query.dtype == cache.dtype and query.element_size() == 2
    return narrow and query.shape[0] >= MIN_TOKENS and query.shape[-1] in CONFIGS and cache.shape[1] % COPY == 0


def prefill(
    query: torch.Tensor,  # [tokens, heads, head_dim]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, head_dim]
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,  # [tokens, heads, head_dim], contiguous
) -> None:
    """Write to `out` the attention of every sequence that has more than one query; leave other rows unchanged."""
    tokens, heads, head_dim = query.shape
    blocks, block_size, kv_heads, _ = k_cache.shape
    seqs, group, config = metadata.context_lens.shape[0], heads // kv_heads, CONFIGS[head_dim]
    shape, layout = [blocks * block_size, kv_heads * head_dim], gl.NVMMASharedLayout(128, 16, 2)
    pools = [TensorDescriptor(cache, shape, [shape[1], 1], [COPY, 64], layout) for cache in (k_cache, v_cache)]
    tiles = tokens // (CONSUMERS * ROWS // group) + seqs
    hopper_prefill_kernel[(tiles * kv_heads,)](
        out,
        query,
        *pools,
        metadata.block_tables,
        metadata.context_lens,
        metadata.cu_seqlens_q,
        scale * LOG2_E,
        query.stride(0),
        metadata.block_tables.stride(0),
        seqs,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        ROWS=ROWS,
        COPY=COPY,
        OVERLAP=config.overlap,
        REGISTERS=config.registers,
        num_warps=4,
        maxnreg=config.max_registers,
    )
