"""Sampling by shard on a GPU: stage E's two sampler kernels, with an all-gather between the ranks in the middle.

A program finds the best token of a stretch of this rank's logits. The winners of all stretches are gathered (with two
ranks and 152 thousand tokens 10 from each rank), and the second kernel compares the winners of all ranks.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage_a_naive.contract.outputs import NO_TOKEN
from stage_e_batching.sampler.arithmetic import best_of_stretch, gumbel, is_infinite, load_logits, load_temperature
from stage_e_batching.sampler.kernels import SPAN, score_of_winner

_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit
def _best_of_stretch_kernel(
    scores,  # [rows, columns]: of the tokens from `first` on
    temperatures,  # float32 [rows]
    noise_keys,  # int32 [rows]
    winners,  # float32 [4, rows, stretches]: the winner's logit, its noise, the highest logit, the winner's id
    first,
    columns,
    row_stride,
    SPAN: tl.constexpr,
    NATIVE: tl.constexpr,  # see `gumbel`
):
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1)
    stretches = tl.num_programs(1)
    column = stretch * SPAN + tl.arange(0, SPAN)
    logit = load_logits(scores + row * row_stride, column, column < columns)
    temperature = load_temperature(temperatures, row)
    key = tl.load(noise_keys + row).to(tl.uint32, bitcast=True)
    highest = tl.max(logit, 0)
    best = stretch * SPAN + best_of_stretch(logit, highest, first + column, temperature, key, NATIVE)
    place = winners + row * stretches + stretch
    plane = tl.num_programs(0).to(tl.int64) * stretches
    tl.store(place, tl.load(scores + row * row_stride + best).to(tl.float32))
    tl.store(place + plane, gumbel(first + best, key, NATIVE))
    tl.store(place + 2 * plane, highest)
    tl.store(place + 3 * plane, (first + best).to(tl.float32))


@triton.jit
def _best_of_row_kernel(
    ids,  # int64 [2, rows]: the tokens, and the same with `NO_TOKEN`
    temperatures,  # float32 [rows]
    winners,  # float32 [ranks, 4, rows, stretches]
    stretches,
    count,  # ranks * stretches
    COUNT_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    plane = tl.num_programs(0).to(tl.int64) * stretches
    i = tl.arange(0, COUNT_PAD)
    inside = i < count
    place = winners + (i // stretches) * (4 * plane) + row * stretches + i % stretches
    logit = tl.load(place, mask=inside, other=float("-inf"))
    noise = tl.load(place + plane, mask=inside, other=0.0)
    highest = tl.max(tl.load(place + 2 * plane, mask=inside, other=float("-inf")), 0)
    score = score_of_winner(logit, noise, highest, load_temperature(temperatures, row))
    best = tl.argmax(score, 0, tie_break_left=True)
    token = tl.load(place + 3 * plane, mask=inside, other=0.0)
    token = tl.where(is_infinite(highest), 0, tl.sum(tl.where(i == best, token, 0.0), 0).to(tl.int64))
    tl.store(ids + row, token)
    tl.store(ids + tl.num_programs(0) + row, tl.where(is_infinite(highest), _NO_TOKEN, token))


def find_winners(scores: Tensor, temperatures: Tensor, noise_keys: Tensor, first: int) -> Tensor:
    """See `shard_sampling.find_winners`; here a row has a winner per stretch: `[4, rows, stretches]`."""
    rows, columns = scores.shape
    stretches = triton.cdiv(columns, SPAN)
    winners = torch.empty(4, rows, stretches, dtype=torch.float32, device=scores.device)
    _best_of_stretch_kernel[(rows, stretches)](
        scores,
        temperatures,
        noise_keys,
        winners,
        first,
        columns,
        scores.stride(0),
        SPAN=SPAN,
        NATIVE=isinstance(_best_of_stretch_kernel, triton.JITFunction),
        num_warps=8,
    )
    return winners


def compare_winners(winners: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """See `shard_sampling.compare_winners`."""
    ranks, _, rows, stretches = winners.shape
    ids = torch.empty(2, rows, dtype=torch.int64, device=winners.device)
    _best_of_row_kernel[(rows,)](
        ids,
        temperatures,
        winners,
        stretches,
        ranks * stretches,
        COUNT_PAD=triton.next_power_of_2(ranks * stretches),
        num_warps=1,
    )
    return ids[0], ids[1]
