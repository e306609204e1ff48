"""The Triton kernels of `products.py`: matrix products that read 8-bit weights and multiply in the model's dtype.

The inner loop is `dequantized_product`. Everything around it (norm split in two, pairs, split-K, dependent launch)
works as in stage F's `skinny_gemm.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from beyond.quantization.conversion import to_16_bits
from stage_f_graph_tp.kernels.pdl import start_next, wait_for_previous
from stage_f_graph_tp.kernels.skinny_gemm_kernels import load_squares, row_scale, token_tile


@triton.jit
def dequantized_product(
    acc,
    x,
    x_stride,
    token,
    token_inside,
    values,
    scales,
    row,
    row_inside,
    first,
    steps,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply 8-bit weight rows by tokens over the columns first … first + steps * BLOCK_K - 1.

    A tile of weights is read in 8 bits and converted in registers: int8 and e4m3 are exact in bfloat16 and float16.
    With a scale per row, the finished sums are scaled once. With a scale per row and GROUP columns (BLOCK_K is GROUP),
    each tile's product is scaled.

    Returns `acc`, float32 zeros `[rows, tokens]`, filled.
    """
    if GROUP == 0:  # loaded before the loop: after it, the program would wait for the load
        scale = tl.load(scales + row, mask=row_inside, other=0.0)
    for step in range(steps):
        start = first + step * BLOCK_K
        column = start + tl.arange(0, BLOCK_K)
        address = values + row.to(tl.int64)[:, None] * SIZE + column[None, :]
        if EVEN:
            w = tl.load(address)  # [rows, BLOCK_K], 8 bits
        else:
            w = tl.load(address, mask=row_inside[:, None] & (column < SIZE)[None, :], other=0.0)
        t = token_tile(x, x_stride, token, token_inside, column, SIZE, EVEN)  # [tokens, BLOCK_K]
        if GROUP == 0:
            acc = tl.dot(to_16_bits(w, t.dtype), tl.trans(t), acc, input_precision=PRECISION)
        else:
            groups: tl.constexpr = (SIZE + GROUP - 1) // GROUP
            scale = tl.load(scales + row * groups + start // GROUP, mask=row_inside & (start < SIZE), other=0.0)
            acc += tl.dot(to_16_bits(w, t.dtype), tl.trans(t), input_precision=PRECISION) * scale[:, None]
    if GROUP == 0:
        acc *= scale[:, None]
    return acc


@triton.jit
def sliced_product(
    x,
    x_stride,
    token,
    token_inside,
    values,
    scales,
    row,
    row_inside,
    first,
    steps,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As `dequantized_product`, with a part of the columns for each of SLICES warps; adds their sums up at the end.

    No two warps convert the same weight, however few rows a program has, and many warps work on few rows. With a scale
    per group, a slice of a tile is GROUP columns wide.
    """
    WIDTH: tl.constexpr = BLOCK_K // SLICES
    if GROUP == 0:
        scale = tl.load(scales + row, mask=row_inside, other=0.0)
    acc = tl.zeros([SLICES, row.shape[0], token.shape[0]], tl.float32)
    part = tl.arange(0, SLICES)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]  # [SLICES, 1, WIDTH]
    for step in range(steps):
        start = first + step * BLOCK_K
        column = start + part
        address = values + row.to(tl.int64)[None, :, None] * SIZE + column
        token_address = x + token[None, :, None] * x_stride + column
        if EVEN:
            w = tl.load(address)  # [SLICES, rows, WIDTH], 8 bits
            t = tl.load(token_address, mask=token_inside[None, :, None], other=0.0)
        else:
            w = tl.load(address, mask=row_inside[None, :, None] & (column < SIZE), other=0.0)
            t = tl.load(token_address, mask=token_inside[None, :, None] & (column < SIZE), other=0.0)
        w = to_16_bits(w, t.dtype)
        t = tl.permute(t, (0, 2, 1))
        if GROUP == 0:
            acc = tl.dot(w, t, acc, input_precision=PRECISION)
        else:
            groups: tl.constexpr = (SIZE + GROUP - 1) // GROUP
            group = start // GROUP + tl.arange(0, SLICES)[:, None]
            inside = row_inside[None, :] & (group < groups)
            scale = tl.load(scales + row[None, :] * groups + group, mask=inside, other=0.0)  # [SLICES, rows]
            acc += tl.dot(w, t, input_precision=PRECISION) * scale[:, :, None]
    total = tl.sum(acc, 0)
    if GROUP == 0:
        total *= scale[:, None]
    return total


@triton.jit
def _product(
    x,
    x_stride,
    token,
    token_inside,
    values,
    scales,
    row,
    row_inside,
    first,
    steps,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Call one of the two products; returns float32 `[rows, tokens]`."""
    if SLICES > 1:
        return sliced_product(
            x,
            x_stride,
            token,
            token_inside,
            values,
            scales,
            row,
            row_inside,
            first,
            steps,
            SIZE,
            GROUP,
            EVEN,
            BLOCK_K,
            SLICES,
            PRECISION,
        )
    return dequantized_product(
        tl.zeros([row.shape[0], token.shape[0]], tl.float32),
        x,
        x_stride,
        token,
        token_inside,
        values,
        scales,
        row,
        row_inside,
        first,
        steps,
        SIZE,
        GROUP,
        EVEN,
        BLOCK_K,
        PRECISION,
    )


@triton.jit(do_not_specialize=["tokens", "parts"])
def product_kernel(
    x,
    x_stride,
    squares,
    parts,
    tokens,
    eps,
    values,
    scales,
    bias,
    out,
    SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply by BLOCK_N weight rows; then the second half of the norm before the product, and the bias."""
    # Neighbouring programs share weights, which are larger than the L2 cache; the tokens are not.
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_inside = token < tokens
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside = row < OUT_SIZE
    start_next(PDL)
    if HAS_BIAS:
        biases = tl.load(bias + row, mask=row_inside, other=0.0)
    wait_for_previous(PDL)
    if HAS_NORM:
        sums = load_squares(squares, parts, tokens, token, token_inside, PARTS)
    acc = _product(
        x,
        x_stride,
        token,
        token_inside,
        values,
        scales,
        row,
        row_inside,
        0,
        tl.cdiv(SIZE, BLOCK_K),
        SIZE,
        GROUP,
        SIZE % BLOCK_K == 0 and OUT_SIZE % BLOCK_N == 0,
        BLOCK_K,
        SLICES,
        PRECISION,
    )
    if HAS_NORM:
        acc *= row_scale(sums, SIZE, eps)
    if HAS_BIAS:
        acc += biases.to(tl.float32)[:, None]
    target = out + token.to(tl.int64)[None, :] * OUT_SIZE + row[:, None]
    tl.store(target, acc, mask=row_inside[:, None] & token_inside[None, :])


@triton.jit(do_not_specialize=["tokens", "parts"])
def gate_up_silu_kernel(
    x,
    x_stride,
    squares,
    parts,
    tokens,
    eps,
    values,
    scales,
    out,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply by BLOCK_N rows of gate and the same rows of up; then `silu(gate) * up`."""
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_inside = token < tokens
    first = tl.program_id(0) * BLOCK_N
    index = tl.arange(0, 2 * BLOCK_N)
    row = first + index % BLOCK_N + index // BLOCK_N * INTERMEDIATE  # one product of twice the height
    row_inside = first + index % BLOCK_N < INTERMEDIATE
    start_next(PDL)
    wait_for_previous(PDL)
    sums = load_squares(squares, parts, tokens, token, token_inside, PARTS)
    acc = _product(
        x,
        x_stride,
        token,
        token_inside,
        values,
        scales,
        row,
        row_inside,
        0,
        tl.cdiv(SIZE, BLOCK_K),
        SIZE,
        GROUP,
        SIZE % BLOCK_K == 0 and INTERMEDIATE % BLOCK_N == 0,
        BLOCK_K,
        SLICES,
        PRECISION,
    )
    scale = row_scale(sums, SIZE, eps)
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_N, BLOCK_M)), (1, 2, 0)))
    row = first + tl.arange(0, BLOCK_N)
    gate *= scale
    target = token.to(tl.int64)[None, :] * INTERMEDIATE + row[:, None]
    inside = (row < INTERMEDIATE)[:, None] & token_inside[None, :]
    tl.store(out + target, gate * tl.sigmoid(gate) * (up * scale), mask=inside)


