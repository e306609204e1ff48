"""The sampler of one engine: it keeps the sampling parameters of every batch slot and samples tokens.

A step calls it twice: `fill` writes the parameters of the rows into the step's input, and `choose`, which a CUDA graph
can hold, samples the tokens on the device. `complete` adds the rest (log-probabilities, rules about single tokens,
a replaced `sampling_fn`) for steps in which some row asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stage_a_naive.contract.token_rules import FOREVER, apply_rules
from stage_a_naive.sampling import where_finite
from stage_d_paged.batch import upload
from stage_d_paged.sampler import BatchSampler
from stage_d_paged.sampler.reference import choose_tokens, count_tokens, penalised
from stage_d_paged.sampler.rules import FLAGS, LOGPROBS, PENALISED, REPLACED, SamplerInput
from stage_e_batching.parts import Sampled
from stage_e_batching.sampler.logprobs import RowLogprobs, row_logprobs
from stage_e_batching.sampler.replaced import choose_replaced
from stage_e_batching.step import BatchSequence


@dataclass(frozen=True)
class SampledTokens:
    """A step's tokens, still on the device."""

    ids: Tensor  # int64 [rows]
    told: Tensor  # the same for the host, with `NO_TOKEN` where no token could be chosen
    logprobs: RowLogprobs | None = None
    errors: dict[int, Exception] | None = None  # of rows whose `sampling_fn` failed; their ids mean nothing

    def on_host(self, ids: Tensor) -> Sampled:
        """Return the step's result. `ids` is `told`, on the host or on the device; the latter waits for the device."""
        token_ids = ids.tolist()
        return Sampled(token_ids, self.logprobs and self.logprobs.by_row(token_ids), self.errors)

    def wait(self) -> Sampled:
        """Wait for the step's tokens."""
        return self.on_host(self.told)


Choose = Callable[[Tensor, SamplerInput], Tensor]  # (logits, parameters of the rows) -> ids; updates no counts
Penalise = Callable[[Tensor, Tensor], Tensor]  # (logits, rules of their rows) -> scores


class Constraints(Protocol):
    """Which tokens may come next, for requests with structured output."""

    def admit(self, sequence: BatchSequence) -> bool:
        """Register a sequence under its batch slot; returns whether its tokens are constrained."""
        ...

    def choose(
        self,
        logits: Tensor,
        ids: Tensor,
        rows: SamplerInput,
        batch_slots: np.ndarray,
        choose: Choose,
        penalise: Penalise | None,
    ) -> dict[int, Exception]:
        """Choose the tokens of constrained rows again, into `ids`; returns the errors of rows that have no token."""
        ...


