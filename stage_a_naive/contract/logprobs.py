"""Log-probabilities: how likely the model found the chosen token and the likeliest others."""

from __future__ import annotations

import torch
from torch import Tensor


def top_logprobs(logits: Tensor, count: int, token_id: int) -> dict[int, float]:
    """Log-probabilities of the `count` likeliest tokens of one row `[vocab]`, likeliest first, and of `token_id`."""
    logprobs = logits.float().log_softmax(-1)
    ids = likeliest(logprobs, min(count, logprobs.numel()))
    found = dict(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    found.setdefault(token_id, float(logprobs[token_id]))
    return found


def likeliest(logprobs: Tensor, count: int) -> Tensor:
    """Ids of the `count` highest log-probabilities `[..., vocab]`, highest first, among equals the lowest id first.

    `topk` leaves open which of equal values it takes, and takes others for another `count`. So it gets 64-bit keys that
    are all different: the bits of -logprob, which sort like the number itself because it is never negative, and the id.
    """
    ids = torch.arange(logprobs.shape[-1], device=logprobs.device)
    keys = (logprobs.abs().view(torch.int32).long() << 32) | ids
    return keys.topk(count, largest=False).values & 0xFFFFFFFF
