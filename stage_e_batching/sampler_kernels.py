"""A Triton kernel that samples: temperature, noise and argmax in one pass over the logits.

PyTorch would write the scaled logits, the random bits, the noise and the sum to memory and read them back, a dozen
passes over `[rows, vocab]`. Everything a logit needs is known where it is read, its temperature, its row's key and its
own token id, so one pass that keeps the best of each stretch is enough: 256 rows of 152 thousand bfloat16 logits are
78 MB, read once. A second, tiny kernel compares the stretches' winners.

The random bits are stage A's: the same hash in unsigned 32-bit arithmetic. The noise made of them differs from its
in the fifth digit, so a sampled token differs only where two tokens come that close: one in some hundred thousand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage_e_batching import sampler

SPAN = 8192  # logits a program looks at, held in registers
HOTTEST = tl.constexpr(sampler.HOTTEST)


@triton.jit
def _mix32(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log2(x, NATIVE: tl.constexpr):
    if NATIVE:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def gumbel(token, key, NATIVE: tl.constexpr):
    """Compute `-log(-log(u))` with the GPU's own base-2 logarithm, which is an instruction and not a function.

    That instruction is off by up to 2**-22, absolutely, between 1/2 and 2: too much for -log(u) where u is close to 1,
    which is just where the winners are. There the series of -log(1 - x) is used.
    """
    bits = _mix32(_mix32(token.to(tl.uint32)) ^ key)
    uniform = ((bits >> 9).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    x = 1.0 - uniform  # exact
    series = x * (1.0 + x * (0.5 + x * (0.33333334 + x * 0.25)))
    exponential = tl.where(x < 0.015625, series, _log2(uniform, NATIVE) * -0.6931472)
    return _log2(exponential, NATIVE) * -0.6931472


@triton.jit
def load_temperature(temperatures, row):
    return tl.minimum(tl.load(temperatures + row), HOTTEST)


@triton.jit
def best_of_stretch(logit, highest, token, temperature, key, NATIVE: tl.constexpr):
    """Find the winner's index in a stretch of a row: logits, their maximum, their tokens."""
    if temperature == 0.0:
        best = tl.argmax(logit, 0, tie_break_left=True)
    else:
        # A stretch may be filtered out entirely: -inf minus -inf would be no number.
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        best = tl.argmax((logit - shift) * (1.0 / temperature) + gumbel(token, key, NATIVE), 0, tie_break_left=True)
    return best


@triton.jit
def score_of_winner(logit, noise, highest, temperature):
    """Compute the score of a stretch's winner beside those of the other stretches; `highest` is the row's."""
    greedy = temperature == 0.0
    return tl.where(greedy, logit, (logit - highest) * (1.0 / tl.where(greedy, 1.0, temperature)) + noise)


@triton.jit
def _best_of_stretch_kernel(
    logits,  # [rows, vocab]
    temperatures,  # float32 [rows]
    noise_keys,  # int32 [rows]
    winners,  # float32 [3, rows, stretches]: the winner's logit, its noise, and the highest logit
    winner_ids,  # int64 [rows, stretches]
    vocab,
    row_stride,
    SPAN: tl.constexpr,
    NATIVE: tl.constexpr,  # the logarithm is the GPU's instruction; Triton's interpreter has none
):
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1)
    stretches = tl.num_programs(1)
    first = stretch * SPAN
    token = first + tl.arange(0, SPAN)
    logit = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    temperature = load_temperature(temperatures, row)
    key = tl.load(noise_keys + row).to(tl.uint32, bitcast=True)
    highest = tl.max(logit, 0)
    best = first + best_of_stretch(logit, highest, token, temperature, key, NATIVE)
    place = row * stretches + stretch
    plane = tl.num_programs(0).to(tl.int64) * stretches
    tl.store(winners + place, tl.load(logits + row * row_stride + best).to(tl.float32))
    tl.store(winners + plane + place, gumbel(best, key, NATIVE))
    tl.store(winners + 2 * plane + place, highest)
    tl.store(winner_ids + place, best.to(tl.int64))


@triton.jit
def _best_of_row_kernel(
    ids,  # int64 [rows]
    temperatures,  # float32 [rows]
    winners,  # float32 [3, rows, stretches]
    winner_ids,  # int64 [rows, stretches]
    stretches,
    STRETCHES_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.arange(0, STRETCHES_PAD)
    inside = stretch < stretches
    place = row * stretches + stretch
    plane = tl.num_programs(0).to(tl.int64) * stretches
    logit = tl.load(winners + place, mask=inside, other=float("-inf"))
    noise = tl.load(winners + plane + place, mask=inside, other=0.0)
    highest = tl.max(tl.load(winners + 2 * plane + place, mask=inside, other=float("-inf")), 0)
    score = score_of_winner(logit, noise, highest, load_temperature(temperatures, row))
    best = tl.argmax(score, 0, tie_break_left=True)
    token = tl.load(winner_ids + place, mask=inside, other=0)
    tl.store(ids + row, tl.sum(tl.where(stretch == best, token, 0), 0))


def sample_rows(scores: Tensor, temperatures: Tensor, noise_keys: Tensor, out: Tensor | None = None) -> Tensor:
    """Sample one token per row: gumbel-max at the row's temperature, plain argmax where that is 0.

    Args:
        scores: `[rows, vocab]`, any floating dtype; the vocabulary's stride is 1.
        temperatures: float32 `[rows]`.
        noise_keys: int32 `[rows]`, the bits of `noise_key(seed, step)`.
        out: int64 `[rows]`, or None for a new tensor.

    Raises:
        ValueError: the logits of a row are not adjacent.
    """
    rows, vocab = scores.shape
    if scores.stride(1) != 1:
        raise ValueError(f"scores have strides {scores.stride()}; the logits of a row must be adjacent")
    stretches = triton.cdiv(vocab, SPAN)
    winners = torch.empty(3, rows, stretches, dtype=torch.float32, device=scores.device)
    winner_ids = torch.empty(rows, stretches, dtype=torch.int64, device=scores.device)
    ids = torch.empty(rows, dtype=torch.int64, device=scores.device) if out is None else out
    _best_of_stretch_kernel[(rows, stretches)](
        scores,
        temperatures,
        noise_keys,
        winners,
        winner_ids,
        vocab,
        scores.stride(0),
        SPAN=SPAN,
        NATIVE=isinstance(_best_of_stretch_kernel, triton.JITFunction),
        num_warps=8,
    )
    _best_of_row_kernel[(rows,)](
        ids,
        temperatures,
        winners,
        winner_ids,
        stretches,
        STRETCHES_PAD=triton.next_power_of_2(stretches),
        num_warps=1,
    )
    return ids
