"""Stage E's model runner in two halves, so that other work fits between them: launch a step, fetch its tokens.

A sampled token stays on the device: `last_tokens` has one entry per batch slot, the sampler writes it and the next step
reads it. The host gets a copy, but nothing on the device waits for the host to send it back. So `launch` enqueues a
step's work and returns at once, and `InFlight.wait` fetches the tokens when they are needed.

The step's input travels in one copy (`step_input.py`), built with no loop over tokens or decodes (`input_batch.py`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stage_d_paged.kv_cache import KVCache
from stage_d_paged.runtime import Runtime
from stage_e_batching.model_runner import ModelRunner
from stage_e_batching.parts import Sampled
from stage_e_batching.sampler import LOGPROBS, REPLACED, SampledTokens, Sampler, SamplerInput
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.step_input import StepBuffers, StepInput, StepShape, attention_metadata, largest_input


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device, at fixed addresses under a graph."""

    hidden: Tensor  # [rows, hidden]: the final states of the rows that sample
    logits: Tensor | None  # [rows, vocab]; None where several ranks have a part each
    ids: Tensor  # int64 [rows]: the sampled tokens
    kept: Tensor  # int64 [rows]: those for the host


@dataclass(frozen=True)
class InFlight:
    """A step that the device has been told to run."""

    sampled: SampledTokens | None  # None: nothing samples in this step
    host_ids: Tensor | None = None
    arrived: torch.cuda.Event | None = None

    def wait(self) -> Sampled:
        """Wait for the step's tokens."""
        if self.sampled is None:
            return Sampled([])
        if self.arrived is not None:
            self.arrived.synchronize()
        assert self.host_ids is not None
        token_ids = self.host_ids.tolist()
        logprobs = self.sampled.logprobs
        return Sampled(token_ids, logprobs and logprobs.by_row(token_ids), self.sampled.errors)


