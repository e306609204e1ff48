"""Temperature, top-k, top-p and min-p: which tokens may be sampled at all, and with what probabilities.

They are applied in the order of Hugging Face's generation pipeline: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stage_a_naive.params import SamplingParams


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Apply temperature, top-k, top-p and min-p to one row `[vocab]`; in the new row, filtered tokens are -inf."""
    # Subtracting the maximum first changes no probability and keeps a very small temperature from overflowing. One that
    # float32 cannot hold would be 0, and 0 / 0 no number.
    logits = (logits - logits.max()) / max(params.temperature, torch.finfo(torch.float32).tiny)
    if 0 < params.top_k < logits.numel():
        kth_value = logits.topk(params.top_k).values[-1]
        logits = logits.masked_fill(logits < kth_value, -math.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(descending=True, stable=True)
        probs = ordered.softmax(-1)
        mass_before = probs.cumsum(-1) - probs
        beyond = mass_before >= params.top_p
        beyond[:1].zero_()  # the likeliest token stays, also where float32 takes a tiny top_p for 0
        # A mask and not a list of indices, whose length the CPU would have to wait for.
        outside = torch.zeros_like(beyond).scatter(0, order, beyond)
        logits = logits.masked_fill(outside, -math.inf)
    if params.min_p > 0:
        # p >= min_p * p_max, in logarithms; the maximum is 0 by construction.
        logits = logits.masked_fill(logits < math.log(params.min_p), -math.inf)
    return logits
