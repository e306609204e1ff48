"""The Triton kernels of `skinny_gemm.py`, which explains what they compute and how they are divided.

All sums are float32, rounded once at the end. A kernel issues the loads for its end at its beginning, because each load
takes as long as a part of the product. Loads of data known before the step come before `wait_for_previous` (`pdl.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from stage_f_graph_tp.kernels.pdl import start_next, wait_for_previous
from stage_f_graph_tp.kernels.rank_sum import sum_of_ranks


@triton.jit
def _weight_tile(weight, row, row_inside, column, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """Load `weight[row, column]`, with `SIZE` columns; without masks if the tiles divide the matrix."""
    address = weight + row[:, None] * SIZE + column[None, :]
    if EVEN:
        return tl.load(address)
    return tl.load(address, mask=row_inside[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def token_tile(x, x_stride, token, token_inside, column, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """Load `x[token, column]`."""
    address = x + token[:, None] * x_stride + column[None, :]
    if EVEN:
        return tl.load(address, mask=token_inside[:, None], other=0.0)
    return tl.load(address, mask=token_inside[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def load_squares(squares, parts, tokens, token, token_inside, PARTS: tl.constexpr):
    """Load the sums of squares of each token, `[PARTS, BLOCK_M]`; the load overlaps with the product."""
    part = tl.arange(0, PARTS)
    inside = (part < parts)[:, None] & token_inside[None, :]
    return tl.load(squares + part[:, None] * tokens + token[None, :], mask=inside, other=0.0)


@triton.jit
def row_scale(sums, SIZE: tl.constexpr, eps):
    """Compute the scale of the norm from the sums of squares: `1 / sqrt(mean(x²) + eps)`, `[1, BLOCK_M]`."""
    return tl.rsqrt(tl.sum(sums, 0) / SIZE + eps)[None, :]


@triton.jit
def _paired_products(
    x,
    x_stride,
    token,
    token_inside,
    weight,
    first,
    pairs,
    distance,
    SIZE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply weight rows `first + i` and `first + i + distance`, `i < BLOCK_N`, by the tokens.

    It is one product of twice the height. Its halves, each [BLOCK_N, BLOCK_M], are separated in registers.
    """
    index = tl.arange(0, 2 * BLOCK_N)  # 8 rows of one half, 8 of the other: a thread has rows i and i + 8 of a result
    pair = index // 16 * 8 + index % 8
    row = first + pair + index // 8 % 2 * distance
    row_inside = pair < pairs
    acc = tl.zeros([2 * BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        w = _weight_tile(weight, row, row_inside, column, SIZE, EVEN)  # [2 BLOCK_N, BLOCK_K]
        values = token_tile(x, x_stride, token, token_inside, column, SIZE, EVEN)  # [BLOCK_M, BLOCK_K]
        acc = tl.dot(w, tl.trans(values), acc, input_precision=PRECISION)
    y1, y2 = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N // 8, 2, 8, BLOCK_M)), (0, 2, 3, 1)))
    return tl.reshape(y1, (BLOCK_N, BLOCK_M)), tl.reshape(y2, (BLOCK_N, BLOCK_M))


@triton.jit
def sum_squares_kernel(x, x_stride, squares, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, PDL: tl.constexpr):
    """Sum the squares of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PAD)
    start_next(PDL)
    wait_for_previous(PDL)
    values = tl.load(x + row * x_stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(squares + row, tl.sum(values * values, 0))


@triton.jit(do_not_specialize=["tokens", "parts"])
def qkv_rotate_kernel(
    x,
    x_stride,
    squares,
    parts,
    tokens,
    eps,
    weight,
    bias,
    query,
    k_cache,
    v_cache,
    slot_stride,
    cos,
    sin,
    positions,
    slot_mapping,
    head_norm_weight,
    head_norm_eps,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # head_dim / 2
    PAIRS: tl.constexpr,  # pairs (i, i + HALF) per program
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply by PAIRS pairs of one head's rows; then bias, norm of the head, rotation, and store."""
    blocks: tl.constexpr = (HALF + PAIRS - 1) // PAIRS
    head = tl.program_id(0) // blocks
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_inside = token < tokens
    first_pair = tl.program_id(0) % blocks * PAIRS
    pair = first_pair + tl.arange(0, PAIRS)
    pair_inside = pair < HALF
    row = head * (2 * HALF) + pair
    inside = pair_inside[:, None] & token_inside[None, :]
    start_next(PDL)
    position = tl.load(positions + token, mask=token_inside, other=0)
    slot = tl.load(slot_mapping + token, mask=token_inside, other=-1)[None, :]  # int64; -1 stores nothing
    angle = position[None, :] * (2 * HALF) + HALF + pair[:, None]  # the tables hold (cos, cos) and (-sin, sin)
    if HAS_BIAS:
        bias1 = tl.load(bias + row, mask=pair_inside, other=0.0)
        bias2 = tl.load(bias + row + HALF, mask=pair_inside, other=0.0)
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    wait_for_previous(PDL)
    sums = load_squares(squares, parts, tokens, token, token_inside, PARTS)
    y1, y2 = _paired_products(
        x,
        x_stride,
        token,
        token_inside,
        weight,
        head * (2 * HALF) + first_pair,
        HALF - first_pair,
        HALF,
        SIZE,
        SIZE % BLOCK_K == 0 and HALF % PAIRS == 0,
        BLOCK_M,
        PAIRS,
        BLOCK_K,
        PRECISION,
    )
    scale = row_scale(sums, SIZE, eps)
    y1 *= scale
    y2 *= scale
    if HAS_BIAS:
        y1 += bias1.to(tl.float32)[:, None]
        y2 += bias2.to(tl.float32)[:, None]
    if head < HEADS + KV_HEADS:  # values are stored as they are
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(y1 * y1, 0) + tl.sum(y2 * y2, 0)) / (2 * HALF) + head_norm_eps)[None, :]
            y1 *= scale * tl.load(head_norm_weight + row, mask=pair_inside, other=0.0).to(tl.float32)[:, None]
            y2 *= scale * tl.load(head_norm_weight + row + HALF, mask=pair_inside, other=0.0).to(tl.float32)[:, None]
        turned = y1 * c.to(tl.float32) - y2 * s.to(tl.float32)
        y2 = y2 * c.to(tl.float32) + y1 * s.to(tl.float32)
        y1 = turned
    if head < HEADS:
        target = token.to(tl.int64)[None, :] * (HEADS * 2 * HALF) + row[:, None]
        tl.store(query + target, y1, mask=inside)
        tl.store(query + target + HALF, y2, mask=inside)
    else:
        inside &= slot >= 0
        if head < HEADS + KV_HEADS:
            target = slot * slot_stride + (row - HEADS * 2 * HALF)[:, None]
            tl.store(k_cache + target, y1, mask=inside)
            tl.store(k_cache + target + HALF, y2, mask=inside)
        else:
            target = slot * slot_stride + (row - (HEADS + KV_HEADS) * 2 * HALF)[:, None]
            tl.store(v_cache + target, y1, mask=inside)
            tl.store(v_cache + target + HALF, y2, mask=inside)


