"""The Triton kernels of `products.py`: choose experts, group tokens by expert, and multiply by the experts' matrices.

A token's choice of one expert is a *pair*, number `token * PER_TOKEN + i`. Programs multiply by blocks of pairs of one
expert. The grid is as large as the largest number of blocks, and programs without a block end at once, so the host need
not know how many tokens an expert has. All sums are float32, in a fixed order, rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from beyond.quantization.conversion import to_16_bits
from stage_f_graph_tp.kernels.pdl import start_next, wait_for_previous
from stage_f_graph_tp.kernels.skinny_gemm_kernels import token_tile


@triton.jit
def choose(
    scores,
    is_real,
    token,
    token_inside,
    weights,
    chosen,
    COUNT: tl.constexpr,
    COUNT_PAD: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PER_TOKEN_PAD: tl.constexpr,
    SUM_TO_ONE: tl.constexpr,
    ROUND_TO: tl.constexpr,
):
    """Write the experts of the largest softmax of `scores [tokens, COUNT]`, and their weights; -1 for padding."""
    expert = tl.arange(0, COUNT_PAD)[None, :]
    inside = token_inside[:, None] & (expert < COUNT)
    # Past the L1 cache: other programs of the same launch may have written them.
    found = tl.load(scores + token[:, None] * COUNT + expert, mask=inside, other=0.0, cache_modifier=".cg")
    found = tl.where(expert < COUNT, found.to(tl.float32), float("-inf"))
    p = tl.exp(found - tl.max(found, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    position = tl.arange(0, PER_TOKEN_PAD)[None, :]
    best = tl.zeros([token.shape[0], PER_TOKEN_PAD], tl.float32)
    which = tl.zeros([token.shape[0], PER_TOKEN_PAD], tl.int32)
    for i in tl.static_range(PER_TOKEN):
        largest = tl.max(p, 1)[:, None]
        # The first of equal ones; of NaN none is equal, and the last expert is as good as any.
        index = tl.min(tl.where(p == largest, expert, COUNT - 1), 1)[:, None]
        best = tl.where(position == i, largest, best)
        which = tl.where(position == i, index, which)
        p = tl.where(expert == index, -1.0, p)
    if SUM_TO_ONE:
        best = best / tl.sum(best, 1)[:, None]
    address = token[:, None] * PER_TOKEN + position
    inside = token_inside[:, None] & (position < PER_TOKEN)
    tl.store(weights + address, best.to(ROUND_TO).to(tl.float32), mask=inside)
    tl.store(chosen + address, tl.where(is_real[:, None], which, -1), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def choose_kernel(
    scores,
    slots,
    tokens,
    weights,
    chosen,
    COUNT: tl.constexpr,
    COUNT_PAD: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PER_TOKEN_PAD: tl.constexpr,
    SUM_TO_ONE: tl.constexpr,
    ROUND_TO: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Choose the experts of BLOCK_M tokens from the router's scores."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_inside = token < tokens
    is_real = tl.load(slots + token, mask=token_inside, other=-1) >= 0
    start_next(PDL)
    wait_for_previous(PDL)
    choose(
        scores,
        is_real,
        token,
        token_inside,
        weights,
        chosen,
        COUNT,
        COUNT_PAD,
        PER_TOKEN,
        PER_TOKEN_PAD,
        SUM_TO_ONE,
        ROUND_TO,
    )


@triton.jit(do_not_specialize=["tokens"])
def norm_route_kernel(
    x,
    x_stride,
    slots,
    tokens,
    norm_weight,
    eps,
    router,
    normed,
    scores,
    arrival_counters,
    weights,
    chosen,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_PAD: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PER_TOKEN_PAD: tl.constexpr,
    SUM_TO_ONE: tl.constexpr,
    ROUND_TO: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Normalise rows and multiply by BLOCK_N rows of the router; the program that ends last chooses the experts.

    A scale per row and a product can change places, so the squares for the norm are summed in the product's loop.
    """
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_inside = token < tokens
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside = row < COUNT
    is_real = tl.load(slots + token, mask=token_inside, other=-1) >= 0
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    start_next(PDL)
    wait_for_previous(PDL)
    for start in range(0, SIZE, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = column < SIZE
        address = router + row[:, None] * SIZE + column[None, :]
        w = tl.load(address, mask=row_inside[:, None] & inside[None, :], other=0.0)
        values = token_tile(x, x_stride, token, token_inside, column, SIZE, False).to(tl.float32)
        squares += tl.sum(values * values, 1)
        gain = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
        weighted = (values * gain[None, :]).to(x.dtype.element_ty)
        acc = tl.dot(w, tl.trans(weighted), acc, input_precision=PRECISION)
    scale = tl.rsqrt(squares / SIZE + eps)
    rounded = (acc * scale[None, :]).to(x.dtype.element_ty).to(tl.float32)
    target = scores + token[None, :] * COUNT + row[:, None]
    tl.store(target, rounded, mask=row_inside[:, None] & token_inside[None, :])
    for start in range(tl.program_id(0) * BLOCK_K, SIZE, tl.num_programs(0) * BLOCK_K):  # its share of the columns
        column = start + tl.arange(0, BLOCK_K)
        inside = token_inside[:, None] & (column < SIZE)[None, :]
        values = token_tile(x, x_stride, token, token_inside, column, SIZE, False).to(tl.float32)
        gain = tl.load(norm_weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
        address = normed + token.to(tl.int64)[:, None] * SIZE + column[None, :]
        tl.store(address, values * scale[:, None] * gain[None, :], mask=inside)
    tl.debug_barrier()  # every thread's scores are written before one thread counts them
    counter = arrival_counters + tl.program_id(1)
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(counter, 0)  # ready for the next launch
        choose(
            scores,
            is_real,
            token,
            token_inside,
            weights,
            chosen,
            COUNT,
            COUNT_PAD,
            PER_TOKEN,
            PER_TOKEN_PAD,
            SUM_TO_ONE,
            ROUND_TO,
        )


@triton.jit(do_not_specialize=["pairs", "max_blocks"])
def group_kernel(
    chosen,
    pairs,
    order,
    experts,
    max_blocks,
    COUNT: tl.constexpr,
    COUNT_PAD: tl.constexpr,  # more than COUNT
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the pairs of one expert in their order, in blocks of BLOCK_M after the blocks of earlier experts."""
    own = tl.program_id(0)
    start_next(PDL)
    wait_for_previous(PDL)
    counts = tl.zeros([COUNT_PAD], tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        expert = tl.load(chosen + pair, mask=pair < pairs, other=-1)
        counts += tl.histogram(tl.where(expert < 0, COUNT, expert), COUNT_PAD)
    every = tl.arange(0, COUNT_PAD)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(every < own, blocks, 0), 0)
    count = tl.sum(tl.where(every == own, counts, 0), 0)
    own_blocks = (count + BLOCK_M - 1) // BLOCK_M
    listed = 0
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        is_own = tl.load(chosen + pair, mask=pair < pairs, other=-1) == own
        rank = listed + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order + first * BLOCK_M + rank, pair, mask=is_own)
        listed += tl.sum(is_own.to(tl.int32), 0)
    rest = count + tl.arange(0, BLOCK_M)
    tl.store(order + first * BLOCK_M + rest, -1, mask=rest < own_blocks * BLOCK_M)
    for start in range(first, first + own_blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        tl.store(experts + block, own, mask=block < first + own_blocks)
    if own == COUNT - 1:
        for start in range(first + own_blocks, max_blocks, CHUNK):
            block = start + tl.arange(0, CHUNK)
            tl.store(experts + block, -1, mask=block < max_blocks)


@triton.jit
def block_of_pairs(order, block, GROUPED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the pairs of a block, and which of its rows are pairs. Not grouped: block b is pair b."""
    slot = tl.arange(0, BLOCK_M)
    if GROUPED:
        pair = tl.load(order + block * BLOCK_M + slot)
        return tl.maximum(pair, 0), pair >= 0
    return block + slot * 0, slot < 1


@triton.jit
def expert_product(
    x,
    token,
    token_inside,
    weight,
    scales,
    row,
    row_inside,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply weight rows by rows `x[token]`: `[rows, tokens]`.

    `scales` is None for weights in the dtype of `x`, or the scales of 8-bit weights: one per row, or with GROUP (then
    equal to BLOCK_K) one per row and GROUP columns.
    """
    acc = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
    base = weight + row.to(tl.int64)[:, None] * SIZE
    for start in range(0, SIZE, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        if EVEN:
            w = tl.load(base + column[None, :])
        else:
            w = tl.load(base + column[None, :], mask=row_inside[:, None] & (column < SIZE)[None, :], other=0.0)
        values = token_tile(x, SIZE, token.to(tl.int64), token_inside, column, SIZE, EVEN)
        if GROUP == 0:
            acc = tl.dot(to_16_bits(w, values.dtype), tl.trans(values), acc, input_precision=PRECISION)
        else:
            groups: tl.constexpr = (SIZE + GROUP - 1) // GROUP
            scale = tl.load(scales + row * groups + start // GROUP, mask=row_inside, other=0.0)
            product = tl.dot(to_16_bits(w, values.dtype), tl.trans(values), input_precision=PRECISION)
            acc += product * scale[:, None]
    if scales is not None and GROUP == 0:
        acc *= tl.load(scales + row, mask=row_inside, other=0.0)[:, None]
    return acc


@triton.jit
def gate_up_silu_kernel(
    x,
    experts,
    order,
    weight,
    scales,
    out,
    SIZE: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GROUPED: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply a block of pairs by BLOCK_N rows of its expert's gate and the same rows of up; then `silu(gate) * up`.

    It is one product of twice the height. Its halves are separated in registers.
    """
    block = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_N
    start_next(PDL)
    wait_for_previous(PDL)
    expert = tl.load(experts + block)
    if expert < 0:
        return
    pair, inside = block_of_pairs(order, block, GROUPED, BLOCK_M)
    index = tl.arange(0, 2 * BLOCK_N)
    row = expert * (2 * INTERMEDIATE) + first + index % BLOCK_N + index // BLOCK_N * INTERMEDIATE
    acc = expert_product(
        x,
        pair // PER_TOKEN,
        inside,
        weight,
        scales,
        row,
        first + index % BLOCK_N < INTERMEDIATE,
        SIZE,
        GROUP,
        SIZE % BLOCK_K == 0 and INTERMEDIATE % BLOCK_N == 0,
        BLOCK_K,
        PRECISION,
    )
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_N, BLOCK_M)), (1, 2, 0)))
    column = first + tl.arange(0, BLOCK_N)
    target = out + pair.to(tl.int64)[None, :] * INTERMEDIATE + column[:, None]
    tl.store(target, gate * tl.sigmoid(gate) * up, mask=(column < INTERMEDIATE)[:, None] & inside[None, :])


