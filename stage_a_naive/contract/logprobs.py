"""Log-probabilities of the chosen token and of the likeliest tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROWS = 32  # rows computed together: about 150 MiB for a vocabulary of 151,936
PromptLogprobs = list[dict[int, float] | None]  # by position: the likeliest tokens, then the prompt's token


def top_logprobs(logits: Tensor, count: int, token_id: int) -> dict[int, float]:
    """Return log-probabilities of one row `[vocab]`: of the `count` likeliest tokens, in order, and of `token_id`."""
    logprobs = logits.float().log_softmax(-1)
    ids = likeliest(logprobs, min(count, logprobs.numel()))
    found = dict(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    found.setdefault(token_id, float(logprobs[token_id]))
    return found


def likeliest(logprobs: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` highest log-probabilities `[..., vocab]`, highest first; ties by lowest id.

    `topk` does not specify which of several equal values it takes, and its choice may depend on `count`. So it gets
    64-bit keys that are all different: the bits of -logprob, then the id. The bits sort like the number, because
    -logprob is never negative.
    """
    ids = torch.arange(logprobs.shape[-1], device=logprobs.device)
    keys = (logprobs.abs().view(torch.int32).long() << 32) | ids
    return keys.topk(count, largest=False).values & 0xFFFFFFFF


def score_tokens(
    token_ids: list[int], count: int, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor]
) -> list[dict[int, float]]:
    """Return log-probabilities of given tokens and of the `count` likeliest at each position, as `top_logprobs` does.

    The logits are computed in pieces: for 2,048 tokens and that vocabulary they would take 1.2 GB in float32.

    Args:
        hidden: final states `[tokens, hidden]`; each row belongs to the token before.
        compute_logits: maps rows of `hidden` to logits `[rows, vocab]`.
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
