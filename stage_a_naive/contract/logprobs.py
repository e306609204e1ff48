"""Log-probabilities: how likely the model found the chosen token and the likeliest others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROWS = 32  # whose log-probabilities are computed together: about 150 MiB for a vocabulary of 151,936
PromptLogprobs = list[dict[int, float] | None]  # by position: the likeliest tokens, then the prompt's own


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


def score_tokens(
    token_ids: list[int], count: int, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor]
) -> list[dict[int, float]]:
    """Log-probabilities of given tokens, and of the `count` likeliest in the place of each, as `top_logprobs`.

    The logits are made in pieces: those of 2,048 tokens of that vocabulary take 1.2 GB in float32.

    Args:
        hidden: final states `[tokens, hidden]`, each of the token before.
        compute_logits: from rows of them to `[rows, vocab]`.
    """
    found: list[dict[int, float]] = []
    while len(found) < len(token_ids):
        at = len(found)
        ids = token_ids[at : at + ROWS]
        logprobs = compute_logits(hidden[at : at + len(ids)]).float().log_softmax(-1)
        best = likeliest(logprobs, min(count, logprobs.shape[1]))
        own = logprobs.gather(1, torch.tensor(ids, device=logprobs.device)[:, None]).tolist()
        for token_id, [value], *told in zip(ids, own, best.tolist(), logprobs.gather(1, best).tolist(), strict=True):
            one = dict(zip(*told, strict=True))
            one.setdefault(token_id, value)
            found.append(one)
    return found
