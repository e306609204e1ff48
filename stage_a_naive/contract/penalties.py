"""Penalties, which lower the scores of tokens already used, so that the model repeats itself less."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stage_a_naive.contract.params import SamplingParams


def apply_penalties(
    logits: Tensor, params: Sequence[SamplingParams], prompt_ids: Sequence[list[int]], output_ids: Sequence[list[int]]
) -> Tensor:
    """Return new logits with lower scores for tokens already used.

    Args:
        logits: `[rows, vocab]`, float32.
        params: one per row.
        prompt_ids, output_ids: the tokens of each row's prompt, and its generated tokens so far.

    The repetition penalty is from Keskar et al., "CTRL" (2019), and counts prompt and output; the presence and
    frequency penalties are OpenAI's, and count only the output.
    """
    logits = logits.clone()
    for row, (p, prompt, output) in enumerate(zip(params, prompt_ids, output_ids, strict=True)):
        scores = logits[row]  # [vocab], a view
        if p.repetition_penalty != 1:
            seen = torch.tensor(sorted({*prompt, *output}), device=logits.device)
            values = scores[seen]
            scores[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        if output and (p.presence_penalty or p.frequency_penalty):
            used, counts = torch.tensor(output, device=logits.device).unique(return_counts=True)
            scores[used] -= p.presence_penalty + p.frequency_penalty * counts
    return logits
