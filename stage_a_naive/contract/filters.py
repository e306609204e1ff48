"""Temperature, top-k, top-p and min-p: which tokens may be sampled, and with what probabilities.

They are applied in the order of Hugging Face's generation pipeline: temperature, top-k, top-p, min-p. Each of the three
filters keeps the tokens down to some score, so together they are one number per row, the *cut-off*. Tokens with equal
scores are kept or removed together.

top-p compares sums of probabilities. A floating-point sum depends on the order of its additions: on the device, on the
batch, and on how a kernel divides its work. So the last token that top-p keeps would depend on these too. Here scores
and probabilities are integers. A token's *distance* is the difference between the best score and its score, in steps of
2**-25; its *weight* is `exp(-distance)` in steps of 2**-40, computed with explicit arithmetic. Integers have the same
sum in any order, so every stage, on any device, cuts the same logits at the same token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stage_a_naive.contract.params import SamplingParams

SMALLEST = torch.finfo(torch.float32).tiny  # a temperature too small for float32 would become 0, and 0 / 0 is NaN
HOTTEST = 1e30  # at this temperature the noise alone decides; a higher one could give -inf / inf, which is NaN
STEPS = 2**25  # steps of distance per unit of the scaled score
BEYOND = 32 - 2**-19  # the largest distance, where the weight is 0; 32 times 2**25 would not fit into 30 bits
FARTHEST = int(BEYOND * STEPS)
HALVINGS = math.log2(math.e) / STEPS  # exp(-1 / STEPS) is 2 to minus this
# 2**-x for x from 0 to 1, with an error of at most 1.7e-7: about the best polynomial of degree 6 (minimax).
EXP2 = (1.0, -0.69314706, 0.24022436, -0.055490755, 0.009579177, -0.0012747458, 0.0001090224)


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Apply temperature, top-k, top-p and min-p to one row `[vocab]`; in the new row, filtered tokens are -inf."""
    # Subtracting the maximum first changes no probability and keeps a very small temperature from overflowing.
    temperature = torch.tensor(min(max(params.temperature, SMALLEST), HOTTEST))
    scaled = (logits - logits.max()) * (1 / temperature)
    if not params.filters(logits.numel()):
        return scaled
    distance = distances(scaled)
    return scaled.masked_fill(distance > cut_off(distance, params), -math.inf)


def cut_off(distance: Tensor, params: SamplingParams) -> Tensor:
    """Return the largest distance that top-k, top-p and min-p keep in one row `[vocab]`: an integer `[]`."""
    nearest = distance.sort().values
    last = nearest[params.top_k - 1 if 0 < params.top_k < len(nearest) else -1]
    if params.top_p < 1:
        # The smallest set of likeliest tokens whose share of the probability that top-k kept reaches p.
        mass = weights(nearest).masked_fill(nearest > last, 0).cumsum(0)
        # A float64 has 53 bits and may round the product up, so it is limited to the whole sum.
        wanted = (mass[-1].double() * torch.tensor(params.top_p).double()).long().clamp(min=1).minimum(mass[-1])
        last = nearest.take(torch.searchsorted(mass, wanted))
    return last.clamp(max=farthest_for(params.min_p))


def farthest_for(min_p: float) -> int:
    """Return the largest distance of a token that is at least `min_p` times as likely as the likeliest."""
    return min(int(-math.log(min_p) * STEPS), FARTHEST) if min_p else FARTHEST


def distances(scaled: Tensor) -> Tensor:
    """Return how far scaled scores (at most 0, any shape) are below 0: int32, in steps of 2**-25; NaN counts as 0."""
    return (scaled.neg().nan_to_num(0).clamp(max=BEYOND) * STEPS).to(torch.int32)


def weights(distance: Tensor) -> Tensor:
    """Return `exp(-distance)` in steps of 2**-40, as int64.

    Every operation is rounded as IEEE 754 prescribes, on every device, so the results are bitwise equal. The results of
    a library's `exp` are not.
    """
    halvings = distance.float() * HALVINGS
    whole = halvings.to(torch.int32)
    x = halvings - whole  # 2**-halvings is 2**-x, shifted right by `whole`
    power = torch.full_like(x, EXP2[-1])
    for coefficient in reversed(EXP2[:-1]):
        power = power * x + coefficient
    return (power * 2**24).long() << 16 >> whole
