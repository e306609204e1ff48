"""The sampler of one engine: what the request in each batch slot asks for, and its tokens.

A step asks twice: `fill` writes what its rows ask for into the step's input, and `choose`, which a CUDA graph can hold,
chooses the tokens on the device. What reaches beyond that (log-probabilities, a bias for tokens, a replaced
`sampling_fn`) is added by `complete`, for steps in which some row asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stage_a_naive.contract.logit_bias import add_logit_bias
from stage_a_naive.contract.outputs import Request
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
    logprobs: RowLogprobs | None = None
    errors: dict[int, Exception] | None = None  # of rows whose `sampling_fn` failed; their ids mean nothing

    def on_host(self, ids: Tensor) -> Sampled:
        """Return the step's result. `ids` are the same on the host, or on the device, which is waited for then."""
        token_ids = ids.tolist()
        return Sampled(token_ids, self.logprobs and self.logprobs.by_row(token_ids), self.errors)


Choose = Callable[[Tensor, SamplerInput], Tensor]  # of logits and what their rows ask for: ids; counts nothing


class Constraints(Protocol):
    """Which tokens may come next, for requests that want their answers in some form."""

    def admit(self, sequence: BatchSequence) -> bool:
        """Take over a sequence in its batch slot; returns whether its tokens are constrained."""
        ...

    def choose(
        self, logits: Tensor, ids: Tensor, rows: SamplerInput, batch_slots: np.ndarray, choose: Choose
    ) -> dict[int, Exception]:
        """Choose the tokens of constrained rows again, into `ids`; returns the errors of rows that have no token."""
        ...


class Sampler(BatchSampler):
    """Chooses tokens for the sequences in the batch slots, which are its rows of the batch.

    Args:
        max_num_seqs: batch slots.
        max_num_penalised: of these, the first ones that have a row in the table of counts.
        vocab_size, device: of the logits.
        max_model_len: the longest sequence.
        constraints: of tokens, for engines that have such; rows with them count as having another sampler.
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
        self._requests: list[Request | None] = [None] * max_num_seqs
        if device.type == "cuda":
            from stage_e_batching.sampler.kernels import RowChooser  # here, because only GPUs need Triton

            self._choose = RowChooser(max_num_seqs, vocab_size, self.counts)
        else:
            self._choose = partial(choose_tokens, counts=self.counts, mixed_ids=self._mixed_ids)

    def admit(self, sequence: BatchSequence) -> None:
        """Record what the request of an admitted sequence asks for, in its batch slot."""
        slot, request = sequence.batch_slot, sequence.request
        self._requests[slot] = request
        replaced = request.sampling_fn is not None or bool(request.params.logit_bias)
        if self.constraints is not None:
            replaced |= self.constraints.admit(sequence)
        self.enter(slot, sequence.completion, replaced)

    def choose(self, logits: Tensor, rows: SamplerInput[Tensor]) -> Tensor:
        """Choose a token for every row of `logits [rows, vocab]`, ids int64 `[rows]`, and count it for penalties."""
        if self._device.type == "cuda":
            return self._choose(logits, rows)
        if not rows.rules[:, FLAGS].any():
            return logits.argmax(-1)  # all greedy
        ids = self._choose(logits, rows)
        count_tokens(self.counts, rows.rules, ids, rows.rules[:, FLAGS] & REPLACED == 0)
        return ids

    def complete(self, logits: Tensor, ids: Tensor, rows: SamplerInput, batch_slots: np.ndarray) -> SampledTokens:
        """Add what `choose` cannot do: the tokens of rows with a bias or another sampler, and log-probabilities.

        Args:
            logits: `[rows, vocab]`, as `choose` got them.
            ids: int64 `[rows]`, what it returned; those of rows with another sampler are written.
            batch_slots: of the rows, on the host.

        Raises:
            Exception: a replaced `sampling_fn` failed, and for no row alone.
        """
        flags = self._rules[batch_slots, FLAGS]
        errors = None
        if (flags & REPLACED).any():
            requests = [self._requests[slot] for slot in batch_slots.tolist()]
            scores, errors = logits, {}
            if biased := [row for row, request in enumerate(requests) if request.params.logit_bias]:
                scores = add_logit_bias(logits, [request.params for request in requests])
                [places] = upload([np.array(biased)], self._device)
                ids.index_copy_(0, places, self._choose(scores.index_select(0, places), rows.at(places)))
            if any(request.sampling_fn is not None for request in requests):
                errors = choose_replaced(penalised(scores, rows.rules, self.counts), requests, ids)
            if self.constraints is not None:
                errors |= self.constraints.choose(scores, ids, rows, batch_slots, self._choose)
            if (flags & PENALISED).any():
                count_tokens(self.counts, rows.rules, ids, rows.rules[:, FLAGS] & REPLACED > 0)
        asking = np.flatnonzero(flags & LOGPROBS).tolist()
        if not asking:
            return SampledTokens(ids, errors=errors)
        counts = [self._requests[slot].params.logprobs for slot in batch_slots[asking].tolist()]
        counts = [min(count, self._vocab_size) for count in counts]
        return SampledTokens(ids, row_logprobs(logits, ids, rows.asking[: len(asking)], asking, counts), errors)
