"""The sampler of one engine: what the request in each batch slot asks for, and its tokens.

A step asks twice: `fill` writes what its rows ask for into the step's input, and `choose`, which a CUDA graph can hold,
chooses the tokens on the device. What reaches beyond that (log-probabilities, rules about single tokens, a replaced
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

from stage_a_naive.contract.filters import HOTTEST, SMALLEST
from stage_a_naive.contract.noise import mix32
from stage_a_naive.contract.outputs import NO_TOKEN
from stage_a_naive.contract.token_rules import FOREVER, apply_rules
from stage_a_naive.sampling import where_finite
from stage_d_paged.batch import upload
from stage_e_batching.parts import Sampled
from stage_e_batching.sampler.logprobs import RowLogprobs, row_logprobs
from stage_e_batching.sampler.reference import choose_tokens, count_tokens, penalised
from stage_e_batching.sampler.replaced import choose_replaced
from stage_e_batching.sampler.rules import FLAGS, LOGPROBS, PENALISED, RANDOM, REPLACED, WORDS, SamplerInput, rules_of
from stage_e_batching.step import BatchSequence

MOST_INT16 = 2**14  # tokens of a sequence, whose count, doubled, an int16 holds


@dataclass(frozen=True)
class SampledTokens:
    """A step's tokens, still on the device."""

    ids: Tensor  # int64 [rows]
    told: Tensor  # the same for the host, with `NO_TOKEN` where none could be chosen
    logprobs: RowLogprobs | None = None
    errors: dict[int, Exception] | None = None  # of rows whose `sampling_fn` failed; their ids mean nothing

    def on_host(self, ids: Tensor) -> Sampled:
        """Return the step's result. `ids` are `told`, on the host, or on the device, which is waited for then."""
        token_ids = ids.tolist()
        return Sampled(token_ids, self.logprobs and self.logprobs.by_row(token_ids), self.errors)

    def wait(self) -> Sampled:
        """Wait for the step's tokens."""
        return self.on_host(self.told)


Choose = Callable[[Tensor, SamplerInput], Tensor]  # of logits and what their rows ask for: ids; counts nothing
Penalise = Callable[[Tensor, Tensor], Tensor]  # of logits and the rules of their rows: scores


class Constraints(Protocol):
    """Which tokens may come next, for requests that want their answers in some form."""

    def admit(self, sequence: BatchSequence) -> bool:
        """Take over a sequence in its batch slot; returns whether its tokens are constrained."""
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


