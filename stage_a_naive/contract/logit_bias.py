"""A bias: numbers that a request adds to the logits of tokens of its choice, to ask for them or to keep them out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stage_a_naive.contract.params import SamplingParams


def add_logit_bias(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Add each row's bias to its logits, in new float32 ones, without waiting for the device.

    Args:
        logits: `[rows, vocab]`.
        params: one per row; some row has a bias.
    """
    entries = [(row, token_id, bias) for row, p in enumerate(params) for token_id, bias in p.logit_bias]
    rows, ids, biases = zip(*entries, strict=True)
    pinned = logits.device.type == "cuda"
    places = torch.tensor([rows, ids], pin_memory=pinned).to(logits.device, non_blocking=True)
    values = torch.tensor(biases, dtype=torch.float32, pin_memory=pinned).to(logits.device, non_blocking=True)
    return logits.float().index_put(tuple(places), values, accumulate=True)


def check_logit_bias(index: int, params: SamplingParams, vocab_size: int) -> None:
    """Raise `ValueError` for a bias, that of prompt `index`, of a token outside the vocabulary."""
    highest = max(token_id for token_id, _ in params.logit_bias)
    if highest >= vocab_size:
        raise ValueError(f"logit_bias of prompt {index}: token id {highest} is outside the vocabulary of {vocab_size}")