@triton.jit
def scale_kernel(x, x_stride, gain, scaled, squares, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, PDL: tl.constexpr):
    """Compute the first half of a norm, one row per program: `x * gain` and the sum of squares."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PAD)
    inside = column < SIZE
    gains = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    start_next(PDL)
    wait_for_previous(PDL)
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled + row * SIZE + column, values * gains, mask=inside)
    tl.store(squares + row, tl.sum(values * values, 0))


@triton.jit(do_not_specialize=["tokens"])
def product_add_kernel(
    x,
    x_stride,
    tokens,
    values,
    scales,
    residual,
    residual_stride,
    gain,
    scaled,
    squares,
    partial,
    arrival_counters,
    SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply by BLOCK_N weight rows, some columns per split; add the residual; begin the norm."""
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_inside = token < tokens
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside = row < OUT_SIZE
    split = tl.program_id(2)
    steps: tl.constexpr = (SIZE + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)  # of BLOCK_K columns, for each split
    start_next(PDL)
    if HAS_GAIN:
        gains = tl.load(gain + row, mask=row_inside, other=0.0)
    wait_for_previous(PDL)
    inside = row_inside[:, None] & token_inside[None, :]
    target = residual + token.to(tl.int64)[None, :] * residual_stride + row[:, None]
    before = tl.load(target, mask=inside, other=0.0)
    acc = _product(
        x,
        x_stride,
        token,
        token_inside,
        values,
        scales,
        row,
        row_inside,
        split * steps * BLOCK_K,
        steps,
        SIZE,
        GROUP,
        SIZE % (SPLITS * BLOCK_K) == 0 and OUT_SIZE % BLOCK_N == 0,
        BLOCK_K,
        SLICES,
        PRECISION,
    )
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
        total = (acc + before.to(tl.float32)).to(before.dtype)  # rounded here: the norm uses the stored values
        tl.store(target, total, mask=inside)
        if HAS_GAIN:
            total = total.to(tl.float32)
            weighted = total * gains.to(tl.float32)[:, None]
            tl.store(scaled + token.to(tl.int64)[None, :] * OUT_SIZE + row[:, None], weighted, mask=inside)
            tl.store(squares + tl.program_id(0) * tokens + token, tl.sum(total * total, 0), mask=token_inside)
