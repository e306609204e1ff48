"""Triton kernel for prefill: several queries per sequence, causal, keys read through a block table.

This is flash attention (Dao 2023, arXiv:2307.08691). Each program takes a tile of queries and processes the keys one
tile at a time, with an online softmax (`triton_decode.py` has the simpler loop). The [queries, keys] matrix never
exists in memory. The loop has two parts: first the key tiles that every query of the tile sees completely (without a
mask; nearly all of a long context), then the few key tiles on the diagonal.

Two ideas fit a flat batch of sequences of different lengths:
- A query tile's rows are (token, head of the group) pairs, so one read of a key serves all heads that share it, and a
  sequence with few queries still fills the rows.
- The number of query tiles is bounded without knowing the lengths: sequence s starts at tile cu_seqlens_q[s] // tile +
  s. A program finds its sequence by bisection over cu_seqlens_q (the scheme of vLLM's unified Triton attention kernel).
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .interface import AttentionMetadata
from .triton_decode import LOG2_E, first_visible, look_up, slots_of


@dataclass(frozen=True)
class PrefillConfig:
    """Tuning of the prefill kernel; `choose_prefill_config` has the measured choices."""

    block_m: int  # rows of a query tile: tokens × heads of a group
    block_n: int  # keys per tile
    num_warps: int
    num_stages: int


def choose_prefill_config(element_size: int, hopper: bool, tokens: int, head_dim: int = 128) -> PrefillConfig:
    """Return the fastest configuration tried on an H200; on other GPUs, one with fewer stages (less shared memory)."""
    if head_dim > 128:  # a key of 256 numbers is as long as two: small tiles, for the shared memory of any GPU
        block = 16 if element_size == 4 else 32
        return PrefillConfig(block_m=64 if element_size == 2 else 32, block_n=block, num_warps=8, num_stages=2)
    if element_size == 4:  # tensor cores do not multiply float32 at full precision: small tiles
        return PrefillConfig(block_m=32, block_n=32, num_warps=8, num_stages=2)
    if hopper and tokens >= 4096:  # large tiles are still enough for all multiprocessors, and read keys less often
        return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)
    return PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3 if hopper else 2)


@triton.jit
def find_sequence(tile, cu_seqlens_q, num_seqs, TILE: tl.constexpr):
    """Find the last sequence whose first tile is at or before `tile`."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(cu_seqlens_q + middle) // TILE + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _scales_of(block, start, key, kv_head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute where the scales of the keys `start + key` are stored, int64 [BLOCK_N]; `block` as in `slots_of`."""
    offset = start % BLOCK_SIZE + key if BLOCK_SIZE % BLOCK_N == 0 else (start + key) % BLOCK_SIZE
    return (block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + offset


@triton.jit
def _attend_to_keys(
    acc,
    total,
    highest,
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    k_tiles,
    v_tiles,
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
    WINDOW: tl.constexpr,
):
    """Continue the online softmax of a query tile over the keys first … last - 1."""
    key = tl.arange(0, BLOCK_N)
    column = tl.arange(0, HEAD_PAD)
    pool_column = kv_head * HEAD_DIM + column[None, :]
    block = look_up(table, first, last, BLOCK_SIZE, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        valid = start + key < last
        if MASKED and WINDOW > 0:  # do not read keys that no query sees: their blocks may belong to others
            valid = valid & (start + key > tl.min(position, 0) - WINDOW)
        slot = slots_of(block, start, key, BLOCK_SIZE, BLOCK_N)
        first_slot = block * BLOCK_SIZE + start % BLOCK_SIZE
        scale_offset = _scales_of(block, start, key, kv_head, KV_HEADS, BLOCK_SIZE, BLOCK_N)
        # Issue the next tile's lookup here: at the top of the next iteration it would cost a stage of the load
        # pipeline.
        block = look_up(table, start + BLOCK_N, last, BLOCK_SIZE, BLOCK_N)
        pool_offset = slot[:, None] * slot_stride + pool_column
        if k_tiles is not None and not MASKED:  # the copy engine fetches the whole tile
            k = k_tiles.load([first_slot, kv_head * HEAD_DIM])
            v = v_tiles.load([first_slot, kv_head * HEAD_DIM])
        elif MASKED:
            inside = valid[:, None] & (column < HEAD_DIM)[None, :]
            k = tl.load(k_cache + pool_offset, mask=inside, other=0.0)  # [BLOCK_N, HEAD_PAD]
            v = tl.load(v_cache + pool_offset, mask=inside, other=0.0)
        elif HEAD_DIM == HEAD_PAD:
            k = tl.load(k_cache + pool_offset)
            v = tl.load(v_cache + pool_offset)
        else:
            k = tl.load(k_cache + pool_offset, mask=(column < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_cache + pool_offset, mask=(column < HEAD_DIM)[None, :], other=0.0)
        if k_scales is not None:  # a key's scale multiplies its score, a value's scale its weight
            k_scale = tl.load(k_scales + scale_offset, mask=valid, other=0.0)  # [BLOCK_N]
            v_scale = tl.load(v_scales + scale_offset, mask=valid, other=0.0)
            k = k.to(q.dtype)
            v = v.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if k_scales is not None:
            scores *= k_scale[None, :]
        if MASKED:
            scores = tl.where((start + key)[None, :] <= position[:, None], scores, float("-inf"))
        if MASKED and WINDOW > 0:
            scores = tl.where((start + key)[None, :] > position[:, None] - WINDOW, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        if MASKED and WINDOW > 0:  # a row whose window has not begun yet; -inf minus -inf would be NaN
            new_highest = tl.maximum(new_highest, -1e30)
        p = tl.exp2(scores * scale_log2 - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(p, 1)
        if k_scales is not None:
            p *= v_scale[None, :]
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        highest = new_highest
    return acc, total, highest


# Not specialised on sizes that change from step to step, because each new specialisation would be compiled.
@triton.jit(do_not_specialize=["table_width", "num_seqs"])
def _prefill_kernel(
    out,  # [tokens, heads, head_dim]
    query,  # [tokens, heads, head_dim]
    k_cache,  # [blocks, block_size, kv_heads, head_dim]
    v_cache,
    k_scales,  # float32 [blocks, kv_heads, block_size]: what a head's stored numbers are multiplied by; or None
    v_scales,
    k_tiles,  # TMA descriptors of [slots, kv_heads * head_dim] in tiles [BLOCK_N, head_dim], or None
    v_tiles,
    block_tables,  # [seqs, table_width]
    context_lens,  # [seqs]
    cu_seqlens_q,  # [seqs + 1]
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
    WINDOW: tl.constexpr,  # keys that a query sees; 0: all
):
    TILE: tl.constexpr = BLOCK_M // GROUP  # tokens per query tile
    kv_head = tl.program_id(0) % KV_HEADS
    # The last tiles of a sequence have the most keys. They start first, so that short tiles fill the gaps at the end.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
    seq = find_sequence(tile, cu_seqlens_q, num_seqs, TILE)
    seq_start = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - seq_start
    tile_start = (tile - seq_start // TILE - seq) * TILE
    if (tile_start >= query_len) | (query_len <= 1):  # the decode kernel handles single queries
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
    # Without a window, all queries of the tile see the keys up to its first query.
    diagonal = tl.maximum((cached + tile_start + 1) // BLOCK_N * BLOCK_N, 0)
    end = tl.minimum(cached + tile_start + TILE, context_len)
    begin = 0
    if WINDOW > 0:
        # The first query's window begins at `first`; from `begin` on keys are in the windows of all of the tile.
        first = first_visible(cached + tile_start + 1, WINDOW, BLOCK_N)
        begin = tl.cdiv(tl.maximum(cached + tile_start + TILE - WINDOW, first), BLOCK_N) * BLOCK_N
        begin = tl.minimum(begin, diagonal)
        acc, total, highest = _attend_to_keys(
            acc,
            total,
            highest,
            q,
            k_cache,
            v_cache,
            k_scales,
            v_scales,
            k_tiles,
            v_tiles,
            table,
            first,
            begin,
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
            WINDOW,
        )
    acc, total, highest = _attend_to_keys(
        acc,
        total,
        highest,
        q,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        k_tiles,
        v_tiles,
        table,
        begin,
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
        WINDOW,
    )
    acc, total, highest = _attend_to_keys(
        acc,
        total,
        highest,
        q,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        k_tiles,
        v_tiles,
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
        WINDOW,
    )
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a padding sequence has no keys: zeros
    out_offset = flat_token[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + head_offset
    tl.store(out + out_offset, acc.to(out.dtype.element_ty), mask=inside)


@cache
def _is_hopper(device: torch.device) -> bool:
    """Return whether the GPU has a tensor memory accelerator and 227 KiB of shared memory per program.

    Hopper and Blackwell (compute capabilities 9 and 10) have both. GeForce cards of capability 12 have only 99 KiB.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def _has_gluon(device: torch.device) -> bool:
    """Return whether `hopper_prefill.py` runs: it needs Hopper's instructions, and Gluon as it is since Triton 3.6."""
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return version >= (3, 6) and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _descriptor(cache: torch.Tensor, block_n: int) -> TensorDescriptor | None:
    """Make the descriptor with which the tensor memory accelerator copies tiles of keys; None if it cannot.

    It needs tiles within one block and a head size that is a power of two.
    """
    blocks, block_size, kv_heads, head_dim = cache.shape
    if block_size % block_n or head_dim != triton.next_power_of_2(head_dim) or head_dim * cache.element_size() < 16:
        return None
    if not _is_hopper(cache.device):
        return None
    width = kv_heads * head_dim
    return TensorDescriptor(cache, [blocks * block_size, width], [width, 1], [block_n, head_dim])


def prefill(
    query: torch.Tensor,  # [tokens, heads, head_dim]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, head_dim]
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,  # [tokens, heads, head_dim], contiguous
    config: PrefillConfig | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    window: int = 0,
) -> None:
    """Write to `out` the attention of every sequence that has more than one query; leave other rows unchanged.

    `scales`: of keys and of values, float32 `[blocks, kv_heads, block_size]`, if each head of a token is stored in its
    own units; None if the pool holds the numbers themselves.
    """
    tokens, heads, head_dim = query.shape
    block_size, kv_heads = k_cache.shape[1:3]
    seqs, group = metadata.context_lens.shape[0], heads // kv_heads
    hopper = _is_hopper(query.device)
    if config is None and scales is None and not window and _has_gluon(query.device):
        from . import hopper_prefill  # here: other GPUs need no Gluon

        if hopper_prefill.takes(query, k_cache):
            hopper_prefill.prefill(query, k_cache, v_cache, metadata, scale, out)
            return
    config = config or choose_prefill_config(query.element_size(), hopper, tokens, head_dim)
    block_m = max(config.block_m, triton.next_power_of_2(group))
    k_tiles, v_tiles = None, None
    if scales is None:
        k_tiles, v_tiles = (_descriptor(cache, config.block_n) for cache in (k_cache, v_cache))
    tiles = tokens // (block_m // group) + seqs
    _prefill_kernel[(tiles * kv_heads,)](
        out,
        query,
        k_cache,
        v_cache,
        *(scales or (None, None)),
        k_tiles,
        v_tiles,
        metadata.block_tables,
        metadata.context_lens,
        metadata.cu_seqlens_q,
        scale * LOG2_E,
        query.stride(0),
        k_cache.stride(1),
        metadata.block_tables.stride(0),
        seqs,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        WINDOW=window,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
