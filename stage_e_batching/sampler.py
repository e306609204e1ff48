"""The arithmetic of sampling for many rows at once: filters, noise, log-probabilities.

What is computed is stage A's `sample`, row for row and bit for bit on a CPU; only how differs: only rows with top-k,
top-p or min-p are filtered, and only those with top-p are sorted, which is the one expensive operation here. A row's
noise is a hash of its own seed and step, so a row samples the same token in any batch.

Which rows ask for what is known to `Sampler`, in `model_runner.py`. Greedy rows need nothing of this file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stage_a_naive.logprobs import likeliest
from stage_a_naive.noise import gumbel_from_bits, mix32

SMALLEST = torch.finfo(torch.float32).tiny  # temperature and top_p: what is smaller, float32 would make 0
# Any higher temperature leaves the noise alone to decide, as this one does; but minus infinity (no token) divided by an
# infinite one is no number.
HOTTEST = 1e30
FILTER_GROUP = 2**25  # logits filtered at a time: sorting takes several times the memory of what it sorts


@dataclass(frozen=True)
class SampledTokens:
    """A step's tokens, still on the device."""

    ids: Tensor  # int64 [rows]
    logprobs: RowLogprobs | None = None
    errors: dict[int, Exception] | None = None  # of rows whose `sampling_fn` failed; their ids mean nothing


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of the rows that ask for them."""

    rows: list[int]
    counts: list[int]  # how many of the likeliest each row asks for
    ids: Tensor  # [asking, most]
    values: Tensor  # [asking, most], likeliest first
    chosen: Tensor  # [asking]: of the sampled token

    def to_host(self, num_rows: int, token_ids: list[int]) -> list[dict[int, float] | None]:
        """Return a dictionary per row that asks, in stage A's order: the likeliest first, then the sampled token."""
        result: list[dict[int, float] | None] = [None] * num_rows
        ids, values, chosen = self.ids.tolist(), self.values.tolist(), self.chosen.tolist()
        for i, (row, count) in enumerate(zip(self.rows, self.counts, strict=True)):
            found = dict(zip(ids[i][:count], values[i][:count], strict=True))
            found.setdefault(token_ids[row], chosen[i])
            result[row] = found
        return result


def filter_rows(scores: Tensor, temperatures: Tensor, rows: np.ndarray, filters: np.ndarray) -> tuple[Tensor, Tensor]:
    """Filter some rows of `scores [rows, vocab]`; returns new scores and temperatures.

    The filtered rows come back divided by their temperature, which then counts as 1.

    Args:
        rows: which ones.
        filters: their top_k (0: all), top_p and log(min_p), float32 `[rows, 3]`.
    """
    scores, temperatures = scores.to(torch.float32, copy=True), temperatures.clone()
    group = max(1, FILTER_GROUP // scores.shape[1])
    for start in range(0, len(rows), group):
        at = torch.from_numpy(rows[start : start + group]).to(scores.device)
        scores[at] = _filtered(scores[at], temperatures[at], filters[start : start + group])
        temperatures[at] = 1.0
    return scores, temperatures


def _filtered(rows: Tensor, temperatures: Tensor, filters: np.ndarray) -> Tensor:
    """Apply temperature, then top-k, top-p and min-p: `[rows, vocab]`, what is filtered out at -inf."""
    top_k, top_p, log_min_p = filters.T
    rows = (rows - rows.amax(-1, keepdim=True)) / temperatures[:, None]
    if (top_k > 0).any():
        rows = _keep_top_k(rows, top_k.astype(np.int64))
    if (top_p < 1).any():
        sort = np.flatnonzero(top_p < 1)
        sorting = torch.from_numpy(sort).to(rows.device)
        rows[sorting] = _keep_top_p(rows[sorting], torch.from_numpy(top_p[sort]).to(rows.device))
    if (log_min_p > -math.inf).any():
        rows = rows.masked_fill(rows < torch.from_numpy(log_min_p).to(rows.device)[:, None], -math.inf)
    return rows


def _keep_top_k(rows: Tensor, top_k: np.ndarray) -> Tensor:
    """Set all but the k highest of rows `[rows, vocab]` to -inf; ties with the k-th stay; k = 0 keeps all."""
    highest = rows.topk(int(top_k.max())).values  # [rows, most]
    last = torch.from_numpy(np.maximum(top_k - 1, 0)).to(rows.device)[:, None]
    kth_value = highest.gather(1, last)
    kth_value = kth_value.masked_fill(torch.from_numpy(top_k == 0).to(rows.device)[:, None], -math.inf)
    return rows.masked_fill(rows < kth_value, -math.inf)


def _keep_top_p(rows: Tensor, top_p: Tensor) -> Tensor:
    """Set all to -inf but the smallest set of likeliest tokens whose probability reaches p."""
    ordered, order = rows.sort(descending=True, stable=True)
    probs = ordered.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    surplus = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, order, mass_before >= top_p[:, None])
    return rows.masked_fill(surplus, -math.inf)


def sample_reference(scores: Tensor, temperatures: Tensor, noise_keys: Tensor, mixed_ids: Tensor) -> Tensor:
    """Sample by Gumbel-max over `scores / temperature`, argmax where the temperature is 0: the definition, in PyTorch.

    Args:
        scores: `[rows, vocab]`.
        temperatures: float32 `[rows]`.
        noise_keys: int32 `[rows]`, the bits of `noise_key(seed, step)`.
        mixed_ids: `mix32` of every token id, int64 `[vocab]`.
    """
    ids = scores.argmax(-1)
    random = temperatures.nonzero()[:, 0]
    rows = scores[random].float()
    rows = (rows - rows.amax(-1, keepdim=True)) / temperatures[random, None]
    keys = noise_keys[random, None].long() & 0xFFFFFFFF
    ids[random] = (rows + gumbel_from_bits(mix32(mixed_ids ^ keys))).argmax(-1)
    return ids


def row_logprobs(logits: Tensor, ids: Tensor, rows: np.ndarray, counts: list[int]) -> RowLogprobs:
    """Return the log-probabilities of some rows.

    Args:
        logits: `[rows, vocab]`, of the model, without penalties.
        ids: int64 `[rows]`, the sampled tokens.
        rows: those that ask.
        counts: how many of the likeliest each of these asks for.
    """
    at = torch.from_numpy(rows).to(logits.device)
    logprobs = logits[at].float().log_softmax(-1)  # [asking, vocab]
    best = likeliest(logprobs, max(counts))
    chosen = logprobs.gather(1, ids[at, None])[:, 0]
    return RowLogprobs(rows.tolist(), counts, best, logprobs.gather(1, best), chosen)