@triton.jit
def down_kernel(
    x,
    experts,
    order,
    weight,
    scales,
    pair_weights,
    out,
    SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply a block of pairs by BLOCK_N rows of its expert's matrix, and each pair by its weight."""
    block = tl.program_id(1)
    start_next(PDL)
    wait_for_previous(PDL)
    expert = tl.load(experts + block)
    if expert < 0:
        return
    pair, inside = block_of_pairs(order, block, True, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_inside = column < OUT_SIZE
    even: tl.constexpr = SIZE % BLOCK_K == 0 and OUT_SIZE % BLOCK_N == 0
    row = expert * OUT_SIZE + column
    acc = expert_product(x, pair, inside, weight, scales, row, column_inside, SIZE, GROUP, even, BLOCK_K, PRECISION)
    acc *= tl.load(pair_weights + pair, mask=inside, other=0.0)[None, :]
    target = out + pair.to(tl.int64)[None, :] * OUT_SIZE + column[:, None]
    tl.store(target, acc, mask=column_inside[:, None] & inside[None, :])


@triton.jit
def add_pairs_kernel(
    products,
    chosen,
    residual,
    residual_stride,
    squares,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the products of a token's pairs to its row of the residual, in the order of its experts; sum the squares."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PAD)
    inside = column < SIZE
    start_next(PDL)
    wait_for_previous(PDL)
    target = residual + token * residual_stride + column
    before = tl.load(target, mask=inside, other=0.0)
    total = tl.zeros([SIZE_PAD], tl.float32)
    for i in range(PER_TOKEN):
        pair = token * PER_TOKEN + i
        is_here = tl.load(chosen + pair) >= 0  # a pair without expert has no product
        total += tl.load(products + pair * SIZE + column, mask=inside & is_here, other=0.0).to(tl.float32)
    after = (before.to(tl.float32) + total).to(before.dtype)  # rounded here: the norm uses the stored values
    tl.store(target, after, mask=inside)
    tl.store(squares + token, tl.sum(after.to(tl.float32) * after.to(tl.float32), 0))


@triton.jit(do_not_specialize=["tokens"])
def down_add_kernel(
    x,
    chosen,
    pair_weights,
    weight,
    scales,
    residual,
    residual_stride,
    squares,
    tokens,
    SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PER_TOKEN_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least PER_TOKEN_PAD
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply the pairs of one token by BLOCK_N rows of their experts, add them up, and to the residual.

    The left operand has the same rows of all the token's experts, and the right operand all pairs: of the product only
    the parts where expert and pair belong together are used.
    """
    token = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    index = tl.arange(0, PER_TOKEN_PAD * BLOCK_N)
    position = index // BLOCK_N  # which of the token's experts
    slot = tl.arange(0, BLOCK_M)
    in_token = slot < PER_TOKEN
    start_next(PDL)
    wait_for_previous(PDL)
    target = residual + token.to(tl.int64) * residual_stride + column
    before = tl.load(target, mask=column < OUT_SIZE, other=0.0)
    pair_weight = tl.load(pair_weights + token * PER_TOKEN + slot, mask=in_token, other=0.0)
    is_pair = tl.load(chosen + token * PER_TOKEN + slot, mask=in_token, other=-1) >= 0
    expert = tl.load(chosen + token * PER_TOKEN + position, mask=position < PER_TOKEN, other=-1)
    own_column = tl.program_id(0) * BLOCK_N + index % BLOCK_N
    acc = expert_product(
        x,
        token * PER_TOKEN + slot,
        is_pair,
        weight,
        scales,
        tl.maximum(expert, 0) * OUT_SIZE + own_column,  # a pair without expert reads some expert
        (position < PER_TOKEN) & (own_column < OUT_SIZE),
        SIZE,
        GROUP,
        SIZE % BLOCK_K == 0 and OUT_SIZE % BLOCK_N == 0 and PER_TOKEN == PER_TOKEN_PAD,
        BLOCK_K,
        PRECISION,
    )
    own = tl.where(position[:, None] == slot[None, :], acc * pair_weight[None, :], 0.0)
    total = tl.sum(tl.reshape(tl.sum(own, 1), (PER_TOKEN_PAD, BLOCK_N)), 0)
    after = (before.to(tl.float32) + total).to(before.dtype)
    tl.store(target, after, mask=column < OUT_SIZE)
    after = after.to(tl.float32)
    tl.store(squares + tl.program_id(0) * tokens + token, tl.sum(after * after, 0))