class Sampler(BatchSampler):
    """Samples tokens for the sequences in the batch slots. The slots are the rows of `BatchSampler`.

    Args:
        max_num_seqs: batch slots.
        max_num_penalised: how many of the slots, from the first one on, have a row in the table of counts.
        vocab_size, device: of the logits.
        max_model_len: the longest sequence.
        constraints: for engines with structured output; constrained rows count as rows with a replaced sampler.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_penalised: int,
        vocab_size: int,
        max_model_len: int,
        device: torch.device,
        constraints: Constraints | None = None,
    ) -> None:
        super().__init__(max_num_seqs, max_num_penalised, vocab_size, max_model_len, device)
        self.constraints = constraints
        self._sequences: list[BatchSequence | None] = [None] * max_num_seqs
        self._steps = np.zeros(max_num_seqs, np.int64)  # tokens that each had generated before its last step
        self._until = np.full(max_num_seqs, FOREVER)  # number of tokens from which on `choose` is enough
        self._last_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # of slots with rules about tokens
        if device.type == "cuda":
            from stage_e_batching.sampler.kernels import RowChooser  # here, because only GPUs need Triton

            self._choose = RowChooser(max_num_seqs, vocab_size, self.counts)
        else:
            self._choose = partial(choose_tokens, counts=self.counts, mixed_ids=self._mixed_ids)

    def admit(self, sequence: BatchSequence) -> None:
        """Record what the request of an admitted sequence asks for, in its batch slot."""
        slot, request = sequence.batch_slot, sequence.request
        self._sequences[slot] = sequence
        rules, sampling_fn = request.token_rules, request.sampling_fn
        replaced = sampling_fn is not None or rules is not None
        self._until[slot] = FOREVER if sampling_fn is not None or rules is None else rules.until
        if self.constraints is not None:
            replaced |= self.constraints.admit(sequence)
        self.enter(slot, sequence.completion, replaced)

    def fill(self, batch_rows: np.ndarray, steps: np.ndarray, out: SamplerInput[np.ndarray]) -> int:
        """As `BatchSampler.fill`; rows whose rules about tokens have ended no longer go through `complete`."""
        if (self._rules[batch_rows, FLAGS] & REPLACED).any():
            self._steps[batch_rows] = steps
            self._rules[batch_rows[steps >= self._until[batch_rows]], FLAGS] &= ~REPLACED
        return super().fill(batch_rows, steps, out)

    def choose(self, logits: Tensor, rows: SamplerInput[Tensor]) -> tuple[Tensor, Tensor]:
        """Choose a token for every row of `logits [rows, vocab]`, and count it for penalties.

        Returns:
            ids int64 `[rows]`, and the same for the host, with `NO_TOKEN` in rows without a finite maximum.
        """
        if self._device.type == "cuda":
            return self._choose(logits, rows)
        if not rows.rules[:, FLAGS].any():
            ids = logits.argmax(-1)  # all greedy
            return ids, where_finite(ids, logits)
        ids, told = self._choose(logits, rows)
        count_tokens(self.counts, rows.rules, ids, rows.rules[:, FLAGS] & REPLACED == 0)
        return ids, told

    def _choose_ids(self, logits: Tensor, rows: SamplerInput) -> Tensor:
        return self._choose(logits, rows)[0]

    def complete(
        self, logits: Tensor, ids: Tensor, told: Tensor, rows: SamplerInput, batch_slots: np.ndarray
    ) -> SampledTokens:
        """Add what `choose` cannot do: rows with rules about tokens or a replaced sampler, and log-probabilities.

        Args:
            logits: `[rows, vocab]`, as `choose` got them.
            ids, told: int64 `[rows]`, as `choose` returned them; the ids of rows with a replaced sampler are
                overwritten.
            batch_slots: of the rows, on the host.
        """
        flags = self._rules[batch_slots, FLAGS]
        errors = None
        if (flags & REPLACED).any():
            sequences = [self._sequences[slot] for slot in batch_slots.tolist()]
            requests = [sequence.request for sequence in sequences]
            scores, errors = logits, {}
            again = np.flatnonzero(flags & REPLACED).tolist()
            ruled = [row for row in again if requests[row].token_rules is not None]
            if ruled:
                places, slots = upload([np.array(ruled), batch_slots[ruled]], self._device)
                last = self._last_ids.index_select(0, slots)
                own = self._ruled(
                    logits.index_select(0, places), [sequences[row] for row in ruled], batch_slots[ruled], last
                )
                ids.index_copy_(0, places, self._choose_ids(own, rows.at(places)))
                if any(requests[row].sampling_fn or requests[row].params.structured_outputs for row in ruled):
                    scores = logits.to(own.dtype, copy=True).index_copy_(0, places, own)
            if any(request.sampling_fn is not None for request in requests):
                errors = choose_replaced(penalised(scores, rows.rules, self.counts), requests, ids)
            if self.constraints is not None:
                penalise = partial(penalised, counts=self.counts) if (flags & PENALISED).any() else None
                errors |= self.constraints.choose(scores, ids, rows, batch_slots, self._choose_ids, penalise)
            if ruled:
                self._last_ids.index_copy_(0, slots, ids.index_select(0, places))
            told = torch.where(rows.rules[:, FLAGS] & REPLACED > 0, where_finite(ids, logits), told)
            if (flags & PENALISED).any():
                count_tokens(self.counts, rows.rules, ids, rows.rules[:, FLAGS] & REPLACED > 0)
        asking = np.flatnonzero(flags & LOGPROBS).tolist()
        if not asking:
            return SampledTokens(ids, told, errors=errors)
        counts = [self._sequences[slot].request.params.logprobs for slot in batch_slots[asking].tolist()]
        counts = [min(count, self._vocab_size) for count in counts]
        logprobs = row_logprobs(logits, ids, rows.asking[: len(asking)], asking, counts)
        return SampledTokens(ids, told, logprobs, errors)

    def _ruled(
        self, logits: Tensor, sequences: list[BatchSequence], batch_slots: np.ndarray, last_ids: Tensor
    ) -> Tensor:
        """Apply some sequences' rules about single tokens to their logits; returns new float32 logits.

        If the next step is launched before the last token has arrived, the host knows all tokens except the last one;
        the device compares that token with the bad words.
        """
        rules = [sequence.request.token_rules for sequence in sequences]
        known = [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]
        return apply_rules(logits, rules, self._steps[batch_slots].tolist(), known, last_ids)
