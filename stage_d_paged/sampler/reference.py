"""The arithmetic of sampling for many rows at once, in PyTorch: penalties, filters, noise.

The results equal stage A's, row for row and bit for bit. This code runs on a CPU. The kernels compute the same, except
that their noise differs in the fifth digit. A row's noise is a hash of its seed and step, so it samples the same token
in any batch.

Penalties read a table of counts with a row for each request that uses penalties. Its entry for a token is twice the
number of times it was generated, plus 1 if the prompt contains it. A step adds the tokens that it chose, which need not
pass through the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stage_a_naive.contract.filters import distances, weights
from stage_a_naive.contract.noise import gumbel_from_bits, mix32
from stage_a_naive.sampling import where_finite
from stage_d_paged.sampler.rules import (
    FARTHEST,
    FILTERED,
    FLAGS,
    FREQUENCY,
    PENALISED,
    PRESENCE,
    REPETITION,
    TABLE_ROW,
    TOP_K,
    TOP_P,
    SamplerInput,
)


def choose_tokens(logits: Tensor, rows: SamplerInput, counts: Tensor, mixed_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Choose a token for every row of `logits [rows, vocab]`, without counting it.

    Args:
        rows: the rows' sampling parameters.
        counts: the table of counts, `[table rows, vocab]`.
        mixed_ids: `mix32` of every token id, int64 `[vocab]`.

    Returns:
        ids int64 `[rows]`, valid as the next step's input; and the same ids for the host, with `NO_TOKEN` in rows whose
        highest score, after penalties, is NaN or infinite.
    """
    scores = penalised(logits, rows.rules, counts)
    kept = filtered(scores, rows.temperatures, rows.rules)
    ids = sample_reference(kept, rows.temperatures, rows.noise_keys, mixed_ids)
    return ids, where_finite(ids, scores)


def sample_reference(scores: Tensor, temperatures: Tensor, noise_keys: Tensor, mixed_ids: Tensor) -> Tensor:
    """Sample with Gumbel-max over `scores / temperature`, or argmax if the temperature is 0: the reference in PyTorch.

    Args:
        scores: `[rows, vocab]`.
        temperatures: float32 `[rows]`.
        noise_keys: int32 `[rows]`, the bits of `noise_key(seed, step)`.
        mixed_ids: `mix32` of every token id, int64 `[vocab]`.
    """
    ids = scores.argmax(-1)
    random = temperatures.nonzero()[:, 0]
    if len(random):
        keys = noise_keys[random, None].long() & 0xFFFFFFFF
        noise = gumbel_from_bits(mix32(mixed_ids ^ keys))
        ids[random] = (scale(scores[random], temperatures[random]) + noise).argmax(-1)
    return ids


def scale(scores: Tensor, temperatures: Tensor) -> Tensor:
    """Subtract each row's highest score of `[rows, vocab]`, and divide by its temperature, float32 `[rows]`."""
    scores = scores.float()
    return (scores - scores.amax(-1, keepdim=True)) * (1 / temperatures)[:, None]


def filtered(scores: Tensor, temperatures: Tensor, rules: Tensor) -> Tensor:
    """Set tokens that top-k, top-p or min-p exclude to -inf; without filters return `scores [rows, vocab]` itself."""
    asking = (rules[:, FLAGS] & FILTERED).nonzero()[:, 0]
    if not len(asking):
        return scores
    scores = scores.to(torch.float32, copy=True)
    distance = distances(scale(scores[asking], temperatures[asking]))
    scores[asking] = scores[asking].masked_fill(distance > cut_offs(distance, rules[asking]), -torch.inf)
    return scores


def cut_offs(distance: Tensor, rules: Tensor) -> Tensor:
    """Return the largest distance that each row keeps, `[rows, 1]`: stage A's `cut_off` for rows `[rows, vocab]`."""
    nearest = distance.sort(-1).values
    top_k, top_p = rules[:, TOP_K, None].long(), rules.view(torch.float32)[:, TOP_P, None]
    last = nearest.gather(1, torch.where(top_k > 0, top_k, nearest.shape[1]) - 1)
    mass = weights(nearest).masked_fill(nearest > last, 0).cumsum(-1)
    wanted = (mass[:, -1:].double() * top_p.double()).long().clamp(min=1).minimum(mass[:, -1:])
    nucleus = nearest.gather(1, torch.searchsorted(mass, wanted))
    return torch.where(top_p < 1, nucleus, last).minimum(rules[:, FARTHEST, None])


def penalised(logits: Tensor, rules: Tensor, counts: Tensor) -> Tensor:
    """Lower the scores of tokens already used; without penalties return `logits [rows, vocab]` itself."""
    asking = (rules[:, FLAGS] & PENALISED).nonzero()[:, 0]
    if not len(asking):
        return logits
    entries = counts[rules[asking, TABLE_ROW].long()].int()  # [asking, vocab]
    times = entries >> 1
    strengths = rules.view(torch.float32)[asking]
    repetition, presence, frequency = (strengths[:, word, None] for word in (REPETITION, PRESENCE, FREQUENCY))
    logits = logits.to(torch.float32, copy=True)
    scores = logits[asking]
    scores = torch.where(entries > 0, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
    logits[asking] = torch.where(times > 0, scores - (presence + frequency * times), scores)
    return logits


def count_tokens(counts: Tensor, rules: Tensor, ids: Tensor, which: Tensor) -> None:
    """Add a token to the counts of each row.

    Args:
        counts: the table of counts, changed in place.
        rules: int32 `[rows, WORDS]`.
        ids: int64 `[rows]`.
        which: bool `[rows]`: whether a row has penalties.
    """
    rows = (which & (rules[:, FLAGS] & PENALISED > 0)).nonzero()[:, 0]
    counts[rules[rows, TABLE_ROW].long(), ids[rows]] += 2  # a request has one row in a step
