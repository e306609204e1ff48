"""From logits to the next token.

A language model ends in one score (a *logit*) for every token of its vocabulary. *Greedy* decoding takes the token with
the highest one. With a *temperature*, the logits become probabilities, `softmax(logits / temperature)`, and a token is
sampled from them, by the Gumbel-max trick: if `g` is independent Gumbel(0, 1) noise, then `argmax(logits + g)` is
distributed as `softmax(logits)` (Gumbel 1954; Maddison et al., "A* Sampling", 2014).

Each other sampling option has a file: rules about single tokens (`token_rules.py`), penalties (`penalties.py`), top-k,
top-p and min-p (`filters.py`), a seed (`noise.py`). They apply in the order of Hugging Face's generation pipeline:

    rules -> penalties -> temperature -> top-k -> top-p -> min-p -> sample
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stage_a_naive.contract.errors import shown
from stage_a_naive.contract.filters import filter_logits
from stage_a_naive.contract.noise import gumbel_noise
from stage_a_naive.contract.outputs import NO_TOKEN
from stage_a_naive.contract.params import SamplingParams
from stage_a_naive.contract.penalties import apply_penalties
from stage_a_naive.contract.token_rules import apply_rules

if TYPE_CHECKING:
    from stage_a_naive.contract.outputs import Completion, SamplingFunction


def sample(logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], steps: Sequence[int]) -> Tensor:
    """Choose one token per row; a row's choice depends only on that row.

    Args:
        logits: `[rows, vocab]`, float32, penalties already applied.
        params, seeds: one per row.
        steps: how many tokens each row has generated before this one.

    Returns:
        ids `[rows]`, int64, on the logits' device.
    """
    chosen = []
    for row, p, seed, step in zip(logits, params, seeds, steps, strict=True):
        if p.temperature == 0:
            chosen.append(row.argmax())
        else:
            chosen.append((filter_logits(row, p) + gumbel_noise(seed, step, row.numel(), row.device)).argmax())
    return torch.stack(chosen)


def choose_tokens(
    logits: Tensor,
    completions: Sequence[Completion],
    steps: Sequence[int] | None = None,
    penalise: Callable[..., Tensor] = apply_penalties,
    sample: Callable[..., Tensor] = sample,
) -> Tensor:
    """Choose the next token of each request in one call.

    Args:
        logits: `[rows, vocab]`, float32.
        completions: the answers so far, one per row; all their requests have the same `sampling_fn`.
        steps: how many tokens each request has generated; None counts the tokens in its completion. An engine that
            reads tokens late has chosen more tokens than the completion holds. Penalties and bad words need all tokens
            in the completion.
        penalise, sample: functions for these two steps; the defaults work row by row.

    Returns:
        ids `[rows]`, int64, on the logits' device. If a replaced `sampling_fn` fails for a row, that row's completion
        fails and its id is meaningless. If a row's logits have no finite maximum, its id is `NO_TOKEN`.
    """
    requests = [completion.request for completion in completions]
    params = [request.params for request in requests]
    steps = [completion.num_generated_tokens for completion in completions] if steps is None else steps
    rules = [request.token_rules for request in requests]
    if any(rules):
        logits = apply_rules(logits, rules, steps, [completion.token_ids for completion in completions])
    if any(p.needs_penalties for p in params):
        prompts = [request.prompt_token_ids for request in requests]
        logits = penalise(logits, params, prompts, [completion.token_ids for completion in completions])
    sampling_fn = requests[0].sampling_fn
    if sampling_fn is not None:
        ids, errors = replaced_ids(sampling_fn, logits, params)
        for row, error in errors.items():
            completions[row].fail(error)
    else:
        ids = sample(logits, params, [request.seed for request in requests], steps)
    return where_finite(ids, logits)


def where_finite(ids: Tensor, scores: Tensor) -> Tensor:
    """Replace the ids `[rows]` with `NO_TOKEN` where the maximum of `scores [rows, vocab]` is NaN or infinite."""
    best = scores.amax(-1)
    return ids.masked_fill((best - best).bool(), NO_TOKEN)  # inf - inf is NaN, which is not 0


def replaced_ids(
    sampling_fn: SamplingFunction, logits: Tensor, params: Sequence[SamplingParams]
) -> tuple[Tensor, dict[int, Exception]]:
    """Choose tokens with a replaced sampler.

    If it fails for several rows together, it is called again for each row alone, so that the other rows keep their
    tokens.

    Args:
        logits: `[rows, vocab]`, float32, penalties already applied.
        params: one per row.

    Returns:
        ids `[rows]`, int64, on the logits' device; and the errors of the rows that failed, whose ids are 0. If it fails
        for the rows together and for no single row, every row gets that error.
    """
    try:
        # The function gets a copy, because it may change or keep it, and log-probabilities need the model's
        # logits. (A compiled step writes its next logits to the same memory.)
        return checked_ids(sampling_fn(logits.clone(), list(params)), logits), {}
    except Exception as error:
        ids, errors = torch.zeros(len(params), dtype=torch.int64, device=logits.device), {0: error}
        if len(params) > 1:
            alone = [replaced_ids(sampling_fn, row[None], [own]) for row, own in zip(logits, params, strict=True)]
            errors = {row: failed[0] for row, (_, failed) in enumerate(alone) if failed}
            errors = errors or dict.fromkeys(range(len(params)), error)
            ids = torch.cat([chosen for chosen, _ in alone])
        return ids, errors


def checked_ids(ids: Tensor, logits: Tensor) -> Tensor:
    """Check what a replaced sampler returned for logits `[rows, vocab]`; return it as int64 `[rows]`.

    Waits for the device, because an id outside the vocabulary would make a GPU abort in the next step.

    Raises:
        ValueError: the result is not one integer id per row, or an id is outside the vocabulary.
    """
    rows, vocab_size = logits.shape
    if not isinstance(ids, Tensor) or ids.shape != (rows,) or ids.dtype not in (torch.int64, torch.int32):
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else shown(ids)
        raise ValueError(f"sampling_fn must return a tensor of integer ids of shape [{rows}], got {got}")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.numel():
        raise ValueError(f"sampling_fn returned token id {int(outside[0])}, outside the vocabulary of {vocab_size}")
    return ids.to(logits.device, torch.int64)
