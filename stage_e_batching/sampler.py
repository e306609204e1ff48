"""From the logits of a batch to its next tokens, all rows at once.

What is computed is stage A's `sample`, row for row and bit for bit on a CPU; only how differs:

* a batch's requests are looked at once, for what any of them needs. All greedy: one argmax. Plain temperature beside
  greedy: noise and argmax in one pass. Only rows with top-k, top-p or min-p are filtered, and only those with top-p are
  sorted, which is the one expensive operation here;
* what a request brings (its parameters, its seed) is put into numpy columns when it is admitted, and a step picks rows;
* a row's noise is a hash of its own seed and step, so a row samples the same token in any batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stage_a_naive.logprobs import likeliest
from stage_a_naive.noise import gumbel_from_bits, mix32
from stage_a_naive.outputs import Request
from stage_d_paged.batch import upload
from stage_e_batching.penalties import PenaltyState
from stage_e_batching.sampling_functions import choose_replaced
from stage_e_batching.step import BatchSequence

RANDOM, FILTERED, PENALISED, LOGPROBS, REPLACED = 1, 2, 4, 8, 16  # what a row needs; 0 is greedy
SMALLEST = torch.finfo(torch.float32).tiny  # temperature and top_p: what is smaller, float32 would make 0
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


class Sampler:
    """Chooses tokens for the sequences in the batch slots."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._requests: list[Request | None] = [None] * max_num_seqs
        self._needs = np.zeros(max_num_seqs, np.uint8)
        self._temperatures = np.zeros(max_num_seqs, np.float32)
        self._seed_keys = np.zeros(max_num_seqs, np.int64)
        self._filters = np.zeros((max_num_seqs, 3), np.float32)  # top_k, top_p, log(min_p)
        self._penalties = PenaltyState(max_num_seqs, vocab_size, device)
        self._mixed_ids: Tensor | None = None  # the hash of every token id, computed once

    def admit(self, sequence: BatchSequence) -> None:
        """Record what the request of an admitted sequence asks for, in its batch slot."""
        slot, params, seed = sequence.batch_slot, sequence.request.params, sequence.request.seed
        random = params.temperature > 0
        top_k = params.top_k if params.top_k < self._vocab_size else 0
        filtered = random and (top_k > 0 or params.top_p < 1 or params.min_p > 0)
        needs = (
            RANDOM * random
            | FILTERED * filtered
            | PENALISED * params.needs_penalties
            | LOGPROBS * (params.logprobs is not None)
            | REPLACED * (sequence.request.sampling_fn is not None)
        )
        if (needs | self._needs[slot]) & PENALISED:  # the sequence that had the slot before may have had penalties
            self._penalties.admit(sequence, params)
        self._needs[slot] = needs
        self._requests[slot] = sequence.request
        self._temperatures[slot] = 0.0
        if random:
            with np.errstate(over="ignore"):  # past float32 it is infinite, as in stage A
                self._temperatures[slot] = max(params.temperature, SMALLEST)
            self._seed_keys[slot] = mix32(mix32(seed & 0xFFFFFFFF) ^ (seed >> 32))
        if filtered:
            log_min_p = math.log(params.min_p) if params.min_p else -math.inf
            self._filters[slot] = top_k, max(params.top_p, SMALLEST), log_min_p

    def fill(
        self, batch_slots: np.ndarray, steps: np.ndarray, temperatures: np.ndarray, noise_keys: np.ndarray
    ) -> int:
        """Write the temperature and the noise key (`noise_key(seed, step)`) of each row into a step's input.

        Where every row is greedy, no noise key is read, and none is made. Returns `needs(batch_slots)`.
        """
        needs = self.needs(batch_slots)
        temperatures[:] = self._temperatures[batch_slots]
        if needs & RANDOM:
            noise_keys[:] = mix32(self._seed_keys[batch_slots] ^ steps).astype(np.uint32).view(np.int32)
        return needs

    def sample(self, logits: Tensor, sequences: list[BatchSequence]) -> SampledTokens:
        """Choose a token for each of `sequences`, from its row of `logits [rows, vocab]`."""
        batch_slots = np.array([sequence.batch_slot for sequence in sequences])
        if not self.needs(batch_slots):
            return SampledTokens(logits.argmax(-1))  # all greedy
        steps = np.array([sequence.num_generated_tokens for sequence in sequences])
        temperatures, noise_keys = np.empty(len(batch_slots), np.float32), np.empty(len(batch_slots), np.int32)
        self.fill(batch_slots, steps, temperatures, noise_keys)
        return self(logits, batch_slots, *upload([temperatures, noise_keys], self._device))

    def needs(self, batch_slots: np.ndarray) -> int:
        """Return what the rows of a step need, all together."""
        return int(np.bitwise_or.reduce(self._needs[batch_slots]))

    def __call__(
        self, logits: Tensor, batch_slots: np.ndarray, temperatures: Tensor, noise_keys: Tensor
    ) -> SampledTokens:
        """Choose a token for every row.

        Args:
            logits: `[rows, vocab]`, in the model's dtype.
            batch_slots: the row's sequences, int64 `[rows]`, on the host.
            temperatures, noise_keys: what `fill` wrote, on the device.

        Raises:
            Exception: a replaced `sampling_fn` failed, and for no row alone.
        """
        needs = self.needs(batch_slots)
        scores = self._penalties.apply(logits, batch_slots) if needs & PENALISED else logits
        if not needs & RANDOM:
            ids = scores.argmax(-1)
        else:
            filtered = self._filter(scores, batch_slots, temperatures) if needs & FILTERED else (scores, temperatures)
            ids = self.sample_plain(*filtered, noise_keys)
        errors = None
        if needs & REPLACED:
            errors = choose_replaced(scores, [self._requests[slot] for slot in batch_slots.tolist()], ids)
        if needs & PENALISED:
            self._penalties.count(batch_slots, ids)
        return SampledTokens(ids, self._logprobs(logits, batch_slots, ids) if needs & LOGPROBS else None, errors)

    def sample_plain(self, scores: Tensor, temperatures: Tensor, noise_keys: Tensor) -> Tensor:
        """Choose where nothing but each row's temperature counts: `[rows, vocab]` -> ids `[rows]`."""
        if scores.device.type == "cuda":
            from stage_e_batching.sampler_kernels import sample_rows

            return sample_rows(scores, temperatures, noise_keys)
        if self._mixed_ids is None:
            self._mixed_ids = mix32(torch.arange(self._vocab_size, device=self._device))
        return draw_reference(scores, temperatures, noise_keys, self._mixed_ids)

    def _filter(self, scores: Tensor, batch_slots: np.ndarray, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Filter the rows that ask for it. They come back divided by their temperature, which then counts as 1."""
        asking = np.flatnonzero(self._needs[batch_slots] & FILTERED)
        scores, temperatures = scores.to(torch.float32, copy=True), temperatures.clone()
        group = max(1, FILTER_GROUP // self._vocab_size)
        for start in range(0, len(asking), group):
            rows = asking[start : start + group]
            at = torch.from_numpy(rows).to(self._device)
            scores[at] = self._filtered(scores[at], temperatures[at], self._filters[batch_slots[rows]])
            temperatures[at] = 1.0
        return scores, temperatures

    def _filtered(self, rows: Tensor, temperatures: Tensor, filters: np.ndarray) -> Tensor:
        """Apply temperature, then top-k, top-p and min-p: `[rows, vocab]`, what is filtered out at -inf."""
        top_k, top_p, log_min_p = filters.T
        rows = (rows - rows.amax(-1, keepdim=True)) / temperatures[:, None]
        if (top_k > 0).any():
            rows = _keep_top_k(rows, top_k.astype(np.int64))
        if (top_p < 1).any():
            sort = np.flatnonzero(top_p < 1)
            sorting = torch.from_numpy(sort).to(self._device)
            rows[sorting] = _keep_top_p(rows[sorting], torch.from_numpy(top_p[sort]).to(self._device))
        if (log_min_p > -math.inf).any():
            rows = rows.masked_fill(rows < torch.from_numpy(log_min_p).to(self._device)[:, None], -math.inf)
        return rows

    def _logprobs(self, logits: Tensor, batch_slots: np.ndarray, ids: Tensor) -> RowLogprobs:
        rows = np.flatnonzero(self._needs[batch_slots] & LOGPROBS)
        counts = [min(self._requests[slot].params.logprobs, self._vocab_size) for slot in batch_slots[rows].tolist()]
        at = torch.from_numpy(rows).to(self._device)
        logprobs = logits[at].float().log_softmax(-1)  # [asking, vocab], of the model, without penalties
        best = likeliest(logprobs, max(counts))
        chosen = logprobs.gather(1, ids[at, None])[:, 0]
        return RowLogprobs(rows.tolist(), counts, best, logprobs.gather(1, best), chosen)


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


def draw_reference(scores: Tensor, temperatures: Tensor, noise_keys: Tensor, mixed_ids: Tensor) -> Tensor:
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