class Sampler:
    """Chooses tokens for the sequences in the batch slots.

    Args:
        max_num_seqs: batch slots.
        max_num_penalised: of these, the first ones that have a row in the table of counts.
        vocab_size, device: of the logits.
        max_model_len: the longest sequence.
        constraints: of tokens, for engines that have such; rows with them count as having another sampler.

    Attributes:
        counts: the table that penalties read, `[max_num_penalised, vocab]`; see `reference.py`.
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
        self.constraints = constraints
        self._device = device
        self._vocab_size = vocab_size
        self._sequences: list[BatchSequence | None] = [None] * max_num_seqs
        self._steps = np.zeros(max_num_seqs, np.int64)  # tokens that each had generated before its last step
        self._until = np.full(max_num_seqs, FOREVER)  # tokens from which on `choose` is enough for it
        self._last_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # of slots with rules about tokens
        self._rules = np.zeros((max_num_seqs, WORDS), np.int32)
        self._temperatures = np.zeros(max_num_seqs, np.float32)
        self._seed_keys = np.zeros(max_num_seqs, np.int64)
        dtype = torch.int16 if max_model_len < MOST_INT16 else torch.int32
        self.counts = torch.zeros(max_num_penalised, vocab_size, dtype=dtype, device=device)
        if device.type == "cuda":
            from stage_e_batching.sampler.kernels import RowChooser  # here, because only GPUs need Triton

            self._choose = RowChooser(max_num_seqs, vocab_size, self.counts)
        else:
            mixed_ids = mix32(torch.arange(vocab_size))  # the hash of every token id
            self._choose = partial(choose_tokens, counts=self.counts, mixed_ids=mixed_ids)

    # ---- the host's part ---------------------------------------------------------------------------------------

    def admit(self, sequence: BatchSequence) -> None:
        """Record what the request of an admitted sequence asks for, in its batch slot."""
        slot, params, seed = sequence.batch_slot, sequence.request.params, sequence.request.seed
        if params.needs_penalties:
            self._enter(sequence)
        self._sequences[slot] = sequence
        self._temperatures[slot] = min(max(params.temperature, SMALLEST), HOTTEST) if params.temperature else 0.0
        if params.temperature:
            self._seed_keys[slot] = mix32(mix32(seed & 0xFFFFFFFF) ^ (seed >> 32))
        rules, sampling_fn = sequence.request.token_rules, sequence.request.sampling_fn
        replaced = sampling_fn is not None or rules is not None
        self._until[slot] = FOREVER if sampling_fn is not None or rules is None else rules.until
        if self.constraints is not None:
            replaced |= self.constraints.admit(sequence)
        self._rules[slot] = rules_of(params, replaced, self._vocab_size, slot)

    def _enter(self, sequence: BatchSequence) -> None:
        """Count a sequence's tokens so far: its prompt's, and, after a preemption, those that it has generated."""
        num_prompt_tokens = len(sequence.request.prompt_token_ids)
        pinned = self._device.type == "cuda"
        entries = torch.zeros(self._vocab_size, dtype=self.counts.dtype, pin_memory=pinned)
        if output := sequence.token_ids[num_prompt_tokens:]:
            entries += 2 * torch.bincount(torch.tensor(output), minlength=self._vocab_size)
        entries.numpy()[sequence.request.prompt_token_ids] += 1
        self.counts[sequence.batch_slot].copy_(entries, non_blocking=True)

    def fill(self, batch_slots: np.ndarray, steps: np.ndarray, out: SamplerInput[np.ndarray]) -> int:
        """Write what each row of a step asks for into its input on the host.

        Args:
            batch_slots: of the rows.
            steps: how many tokens each has generated.
            out: of as many rows. Where every row is greedy, no noise key is read, and none is made.

        Returns:
            what the rows need, all together.
        """
        flags = self._rules[batch_slots, FLAGS]
        needs = int(np.bitwise_or.reduce(flags))
        if needs & REPLACED:
            self._steps[batch_slots] = steps
            self._rules[batch_slots[steps >= self._until[batch_slots]], FLAGS] &= ~REPLACED
            flags = self._rules[batch_slots, FLAGS]
            needs = int(np.bitwise_or.reduce(flags))
        out.temperatures[:] = self._temperatures[batch_slots]
        if needs & RANDOM:
            out.noise_keys[:] = mix32(self._seed_keys[batch_slots] ^ steps).astype(np.uint32).view(np.int32)
        if needs & ~RANDOM:
            out.rules[:] = self._rules[batch_slots]
        else:
            out.rules[:, FLAGS] = flags
        if needs & LOGPROBS:
            asking = np.flatnonzero(flags & LOGPROBS)
            out.asking[: len(asking)] = asking
        return needs

    # ---- the device's part -------------------------------------------------------------------------------------

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
        """Add what `choose` cannot do: the tokens of rows with rules or another sampler, and log-probabilities.

        Args:
            logits: `[rows, vocab]`, as `choose` got them.
            ids, told: int64 `[rows]`, what it returned; the ids of rows with another sampler are written.
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
            told = torch.where(told == NO_TOKEN, told, ids)
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
        """Apply the rules of some sequences about single tokens to their logits, in new float32 ones.

        Where the next step is launched before the last token has arrived, the host knows all tokens but that one, which
        is compared with bad words on the device.
        """
        rules = [sequence.request.token_rules for sequence in sequences]
        known = [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]
        return apply_rules(logits, rules, self._steps[batch_slots].tolist(), known, last_ids)
