"""Triton kernels that multiply a few rows, and do in the same launch what stands before and after the product.

At a few dozen rows a matrix product is the reading of its weights, a few microseconds, and around it stand small
kernels of a microsecond or two, each with the end of one launch and the start of the next on either side. So here a
product takes them along:

    qkv_rotate       norm of the rows · QKV · norm of the heads (Qwen3) · rotation · store into the pages
    gate_up_silu     norm of the rows · gate and up · silu(gate) * up
    product_add      product · sum with the residual · first half of the norm that comes next

**The norm is cut in two.** `rms_norm(x) Wᵀ = (x * g) Wᵀ / sqrt(mean(x²) + eps)`. Whoever writes the residual stream
`x` writes `x * g` beside it and the sum of the squares of what it wrote; the product that reads them multiplies at
once and divides its finished sums. So no kernel has to see a whole row before it can begin (`Stream`).

**Weights are the left operand.** A tile is `[weight rows, tokens]`, its many rows are weights and its few columns
tokens, because the tensor cores' tiles have a least height of 16 (64 for Hopper's largest) and a least width of 8.

**Pairs go together.** Rotation mixes columns i and i + head_dim/2 of a head, SwiGLU mixes gate i and up i. A program
computes both, so that what follows is element-wise.

**Few rows of weights, many columns** (`down`): there would be fewer programs than multiprocessors, so the columns are
split. The last program of a tile to finish adds the parts up, always in the same order, so that the sum is the same in
every run.

With more rows the library's large tiles win; `FEW_ROWS` is where that was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS = 64  # tokens up to which these kernels were measured faster than library products with kernels between them


class Stream(NamedTuple):
    """The residual stream with the first half of the norm that reads it next."""

    x: Tensor  # [tokens, hidden]
    scaled: Tensor  # [tokens, hidden]: x * the norm's weight
    squares: Tensor  # float32 [parts, tokens]: sums of x², over parts of the row


@triton.jit
def _weight_tile(weight, row, row_inside, column, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """`weight[row, column]`, of `SIZE` columns; without masks where the blocks divide the matrix."""
    place = weight + row[:, None] * SIZE + column[None, :]
    if EVEN:
        return tl.load(place)
    return tl.load(place, mask=row_inside[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _token_tile(x, x_stride, token, token_inside, column, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """`x[token, column]`."""
    place = x + token[:, None] * x_stride + column[None, :]
    if EVEN:
        return tl.load(place, mask=token_inside[:, None], other=0.0)
    return tl.load(place, mask=token_inside[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _prefetch(weight, row, first, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Ask for a part of the weights, from column `first`, to be brought to L2."""
    column = tl.minimum(first + tl.arange(0, COLUMNS // 64) * 64, SIZE - 1)
    place = weight + row[:, None] * SIZE + column[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _row_scale(squares, parts, tokens, token, token_inside, SIZE: tl.constexpr, eps, PARTS: tl.constexpr):
    """The second half of the norm: `1 / sqrt(mean(x²) + eps)` of each token."""
    part = tl.arange(0, PARTS)
    here = (part < parts)[:, None] & token_inside[None, :]
    sums = tl.load(squares + part[:, None] * tokens + token[None, :], mask=here, other=0.0)  # [PARTS, BLOCK_M]
    return tl.rsqrt(tl.sum(sums, 0) / SIZE + eps)


@triton.jit
def _paired_products(
    x, x_stride, token, token_inside, weight, first, pairs, distance,
    SIZE: tl.constexpr, EVEN: tl.constexpr, JOINT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weight rows `first + i` and `first + i + distance`, `i < BLOCK_N`, times the tokens: two `[BLOCK_N, BLOCK_M]`.

    `JOINT` computes them as one product of twice the height.
    """
    if JOINT:
        index = tl.arange(0, 2 * BLOCK_N)
        row = first + index % BLOCK_N + index // BLOCK_N * distance
        row_inside = index % BLOCK_N < pairs
        acc = tl.zeros([2 * BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, SIZE, BLOCK_K):
            column = start + tl.arange(0, BLOCK_K)
            w = _weight_tile(weight, row, row_inside, column, SIZE, EVEN)  # [2 BLOCK_N, BLOCK_K]
            values = _token_tile(x, x_stride, token, token_inside, column, SIZE, EVEN)  # [BLOCK_M, BLOCK_K]
            acc = tl.dot(w, tl.trans(values), acc, input_precision=PRECISION)
        return tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_N, BLOCK_M)), (1, 2, 0)))
    index = tl.arange(0, BLOCK_N)
    row = first + index
    row_inside = index < pairs
    acc1 = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc2 = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        w1 = _weight_tile(weight, row, row_inside, column, SIZE, EVEN)
        w2 = _weight_tile(weight, row + distance, row_inside, column, SIZE, EVEN)
        values = tl.trans(_token_tile(x, x_stride, token, token_inside, column, SIZE, EVEN))  # [BLOCK_K, BLOCK_M]
        acc1 = tl.dot(w1, values, acc1, input_precision=PRECISION)
        acc2 = tl.dot(w2, values, acc2, input_precision=PRECISION)
    return acc1, acc2


@triton.jit
def _scale_kernel(x, x_stride, gain, scaled, squares, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PAD)
    inside = column < SIZE
    gains = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled + row * SIZE + column, values * gains, mask=inside)
    tl.store(squares + row, tl.sum(values * values, 0))


@triton.jit(do_not_specialize=["tokens", "parts"])
def _qkv_rotate_kernel(
    x, x_stride, squares, parts, tokens, eps, weight, bias,
    query, k_cache, v_cache, slot_stride, cos, sin, positions, slot_mapping, head_norm_weight, head_norm_eps,
    SIZE: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # head_dim / 2
    PAIRS: tl.constexpr,  # pairs (i, i + HALF) that a program works on
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, JOINT: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (HALF + PAIRS - 1) // PAIRS
    head = tl.program_id(0) // blocks
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_inside = token < tokens
    first_pair = tl.program_id(0) % blocks * PAIRS
    pair = first_pair + tl.arange(0, PAIRS)
    pair_inside = pair < HALF
    row = head * (2 * HALF) + pair
    inside = pair_inside[:, None] & token_inside[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            _prefetch(weight, row, 0, SIZE, PREFETCH)
            _prefetch(weight, row + HALF, 0, SIZE, PREFETCH)
    # What the end needs is asked for at the beginning: each of these loads would take as long as a part of the product.
    position = tl.load(positions + token, mask=token_inside, other=0)
    slot = tl.load(slot_mapping + token, mask=token_inside, other=-1)[None, :]  # int64; -1 stores nothing
    angle = position[None, :] * (2 * HALF) + HALF + pair[:, None]  # the tables hold (cos, cos) and (-sin, sin)
    if HAS_BIAS:
        bias1 = tl.load(bias + row, mask=pair_inside, other=0.0)
        bias2 = tl.load(bias + row + HALF, mask=pair_inside, other=0.0)
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    scale = _row_scale(squares, parts, tokens, token, token_inside, SIZE, eps, PARTS)[None, :]
    y1, y2 = _paired_products(
        x, x_stride, token, token_inside, weight, head * (2 * HALF) + first_pair, HALF - first_pair, HALF,
        SIZE, SIZE % BLOCK_K == 0 and HALF % PAIRS == 0, JOINT, BLOCK_M, PAIRS, BLOCK_K, PRECISION,
    )  # fmt: skip
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
def _gate_up_silu_kernel(
    x, x_stride, squares, parts, tokens, eps, weight, out,
    SIZE: tl.constexpr, PARTS: tl.constexpr, INTERMEDIATE: tl.constexpr,
    JOINT: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_inside = token < tokens
    first = tl.program_id(0) * BLOCK_N
    row = first + tl.arange(0, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            _prefetch(weight, row, 0, SIZE, PREFETCH)
            _prefetch(weight, row + INTERMEDIATE, 0, SIZE, PREFETCH)
        tl.extra.cuda.gdc_wait()
    scale = _row_scale(squares, parts, tokens, token, token_inside, SIZE, eps, PARTS)[None, :]
    gate, up = _paired_products(
        x, x_stride, token, token_inside, weight, first, INTERMEDIATE - first, INTERMEDIATE,
        SIZE, SIZE % BLOCK_K == 0 and INTERMEDIATE % BLOCK_N == 0, JOINT, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    gate *= scale
    target = token.to(tl.int64)[None, :] * INTERMEDIATE + row[:, None]
    inside = (row < INTERMEDIATE)[:, None] & token_inside[None, :]
    tl.store(out + target, gate * tl.sigmoid(gate) * (up * scale), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _product_add_kernel(
    x, x_stride, tokens, weight, residual, residual_stride, gain, scaled, squares, partial, arrivals,
    SIZE: tl.constexpr, OUT_SIZE: tl.constexpr, SPLITS: tl.constexpr, HAS_GAIN: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_inside = token < tokens
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside = row < OUT_SIZE
    split = tl.program_id(2)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    steps: tl.constexpr = (SIZE + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)  # of BLOCK_K columns, for each split
    even: tl.constexpr = SIZE % (SPLITS * BLOCK_K) == 0 and OUT_SIZE % BLOCK_N == 0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            _prefetch(weight, row, split * (steps * BLOCK_K), SIZE, PREFETCH)
        tl.extra.cuda.gdc_wait()
    if HAS_GAIN:
        gains = tl.load(gain + row, mask=row_inside, other=0.0).to(tl.float32)[:, None]
    inside = row_inside[:, None] & token_inside[None, :]
    target = residual + token.to(tl.int64)[None, :] * residual_stride + row[:, None]
    before = tl.load(target, mask=inside, other=0.0)
    for step in range(steps):
        column = (split * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        w = _weight_tile(weight, row, row_inside, column, SIZE, even)  # [BLOCK_N, BLOCK_K]
        values = _token_tile(x, x_stride, token, token_inside, column, SIZE, even)
        acc = tl.dot(w, tl.trans(values), acc, input_precision=PRECISION)
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    last = True
    if SPLITS > 1:
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts = partial + tile * (SPLITS * BLOCK_N * BLOCK_M) + place
        tl.store(parts + split * (BLOCK_N * BLOCK_M), acc)
        tl.debug_barrier()  # every thread's part is written before one thread announces it
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if last:
            tl.store(arrivals + tile, 0)  # ready for the next launch
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for part in tl.static_range(SPLITS):
                acc += tl.load(parts + part * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
    if last:
        total = (acc + before.to(tl.float32)).to(before.dtype)  # rounded here: the norm is of what is stored
        tl.store(target, total, mask=inside)
        if HAS_GAIN:
            total = total.to(tl.float32)
            tl.store(scaled + token.to(tl.int64)[None, :] * OUT_SIZE + row[:, None], total * gains, mask=inside)
            tl.store(squares + tl.program_id(0) * tokens + token, tl.sum(total * total, 0), mask=token_inside)


@dataclass(frozen=True)
class Tiles:
    """How a product is cut.

    Attributes:
        rows: of the weight in a program's tile, or pairs of rows where they come in pairs.
        columns: of the weight that are in flight together, of 16-bit numbers.
        splits: parts that the columns are cut into.
        joint: both rows of the pairs in one product.
        num_warps, num_stages: of a program, and of its pipeline of loads.
        prefetch: columns brought to L2 while the kernel before still runs; -1 starts no kernel early.
    """

    rows: int
    columns: int = 128
    splits: int = 1
    joint: bool = False
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = -1

    def launch(self, x: Tensor, size: int) -> dict[str, object]:
        """The arguments that all kernels share."""
        early = {"launch_pdl": True} if self.prefetch >= 0 else {}
        columns = self.columns * 2 // x.element_size()  # of float32 half as many take the same shared memory
        return {
            "BLOCK_M": _token_block(x.shape[0]),
            "BLOCK_K": max(16, min(columns, triton.next_power_of_2(size))),
            "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
            "PDL": self.prefetch >= 0,
            "PREFETCH": max(0, self.prefetch),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        } | early


def scale_rows(x: Tensor, gain: Tensor) -> Stream:
    """Begin a norm of `x [tokens, hidden]` with the weight `gain`."""
    tokens, hidden = x.shape
    scaled = torch.empty_like(x, memory_format=torch.contiguous_format)
    squares = torch.empty(1, tokens, dtype=torch.float32, device=x.device)
    pad = triton.next_power_of_2(hidden)
    _scale_kernel[(tokens,)](
        x, x.stride(0), gain, scaled, squares, SIZE=hidden, SIZE_PAD=pad, PDL=False,
        num_warps=min(8, max(1, pad // 512)),
    )  # fmt: skip
    return Stream(x, scaled, squares)


def qkv_rotate(
    stream: Stream,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    num_heads: int,
    rotary: tuple[Tensor, Tensor],
    positions: Tensor,
    layer_cache: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    head_norm: tuple[Tensor, float] | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """From the residual stream to attention's input: rotated queries, and keys and values in their pages.

    Args:
        stream: `[tokens, hidden]`, with the norm before the product begun.
        eps: that norm's epsilon.
        weight, bias: the packed product, `[(heads + 2 kv_heads) * head_dim, hidden]` and its bias or None.
        num_heads: query heads.
        rotary: the tables of stage D's `RotaryEmbedding`: cos and signed sin, each `[positions, 2, head_dim / 2]`.
        positions: int64 `[tokens]`.
        layer_cache: keys and values, each `[blocks, block_size, kv_heads, head_dim]`.
        slot_mapping: int64 `[tokens]`; -1 stores nothing.
        head_norm: weight `[heads + kv_heads, head_dim]` and epsilon of the heads' RMSNorm.
        tiles: how to cut the product; None is what was measured fastest.

    Returns:
        The rotated queries, `[tokens, heads, head_dim]`. Sums are float32, rounded once at the end.
    """
    tokens, hidden = stream.x.shape
    k_cache, v_cache = layer_cache
    kv_heads, head_dim = k_cache.shape[2:]
    half = head_dim // 2
    tiles = tiles or Tiles(rows=16)
    whole = triton.next_power_of_2(half)
    pairs = max(16, whole if head_norm is not None else min(tiles.rows, whole))
    query = torch.empty(tokens, num_heads, head_dim, dtype=stream.x.dtype, device=stream.x.device)
    head_weight, head_eps = head_norm if head_norm is not None else (weight, 0.0)
    parts = len(stream.squares)
    grid = ((num_heads + 2 * kv_heads) * triton.cdiv(half, pairs), triton.cdiv(tokens, _token_block(tokens)))
    _qkv_rotate_kernel[grid](
        stream.scaled, stream.scaled.stride(0), stream.squares, parts, tokens, eps, weight,
        weight if bias is None else bias, query, k_cache, v_cache, k_cache.stride(1), *rotary, positions, slot_mapping,
        head_weight, head_eps,
        SIZE=hidden, PARTS=triton.next_power_of_2(parts), HEADS=num_heads, KV_HEADS=kv_heads, HALF=half, PAIRS=pairs,
        HAS_BIAS=bias is not None, HAS_NORM=head_norm is not None, JOINT=tiles.joint, **tiles.launch(stream.x, hidden),
    )  # fmt: skip
    return query


def gate_up_silu(stream: Stream, eps: float, weight: Tensor, tiles: Tiles | None = None) -> Tensor:
    """`silu(gate) * up` of the normalised rows.

    Args:
        stream: `[tokens, hidden]`, with the norm before the product begun.
        eps: that norm's epsilon.
        weight: `[2 * intermediate, hidden]`, gate rows first.
        tiles: how to cut the product; None is what was measured fastest.

    Returns:
        `[tokens, intermediate]`.
    """
    tokens, hidden = stream.x.shape
    intermediate = weight.shape[0] // 2
    tiles = tiles or Tiles(rows=32)
    out = torch.empty(tokens, intermediate, dtype=stream.x.dtype, device=stream.x.device)
    parts = len(stream.squares)
    _gate_up_silu_kernel[triton.cdiv(intermediate, tiles.rows), triton.cdiv(tokens, _token_block(tokens))](
        stream.scaled, stream.scaled.stride(0), stream.squares, parts, tokens, eps, weight, out,
        SIZE=hidden, PARTS=triton.next_power_of_2(parts), INTERMEDIATE=intermediate, BLOCK_N=tiles.rows,
        JOINT=tiles.joint, **tiles.launch(stream.x, hidden),
    )  # fmt: skip
    return out


def product_add(
    x: Tensor, weight: Tensor, residual: Tensor, gain: Tensor | None, arrivals: Tensor, tiles: Tiles | None = None
) -> Stream | Tensor:
    """`residual + x Wᵀ`, written over `residual`, and the begin of its norm.

    Args:
        x: `[tokens, in_features]`.
        weight: `[out_features, in_features]`.
        residual: `[tokens, out_features]`.
        gain: weight `[out_features]` of the norm that reads the sum next; None begins none.
        arrivals: int32 zeros, one for each tile of the product; left as zeros. Calls that share them must follow one
            another on one stream.
        tiles: how to cut the product; None is what was measured fastest.

    Returns:
        The sum, as a `Stream` where there is a `gain`.

    Raises:
        ValueError: more tiles than counters.
    """
    tokens, in_features = x.shape
    out_features = weight.shape[0]
    tiles = tiles or (Tiles(rows=16) if in_features <= 2 * out_features else Tiles(rows=64, splits=8))
    block_m = _token_block(tokens)
    blocks = triton.cdiv(out_features, tiles.rows), triton.cdiv(tokens, block_m)
    if tiles.splits > 1 and blocks[0] * blocks[1] > len(arrivals):
        raise ValueError(f"a product of {blocks[0] * blocks[1]} tiles, but there are {len(arrivals)} counters")
    numbers = torch.empty(
        (tiles.splits > 1) * blocks[0] * blocks[1] * tiles.splits * tiles.rows * block_m + blocks[0] * tokens,
        dtype=torch.float32,
        device=x.device,
    )
    squares, partial = numbers[: blocks[0] * tokens].view(blocks[0], tokens), numbers[blocks[0] * tokens :]
    scaled = residual if gain is None else torch.empty_like(residual)
    _product_add_kernel[*blocks, tiles.splits](
        x, x.stride(0), tokens, weight, residual, residual.stride(0), weight if gain is None else gain, scaled, squares,
        partial, arrivals,
        SIZE=in_features, OUT_SIZE=out_features, SPLITS=tiles.splits, HAS_GAIN=gain is not None, BLOCK_N=tiles.rows,
        **tiles.launch(x, triton.cdiv(in_features, tiles.splits)),
    )  # fmt: skip
    return residual if gain is None else Stream(residual, scaled, squares)


def _token_block(tokens: int) -> int:
    """Tokens of a program's tile."""
    return max(16, min(64, triton.next_power_of_2(tokens)))
