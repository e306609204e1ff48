"""From logits to the next token.

A language model ends in one score (a logit) for every token of its vocabulary. Sampling turns the scores into a choice.
The knobs are applied in this order, the order of Hugging Face's generation pipeline:

    penalties -> temperature -> top-k -> top-p -> min-p -> draw

The draw uses the Gumbel-max trick: if `g` is independent Gumbel(0, 1) noise, then `argmax(logits + g)` is distributed
as `softmax(logits)` (Gumbel 1954; Maddison et al., "A* Sampling", 2014). The noise is not taken from a generator that
remembers how often it was called: it is a hash of (seed, step, token id), a counter-based generator in the sense of
Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011). A seeded request therefore draws the same tokens
alone or in any batch, before or after it was preempted, on a CPU or on a GPU. Every later stage keeps this definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stage_a_naive.params import SamplingParams

_MASK32 = 0xFFFFFFFF
SamplingFunction = Callable[[Tensor, list[SamplingParams]], Tensor]


def apply_penalties(
    logits: Tensor, params: Sequence[SamplingParams], prompt_ids: Sequence[list[int]], output_ids: Sequence[list[int]]
) -> Tensor:
    """Lower the scores of tokens already used. Returns new logits where any row asks for it, else the same tensor.

    Args:
        logits: `[rows, vocab]`, float32.
        params: one a row.
        prompt_ids, output_ids: the tokens of each row's prompt, and those it has generated so far.

    The repetition penalty is that of Keskar et al., "CTRL" (2019), over prompt and output; the presence and frequency
    penalties are OpenAI's, over the output alone.
    """
    if not any(p.needs_penalties for p in params):
        return logits
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


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, then top-k, top-p and min-p, for one row `[vocab]`; tokens filtered out become -inf."""
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
        beyond[0] = False  # the likeliest token stays, also where float32 takes a tiny top_p for 0
        # A mask and not a list of indices, whose length the CPU would have to wait for.
        outside = torch.zeros_like(beyond).scatter(0, order, beyond)
        logits = logits.masked_fill(outside, -math.inf)
    if params.min_p > 0:
        # p >= min_p * p_max, in logarithms; the maximum is 0 by construction.
        logits = logits.masked_fill(logits < math.log(params.min_p), -math.inf)
    return logits


def sample(logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], steps: Sequence[int]) -> Tensor:
    """Choose one token a row; a row's choice depends on nothing but that row.

    Args:
        logits: `[rows, vocab]`, float32, penalties already applied.
        params, seeds: one a row.
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


def gumbel_noise(seed: int, step: int, vocab_size: int, device: torch.device) -> Tensor:
    """Gumbel(0, 1) noise `[vocab]`, float32: a pure function of (seed, step, token id)."""
    ids = torch.arange(vocab_size, device=device)
    return gumbel_from_bits(mix32(mix32(ids) ^ noise_key(seed, step)))


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Random 32-bit integers -> Gumbel(0, 1) noise, float32."""
    # 23 bits and a half fit a float32 exactly, so the uniform number is never 0 or 1 and the logarithms are finite.
    uniform = ((bits >> 9).float() + 0.5) * 2**-23
    return -torch.log(-torch.log(uniform))


def noise_key(seed: int, step: int) -> int:
    """The 32-bit key of one draw: seed and step hashed together."""
    key = mix32(mix32(mix32(seed & _MASK32) ^ (seed >> 32)) ^ (step & _MASK32))
    assert isinstance(key, int)
    return key


def mix32(x: Tensor | int) -> Tensor | int:
    """A 32-bit integer hash (Wellons' "lowbias32"); works alike on Python integers and on int64 tensors below 2**32."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def top_logprobs(logits: Tensor, count: int, token_id: int) -> dict[int, float]:
    """Log-probabilities of the `count` likeliest tokens of one row `[vocab]`, likeliest first, and of `token_id`."""
    logprobs = logits.float().log_softmax(-1)
    best = logprobs.topk(min(count, logprobs.numel()))
    found = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    found.setdefault(token_id, float(logprobs[token_id]))
    return found
