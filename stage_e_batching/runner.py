"""Run a scheduled step: a flat batch through the model, then the sampler on the rows that need it.

The flat batch holds everything that the step runs, one token per decode and then the chunks of prompts:

    [ A B C D | E E E E E | F F F ]      A…D decode, E's prompt ends here, F's goes on in the next step

The LM head, the largest matrix of a small model, is applied only to rows that sample: A…D and the last of E. The
sampler, in `sampler/`, chooses a token for each of these rows.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch

from stage_d_paged.batch import Chunk, flat_batch, upload
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.runtime import Runtime
from stage_e_batching.sampler import LOGPROBS, REPLACED, SampledTokens, Sampler, SamplerInput
from stage_e_batching.step import ScheduledStep

NO_IDS = torch.empty(0, dtype=torch.int64)
NOTHING = SampledTokens(NO_IDS, NO_IDS)  # the result of a step in which no row samples


class ModelRunner:
    """A model, its KV cache, and a sampler with state for every batch slot.

    Args:
        runtime: the model.
        kv_cache: its pool of blocks.
        sampler: with a batch slot for each sequence that may run.
    """

    def __init__(self, runtime: Runtime, kv_cache: KVCache, sampler: Sampler) -> None:
        self.model = runtime.model
        self.device = runtime.device
        self.kv_cache = kv_cache
        self.sampler = sampler

    @torch.inference_mode()
    def launch(self, step: ScheduledStep) -> SampledTokens:
        """Enqueue a step and the sampling of its tokens."""
        for sequence in step.admitted:
            self.sampler.admit(sequence)
        if not step.sequences:
            return NOTHING
        chunks = map(Chunk, step.sequences, step.starts, step.num_tokens)
        batch = flat_batch(chunks, self.kv_cache.block_size, self.device)
        hidden = self.model(batch.input_ids, batch.positions, self.kv_cache, batch.metadata)  # [tokens, hidden]
        sampling = [sequence for sequence, samples in zip(step.sequences, step.samples, strict=True) if samples]
        if not sampling:
            return NOTHING
        logits = self.model.compute_logits(hidden[batch.last_rows])  # [samples, vocab]
        rows = SamplerInput.empty(len(sampling))
        batch_slots = np.array([sequence.batch_slot for sequence in sampling])
        steps = np.array([sequence.num_generated_tokens for sequence in sampling])
        needs = self.sampler.fill(batch_slots, steps, rows)
        rows = SamplerInput(*upload(list(rows), self.device))
        ids, told = self.sampler.choose(logits, rows)
        if not needs & (LOGPROBS | REPLACED):
            return SampledTokens(ids, told)
        return self.sampler.complete(logits, ids, told, rows, batch_slots)

    def forget(self) -> None:
        """Wait until the device is idle and drop its results. An error that it reports now is reported already."""
        if self.device.type == "cuda":
            with suppress(Exception):
                torch.cuda.synchronize(self.device)