class AsyncModelRunner(ModelRunner):
    """Stage E's runner, whose `launch` does not wait.

    Args:
        runtime: the model.
        kv_cache: its pool of blocks.
        sampler: of at least `max_num_seqs` batch slots.
        max_num_seqs, max_num_batched_tokens: the largest step.

    Attributes:
        beyond_graphs: what rows may need of the sampler that `sample_and_keep` does not do.
        logits_in_graphs: whether that makes whole rows of logits.
    """

    beyond_graphs = LOGPROBS | REPLACED
    logits_in_graphs = True

    def __init__(
        self, runtime: Runtime, kv_cache: KVCache, sampler: Sampler, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        super().__init__(runtime, kv_cache, sampler)
        self.batch = InputBatch(max_num_seqs, runtime.max_model_len, runtime.block_size)
        num_bytes = largest_input(max_num_batched_tokens, max_num_seqs + 1, self.batch.max_blocks)  # 1 for padding
        self.buffers = StepBuffers(num_bytes, runtime.device)
        # By batch slot, and one more, where the padding rows of a graph write theirs.
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=runtime.device)
        # Where recorded steps leave their logits, all of them at the same address; made when steps are recorded.
        self.logits = torch.empty(0, runtime.config.vocab_size, dtype=runtime.dtype, device=runtime.device)
        self._last = InFlight(None)  # the step that was launched last
        pinned = runtime.device.type == "cuda"
        self._host_ids = [torch.empty(max_num_seqs, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]

    def launch(self, step: ScheduledStep) -> InFlight:
        """Launch a step's work and the copy of its tokens to the host."""
        self.admit(step)
        if not step.sequences:
            return InFlight(None)
        self._last = self.execute_step(*self.prepare(step))
        return self._last

    def forget(self) -> None:
        """Wait for the step that was launched last, and drop it. If it fails as well, that was reported before."""
        with suppress(Exception):
            self._last.wait()

    def admit(self, step: ScheduledStep) -> None:
        """Record the admitted sequences and the block tables that have grown."""
        for sequence in step.admitted:
            self.sampler.admit(sequence)
        self.batch.update(step)

    def prepare(self, step: ScheduledStep) -> tuple[StepShape, np.ndarray, int]:
        """Build a step's input in a host buffer.

        Returns:
            its shape, the batch slots of its sampled rows, and what these need of the sampler.
        """
        exact = self.batch.shape_of(step)
        shape, host = self.next_host(exact)
        steps = self.batch.fill(step, host)
        samples = exact.num_samples
        sample_slots = host.sample_slots[:samples]
        needs = self.sampler.fill(sample_slots, steps, host.sampling.first(samples))
        return shape, sample_slots, needs

    def next_host(self, exact: StepShape) -> tuple[StepShape, StepInput[np.ndarray]]:
        """Return a host buffer for a step of shape `exact`, and the shape to run it in."""
        return exact, self.buffers.next_host(exact)

    def execute_step(self, shape: StepShape, sample_slots: np.ndarray, needs: int) -> InFlight:
        """Execute a prepared step."""
        return self.execute(shape, sample_slots, needs)

    @torch.inference_mode()
    def execute(self, shape: StepShape, sample_slots: np.ndarray, needs: int) -> InFlight:
        """Do the device's part: send the input that `prepare` built, run the model, sample the tokens."""
        inputs = self.buffers.send(shape)
        hidden = self.forward(inputs, shape)
        samples = len(sample_slots)
        if samples == 0:
            return InFlight(None)
        if samples < shape.num_tokens:
            hidden = hidden.index_select(0, inputs.sample_tokens[:samples])
        result = self.sample_and_keep(hidden, inputs, shape)
        return self.fetch_result(result, inputs, shape, sample_slots, needs)

    def sample_and_keep(self, hidden: Tensor, inputs: StepInput[Tensor], shape: StepShape) -> StepResult:
        """Choose a token for every row of the final states `[samples, hidden]`, and keep it for the next step."""
        ids, logits = self.choose(hidden, inputs.sampling.first(len(hidden)))
        return StepResult(hidden, logits, ids, self.keep(ids, inputs, shape))

    def choose(self, hidden: Tensor, rows: SamplerInput) -> tuple[Tensor, Tensor | None]:
        """Choose a token for every row of the final states; returns ids `[rows]` and logits `[rows, vocab]`."""
        logits = self.logits[: len(hidden)]
        logits = self.model.compute_logits(hidden, out=logits if len(logits) == len(hidden) else None)
        return self.sampler.choose(logits, rows), logits

    def keep(self, ids: Tensor, inputs: StepInput[Tensor], shape: StepShape) -> Tensor:
        """Keep the sampled tokens on the device, where the next step reads them; returns what the host may see."""
        self.last_tokens.index_copy_(0, inputs.sample_slots[: len(ids)], ids)
        return ids

    def fetch_result(
        self, result: StepResult, inputs: StepInput[Tensor], shape: StepShape, sample_slots: np.ndarray, needs: int
    ) -> InFlight:
        """Add what a graph cannot hold to a step's tokens, and start their copy to the host, without padding rows."""
        count = len(sample_slots)
        if not needs & self.beyond_graphs:
            return self.fetch(SampledTokens(result.kept[:count]))
        sampled = self.complete(result, inputs.sampling.first(count), sample_slots)
        return self.fetch(replace(sampled, ids=self.keep(sampled.ids, inputs, shape)))

    def complete(self, result: StepResult, rows: SamplerInput, sample_slots: np.ndarray) -> SampledTokens:
        """Add log-probabilities, and the tokens of replaced samplers, to a step's tokens."""
        count = len(sample_slots)
        assert result.logits is not None
        return self.sampler.complete(result.logits[:count], result.ids[:count], rows, sample_slots)

    def forward(self, inputs: StepInput[Tensor], shape: StepShape) -> Tensor:
        """Compute the model's final states `[tokens, hidden]`."""
        decodes = shape.num_decodes
        if decodes:
            torch.index_select(self.last_tokens, 0, inputs.batch_slots[:decodes], out=inputs.input_ids[:decodes])
        return self.run_model(inputs, shape)

    def run_model(self, inputs: StepInput[Tensor], shape: StepShape) -> Tensor:
        """Run all layers on an input that is complete on the device."""
        metadata = attention_metadata(inputs, shape)
        return self.model(inputs.input_ids, inputs.positions, self.kv_cache, metadata)

    def fetch(self, sampled: SampledTokens) -> InFlight:
        """Start the copy of the tokens to the host."""
        if self.device.type != "cuda":
            return InFlight(sampled, sampled.ids.clone())  # the next replay writes over them
        self._host_ids.reverse()  # the other one may still be read
        host_ids = self._host_ids[0][: len(sampled.ids)]
        host_ids.copy_(sampled.ids, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return InFlight(sampled, host_ids, arrived)
