"""Run a layer's experts in Triton kernels, from the router to the residual, without waiting for the device.

A layer reads only the experts that its tokens chose, so the kernels follow the tokens:

    few tokens     norm + router + choice · gate and up of every pair · down of a token's pairs + residual    3 launches
    more tokens    norm + router + choice (or norm · router · choice) · group by expert
                   gate and up of every block · down of every block · sum + residual                          5 or 7

A *pair* is a token and one of its experts. With few tokens nearly all pairs have different experts, so each pair is a
block of one row, and nothing is sorted. With more tokens the pairs of an expert share the reading of its matrices: they
are grouped in blocks of `block` rows. How many blocks there are is known on the device alone. The grid has room for the
most that there can be, `min(pairs, experts + pairs / block)`, and programs beyond the last block end at once: so a CUDA
graph can hold the launches (MegaBlocks, Gale et al. 2022, arXiv:2211.15841, groups by blocks, too).

Where several products are added, the order is fixed: a run gives the same tokens as the one before.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from beyond.experts.expert_kernels import (
    add_pairs_kernel,
    choose_kernel,
    down_add_kernel,
    down_kernel,
    gate_up_silu_kernel,
    group_kernel,
    norm_route_kernel,
)
from beyond.quantization.formats import Quantized
from beyond.quantization.options import GROUP_SIZE
from stage_a_naive.checkpoints.experts import Experts
from stage_f_graph_tp.kernels.pdl import pdl_settings
from stage_f_graph_tp.kernels.skinny_gemm import Stream, ceil_div

FEW_TOKENS = 8  # up to this many, a block is one pair
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Choice(NamedTuple):
    """The experts of every token, largest weight first. -1: none, as for padding rows, or one of another rank."""

    weights: Tensor  # float32 [tokens, per_token]
    chosen: Tensor  # int32 [tokens, per_token]


class Groups(NamedTuple):
    """The pairs, grouped by expert into blocks."""

    order: Tensor  # int32 [blocks, rows]: the pair of every row; -1: none
    experts: Tensor  # int32 [blocks]; -1: no such block


@dataclass(frozen=True)
class Tiles:
    """How a product is divided into programs: rows of the matrix (or pairs of rows) and columns of a tile."""

    rows: int
    columns: int = 128
    warps: int = 4
    stages: int = 4


def norm_route(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    router: Tensor,
    experts: Experts,
    slots: Tensor,
    arrival_counters: Tensor,
    pdl: bool = True,
) -> tuple[Tensor, Choice]:
    """Normalise rows, multiply by the router and choose the experts, in one launch, for a few dozen tokens.

    Args:
        x: `[tokens, hidden]`.
        norm_weight, eps: of the RMSNorm.
        router: `[count, hidden]`.
        slots: int64 `[tokens]`; a row with a negative one is padding.
        arrival_counters: int32 zeros, one per 16 tokens; zeros again afterwards.

    Returns:
        The normalised rows, and the choice. Scores are rounded to the dtype of `x`, as by a separate product.
    """
    tokens, hidden = x.shape
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    scores = torch.empty(tokens, experts.count, dtype=torch.float32, device=x.device)
    choice = _empty_choice(tokens, experts, x.device)
    norm_route_kernel[ceil_div(experts.count, 16), ceil_div(tokens, 16)](
        x,
        x.stride(0),
        slots,
        tokens,
        norm_weight,
        eps,
        router,
        normed,
        scores,
        arrival_counters,
        *choice,
        SIZE=hidden,
        **_choosing(experts, x.dtype),
        BLOCK_M=16,
        BLOCK_N=16,
        BLOCK_K=_columns(hidden, 256 if x.dtype != torch.float32 else 64),
        PRECISION=_precision(x.dtype),
        num_warps=4,
        num_stages=3,
        **pdl_settings(x.device, pdl),
    )
    return normed, choice


def choose(scores: Tensor, experts: Experts, slots: Tensor, pdl: bool = True) -> Choice:
    """Choose the experts of each token from `scores [tokens, count]`; `slots` as in `norm_route`."""
    tokens = len(scores)
    choice = _empty_choice(tokens, experts, scores.device)
    rows = 4
    choose_kernel[(ceil_div(tokens, rows),)](
        scores,
        slots,
        tokens,
        *choice,
        **_choosing(experts, scores.dtype),
        BLOCK_M=rows,
        num_warps=4,
        **pdl_settings(scores.device, pdl),
    )
    return choice


def group(chosen: Tensor, count: int, block: int, pdl: bool = True) -> Groups:
    """Group the pairs of `chosen [tokens, per_token]` by expert, in their order, in blocks of `block` rows."""
    pairs = chosen.numel()
    most = min(pairs, count + pairs // block)
    order = torch.empty(most, block, dtype=torch.int32, device=chosen.device)
    experts = torch.empty(most, dtype=torch.int32, device=chosen.device)
    group_kernel[(count,)](
        chosen,
        pairs,
        order,
        experts,
        most,
        COUNT=count,
        COUNT_PAD=_power_of_2(count + 1),
        BLOCK_M=block,
        CHUNK=min(2048, max(128, _power_of_2(pairs))),
        num_warps=4,
        **pdl_settings(chosen.device, pdl),
    )
    return Groups(order, experts)


def gate_up_silu(
    x: Tensor,
    chosen: Tensor,
    groups: Groups | None,
    weight: Tensor | Quantized,
    experts: Experts,
    tiles: Tiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """Compute `silu(gate) * up` of every pair.

    Args:
        x: `[tokens, hidden]`, contiguous.
        chosen: int32 `[tokens, per_token]`.
        groups: blocks of pairs; None: every pair is a block.
        weight: `[count * 2 * size, hidden]`: of each expert gate, then up.

    Returns:
        `[tokens * per_token, size]`. The rows of padding are not written.
    """
    hidden, size = x.shape[1], experts.size
    out = torch.empty(chosen.numel(), size, dtype=x.dtype, device=x.device)
    values, scales, group_size = _parts(weight)
    of_blocks = chosen if groups is None else groups.experts
    block = 16 if groups is None else groups.order.shape[1]
    tiles = tiles or choose_tiles(block, len(x) if groups is None else None, x.dtype, values.dtype, True)
    gate_up_silu_kernel[ceil_div(size, tiles.rows), of_blocks.numel()](
        x,
        of_blocks,
        chosen if groups is None else groups.order,
        values,
        scales,
        out,
        SIZE=hidden,
        INTERMEDIATE=size,
        PER_TOKEN=experts.per_token,
        GROUPED=groups is not None,
        **_settings(tiles, block, hidden, group_size, x, pdl),
    )
    return out


def down_add(
    x: Tensor,
    choice: Choice,
    groups: Groups | None,
    weight: Tensor | Quantized,
    experts: Experts,
    residual: Tensor,
    tiles: Tiles | None = None,
    pdl: bool = True,
) -> Stream:
    """Add the weighted outputs of every token's experts to `residual [tokens, hidden]`, in place.

    Args:
        x: `[tokens * per_token, size]`, what `gate_up_silu` returns.
        groups: blocks of pairs: the products of all pairs, and in a second launch their sums. None: one launch, in
            which a program multiplies and adds the pairs of one token.
        weight: `[count * hidden, size]`.
    """
    tokens, hidden = residual.shape
    values, scales, group_size = _parts(weight)
    per_token = _power_of_2(experts.per_token)
    block = max(16, per_token) if groups is None else groups.order.shape[1]
    tiles = tiles or choose_tiles(block, tokens if groups is None else None, x.dtype, values.dtype, False)
    if groups is None:
        tiles = replace(tiles, rows=max(1, ceil_div(tiles.rows, per_token)))
    programs = ceil_div(hidden, tiles.rows)
    sizes = {"SIZE": experts.size, "OUT_SIZE": hidden}
    settings = sizes | _settings(tiles, block, experts.size, group_size, x, pdl)
    squares = torch.empty(programs if groups is None else 1, tokens, dtype=torch.float32, device=x.device)
    if groups is None:
        down_add_kernel[programs, tokens](
            x,
            choice.chosen,
            choice.weights,
            values,
            scales,
            residual,
            residual.stride(0),
            squares,
            tokens,
            PER_TOKEN=experts.per_token,
            PER_TOKEN_PAD=per_token,
            **settings,
        )
        return Stream(residual, squares)
    products = torch.empty(tokens * experts.per_token, hidden, dtype=x.dtype, device=x.device)
    down_kernel[programs, len(groups.experts)](
        x, groups.experts, groups.order, values, scales, choice.weights, products, **settings
    )
    add_pairs_kernel[(tokens,)](
        products,
        choice.chosen,
        residual,
        residual.stride(0),
        squares,
        SIZE=hidden,
        SIZE_PAD=_power_of_2(hidden),
        PER_TOKEN=experts.per_token,
        num_warps=min(8, max(1, _power_of_2(hidden) // 512)),
        **pdl_settings(x.device, pdl),
    )
    return Stream(residual, squares)


def run_experts(
    x: Tensor,
    choice: Choice,
    gate_up: Tensor | Quantized,
    down: Tensor | Quantized,
    experts: Experts,
    residual: Tensor,
    few_tokens: int = FEW_TOKENS,
    pdl: bool = True,
) -> Stream:
    """Add the outputs of the chosen experts to `residual`, in place; arguments as above."""
    groups = None
    if len(x) > few_tokens:
        groups = group(choice.chosen, len(experts.held), block_rows(len(x), experts), pdl)
    activated = gate_up_silu(x, choice.chosen, groups, gate_up, experts, pdl=pdl)
    return down_add(activated, choice, groups, down, experts, residual, pdl=pdl)


def block_rows(tokens: int, experts: Experts) -> int:
    """Return the rows of a block: about as many as an expert has tokens."""
    return max(16, min(128, _power_of_2(ceil_div(tokens * experts.per_token, experts.count))))


@lru_cache(maxsize=256)
def choose_tiles(block: int, few: int | None, dtype: torch.dtype, stored: torch.dtype, is_gate_up: bool) -> Tiles:
    """Choose tiles: narrow ones to read fast, and for large blocks square ones to multiply fast.

    Args:
        block: rows of a block.
        few: tokens, if every pair is a block; None if the pairs are grouped.
        dtype, stored: of the activations and of the matrices.
    """
    if dtype == torch.float32:  # tensor cores do not multiply float32 at full precision: small tiles
        return Tiles(16, GROUP_SIZE if stored.itemsize == 1 else 32, stages=2)
    columns = 128 if block < 64 else 64
    if stored.itemsize == 1:
        columns = GROUP_SIZE  # a group of scales
    if block >= 64:
        return Tiles(64 if is_gate_up else 128, columns, warps=8, stages=3)
    # The fastest of a sweep on an H200, for Qwen3-30B-A3B (`python -m benchmarks.micro experts part=tiles`).
    if few is not None:
        return Tiles(32, columns, stages=3) if is_gate_up else Tiles(64, columns, stages=5 if few == 1 else 3)
    return Tiles(32 if is_gate_up else 64, columns, stages=4)


def _settings(tiles: Tiles, block: int, size: int, group_size: int, x: Tensor, pdl: bool) -> dict[str, Any]:
    return {
        "GROUP": group_size,
        "BLOCK_M": block,
        "BLOCK_N": tiles.rows,
        "BLOCK_K": group_size or _columns(size, tiles.columns),
        "PRECISION": _precision(x.dtype),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    } | pdl_settings(x.device, pdl)


def _choosing(experts: Experts, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "COUNT": experts.count,
        "COUNT_PAD": _power_of_2(experts.count),
        "PER_TOKEN": experts.per_token,
        "PER_TOKEN_PAD": _power_of_2(experts.per_token),
        "SUM_TO_ONE": experts.weights_sum_to_one,
        "ROUND_TO": _TYPES[dtype if experts.rounds_weights else torch.float32],
    }


def _empty_choice(tokens: int, experts: Experts, device: torch.device) -> Choice:
    shape = tokens, experts.per_token
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    return Choice(weights, torch.empty(shape, dtype=torch.int32, device=device))


def _parts(weight: Tensor | Quantized) -> tuple[Tensor, Tensor | None, int]:
    """Return the stored numbers, their scales if there are any, and the columns of a scale; 0: all of a row."""
    if isinstance(weight, Tensor):
        return weight, None, 0
    return weight.values, weight.scales, GROUP_SIZE if weight.scales.shape[1] > 1 else 0


def _columns(size: int, most: int) -> int:
    return max(16, min(most, _power_of_2(size)))


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def _power_of_2(number: int) -> int:
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()