@triton.jit(do_not_specialize=["tokens", "parts"])
def gate_up_silu_kernel(
    x,
    x_stride,
    squares,
    parts,
    tokens,
    eps,
    weight,
    out,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply by BLOCK_N rows of gate and the same rows of up; then `silu(gate) * up`."""
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_inside = token < tokens
    first = tl.program_id(0) * BLOCK_N
    row = first + tl.arange(0, BLOCK_N)
    start_next(PDL)
    wait_for_previous(PDL)
    sums = load_squares(squares, parts, tokens, token, token_inside, PARTS)
    gate, up = _paired_products(
        x,
        x_stride,
        token,
        token_inside,
        weight,
        first,
        INTERMEDIATE - first,
        INTERMEDIATE,
        SIZE,
        SIZE % BLOCK_K == 0 and INTERMEDIATE % BLOCK_N == 0,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PRECISION,
    )
    scale = row_scale(sums, SIZE, eps)
    gate *= scale
    target = token.to(tl.int64)[None, :] * INTERMEDIATE + row[:, None]
    inside = (row < INTERMEDIATE)[:, None] & token_inside[None, :]
    tl.store(out + target, gate * tl.sigmoid(gate) * (up * scale), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def product_add_kernel(
    x,
    x_stride,
    tokens,
    weight,
    residual,
    residual_stride,
    squares,
    partial,
    arrival_counters,
    peers,
    SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply by BLOCK_N weight rows, some columns per split; add the residual; sum the squares."""
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_inside = token < tokens
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside = row < OUT_SIZE
    split = tl.program_id(2) if SPLITS > 1 else 0
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    steps: tl.constexpr = (SIZE + BLOCK_K - 1) // BLOCK_K  # of BLOCK_K columns; splits may differ by one
    even: tl.constexpr = SIZE % BLOCK_K == 0 and OUT_SIZE % BLOCK_N == 0
    start_next(PDL)
    wait_for_previous(PDL)
    inside = row_inside[:, None] & token_inside[None, :]
    target = residual + token.to(tl.int64)[None, :] * residual_stride + row[:, None]
    before = tl.load(target, mask=inside, other=0.0)
    for step in range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
        column = step * BLOCK_K + tl.arange(0, BLOCK_K)
        w = _weight_tile(weight, row, row_inside, column, SIZE, even)  # [BLOCK_N, BLOCK_K]
        values = token_tile(x, x_stride, token, token_inside, column, SIZE, even)
        acc = tl.dot(w, tl.trans(values), acc, input_precision=PRECISION)
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    last = True
    if SPLITS > 1:
        position = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts = partial + tile * (SPLITS * BLOCK_N * BLOCK_M) + position
        tl.store(parts + split * (BLOCK_N * BLOCK_M), acc)
        tl.debug_barrier()  # every thread's part is written before one thread counts it
        last = tl.atomic_add(arrival_counters + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if last:
            tl.store(arrival_counters + tile, 0)  # ready for the next launch
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for part in tl.static_range(SPLITS):
                acc += tl.load(parts + part * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
    if last:
        if RANKS > 1:
            # Flat, or each rank's part would be brought into the tile's layout before the next one is loaded.
            place = tl.arange(0, BLOCK_M * BLOCK_N)
            sent = (tl.program_id(0) * BLOCK_N + place % BLOCK_N < OUT_SIZE) & (
                tl.program_id(1) * BLOCK_M + place // BLOCK_N < tokens
            )
            own = tl.reshape(tl.trans(acc), (BLOCK_M * BLOCK_N,))
            if BLOCK_M > 16:  # the bytes that are sent count
                own = own.to(before.dtype)
            own = sum_of_ranks(own, place, sent, tile, peers, RANK, RANKS)
            acc = tl.trans(tl.reshape(own, (BLOCK_M, BLOCK_N)))
        total = (acc + before.to(tl.float32)).to(before.dtype)  # rounded here: the norm uses the stored values
        tl.store(target, total, mask=inside)
        total = total.to(tl.float32)
        tl.store(squares + tl.program_id(0) * tokens + token, tl.sum(total * total, 0), mask=token_inside)
