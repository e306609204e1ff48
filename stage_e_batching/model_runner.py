"""Runs a scheduled step: one flat batch through the model, the sampler on the rows that need it, the tokens back.

One flat batch holds everything that the step runs, one token of every decode and the chunks of prompts side by side:

    [ A B C D | E E E E E | F F F ]      A…D decode, E's prompt ends here, F's goes on in the next step

The LM head, the largest matrix of a small model, is applied only to rows that sample: A…D and the last of E.

`Sampler` looks at these rows' requests once, for what any of them needs. All greedy: one argmax. Plain temperature
beside greedy: noise and argmax in one pass. What else a request can ask for is computed in `sampler.py`,
`penalties.py` and `sampling_functions.py`, for the rows that ask.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from stage_a_naive.noise import mix32
from stage_a_naive.outputs import Request
from stage_d_paged.batch import Chunk, flat_batch, upload
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.runtime import Runtime
from stage_e_batching.engine import Sampled
from stage_e_batching.penalties import PenaltyState
from stage_e_batching.sampler import SMALLEST, RowLogprobs, SampledTokens, filter_rows, row_logprobs, sample_reference
from stage_e_batching.sampling_functions import choose_replaced
from stage_e_batching.step import BatchSequence, ScheduledStep

RANDOM, FILTERED, PENALISED, LOGPROBS, REPLACED = 1, 2, 4, 8, 16  # what a row needs; 0 is greedy


class ModelRunner:
    """A model, its KV cache, and the sampler's state for the batch slots.

    Args:
        runtime: the model.
        kv_cache: its pool of blocks.
        max_num_seqs: batch slots.
    """

    def __init__(self, runtime: Runtime, kv_cache: KVCache, max_num_seqs: int) -> None:
        self.model = runtime.model
        self.device = runtime.device
        self.kv_cache = kv_cache
        self.sampler = Sampler(max_num_seqs, runtime.config.vocab_size, runtime.device)

    @torch.inference_mode()
    def run(self, step: ScheduledStep) -> Sampled:
        """Run a step and return its sampled tokens, waiting for the device."""
        for sequence in step.admitted:
            self.sampler.admit(sequence)
        if not step.sequences:
            return Sampled([])
        chunks = map(Chunk, step.sequences, step.starts, step.num_tokens)
        batch = flat_batch(chunks, self.kv_cache.block_size, self.device)
        hidden = self.model(batch.input_ids, batch.positions, self.kv_cache, batch.metadata)  # [tokens, hidden]
        sampling = [sequence for sequence, samples in zip(step.sequences, step.samples, strict=True) if samples]
        if not sampling:
            return Sampled([])
        logits = self.model.compute_logits(hidden[batch.last_rows])  # [samples, vocab]
        sampled = self.sampler.sample(logits, sampling)
        token_ids = sampled.ids.tolist()  # waits for the device
        logprobs = sampled.logprobs and sampled.logprobs.to_host(len(token_ids), token_ids)
        return Sampled(token_ids, logprobs, sampled.errors)


class Sampler:
    """Chooses tokens for the sequences in the batch slots.

    What a request brings (its parameters, its seed) is put into numpy columns when it is admitted, and a step picks
    rows.
    """

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
        self._needs[slot] |= needs & PENALISED  # at once: if this breaks off, the slot's next sequence clears the row
        if self._needs[slot] & PENALISED:  # this sequence asks for penalties, or the last one in its slot did
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

    def fill(self, batch_slots: np.ndarray, steps: np.ndarray, temperatures: np.ndarray, noise_keys: np.ndarray) -> int:
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
        return sample_reference(scores, temperatures, noise_keys, self._mixed_ids)

    def _filter(self, scores: Tensor, batch_slots: np.ndarray, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        rows = np.flatnonzero(self._needs[batch_slots] & FILTERED)
        return filter_rows(scores, temperatures, rows, self._filters[batch_slots[rows]])

    def _logprobs(self, logits: Tensor, batch_slots: np.ndarray, ids: Tensor) -> RowLogprobs:
        rows = np.flatnonzero(self._needs[batch_slots] & LOGPROBS)
        counts = [min(self._requests[slot].params.logprobs, self._vocab_size) for slot in batch_slots[rows].tolist()]
        return row_logprobs(logits, ids, rows, counts)
