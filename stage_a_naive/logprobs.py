"""Log-probabilities: how likely the model found the chosen token and the likeliest others."""

from __future__ import annotations

from torch import Tensor


def top_logprobs(logits: Tensor, count: int, token_id: int) -> dict[int, float]:
    """Log-probabilities of the `count` likeliest tokens of one row `[vocab]`, likeliest first, and of `token_id`."""
    logprobs = logits.float().log_softmax(-1)
    best = logprobs.topk(min(count, logprobs.numel()))
    found = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    found.setdefault(token_id, float(logprobs[token_id]))
    return found
