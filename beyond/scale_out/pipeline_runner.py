"""What a stage does with a step: its layers at once, and on stage 0 the LM head and the sampler when the states return.

Rank 0 sends every step's packed input to all ranks, as in stage F, and each runs its part of it in the order in which
the steps were launched. A step's tokens are sampled when rank 0 waits for them: only then does stage 0 receive the last
stage's hidden states. What the sampler needs of the step's input is copied until then, because the buffer on the device
belongs to the next step already.

Steps run without CUDA graphs, with stage F's fused layers on a GPU.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from beyond.scale_out.links import StageLinks
from beyond.scale_out.options import ScaleOutOptions
from beyond.scale_out.spans import Spans
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.runtime import Runtime
from stage_e_batching.engine import Sampled
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.async_runner import InFlight
from stage_f_graph_tp.rank_runner import RELEASE_SECONDS, RankRunner, WatchedInFlight
from stage_f_graph_tp.step_input import StepInput, StepShape
from stage_f_graph_tp.tensor_parallel import RankGroup, Workers

SAMPLE = b"sample"  # the command to sample the oldest step, for the other ranks of stage 0


class Unsampled(NamedTuple):
    """A step on its way through the stages, and what its rows need of the sampler."""

    number: int
    sample_slots: np.ndarray
    inputs: StepInput
    needs: int


class PipelineRunner(RankRunner):
    """Runs this stage's layers of every step.

    Args:
        runtime, kv_cache, options: as in `RankRunner`, of this stage.
        group: the ranks of this stage.
        workers: rank 0's handle on all others; None on the others.
        links: to the neighbouring stages.
    """

    def __init__(
        self,
        runtime: Runtime,
        kv_cache: KVCache,
        options: ScaleOutOptions,
        group: RankGroup,
        workers: Workers | None,
        links: StageLinks,
    ) -> None:
        self.links = links
        self._num_steps = 0
        self._unsampled: deque[Unsampled] = deque()  # on stage 0, oldest first
        # To the runner, `fused` means the megakernel, which is a whole model's; the fused layers are there already.
        super().__init__(runtime, kv_cache, replace(options, fused=False, enforce_eager=True), group, workers)
        if options.trace and group.rank == 0:
            links.spans = Spans(f"{options.trace}.stage{links.stage}", runtime.device)

    def launch(self, step: ScheduledStep) -> InFlight:
        """Send a step to all stages and run this one's layers; `wait` samples its tokens."""
        super().launch(step)
        return Returning(None, runner=self if any(step.samples) else None)

    @torch.inference_mode()
    def execute(self, shape: StepShape, sample_slots: np.ndarray, needs: int) -> InFlight:
        """Run this stage's layers, and hand on what comes of them."""
        inputs, links, count = self.buffers.send(shape), self.links, len(sample_slots)
        if links.spans and links.stage == 0:
            links.spans.begin()
        hidden = self.forward(inputs, shape)  # receives and sends, except around the ring
        self._end_span("layers", shape.num_tokens, self._num_steps)
        if count and links.is_last:
            links.send(hidden.index_select(0, inputs.sample_tokens[:count]))
        elif count and links.stage == 0:
            self._unsampled.append(Unsampled(self._num_steps, sample_slots.copy(), _kept(inputs, count), needs))
        self._num_steps += 1
        return InFlight(None)

    def execute_command(self, message: bytes) -> None:
        """Execute what rank 0 sent: a step, or the sampling of the oldest one."""
        if message != SAMPLE:
            super().execute_command(message)
        elif self.links.stage == 0:
            self._sample(self._unsampled.popleft())

    def sample_oldest(self) -> Sampled:
        """The tokens of the oldest step that has none yet; rank 0 calls it.

        Raises:
            WorkerError: a rank died or failed, or the step took too long.
        """
        step = self._unsampled.popleft()
        with self.in_step(SAMPLE):
            sampled = self._sample(step)
        return WatchedInFlight(sampled.sampled, sampled.host_ids, sampled.arrived, self.workers).wait()

    def discard_in_flight(self) -> None:
        """Receive what is on its way, so that the stages stay in step, and drop it."""
        while self._unsampled:
            with suppress(Exception):  # what fails here was reported before, or will be at the next step
                self.sample_oldest()

    def release(self) -> None:
        super().release()
        for link in self.links.links:
            link.wait_released(RELEASE_SECONDS)

    @torch.inference_mode()
    def _sample(self, step: Unsampled) -> InFlight:
        """Receive the hidden states of a step's last tokens and sample, as `AsyncModelRunner.execute` does."""
        hidden = self.links.receive(len(step.sample_slots))
        sampled = self.sample(hidden, step.sample_slots, step.inputs, step.needs)
        self.last_tokens.index_copy_(0, step.inputs.sample_slots, sampled.ids)
        self._end_span("head", len(step.sample_slots), step.number)
        return self.fetch(sampled)

    def _end_span(self, work: str, tokens: int, step: int) -> None:
        if self.links.spans:
            self.links.spans.end(step=step, work=work, tokens=tokens)


@dataclass(frozen=True)
class Returning(InFlight):
    """A step whose hidden states are on their way back to stage 0."""

    runner: PipelineRunner | None = None  # None: nothing samples in this step

    def wait(self) -> Sampled:
        return Sampled([]) if self.runner is None else self.runner.sample_oldest()


def _kept(inputs: StepInput, count: int) -> StepInput:
    """A copy of what the sampler reads, of the rows that are sampled."""
    return inputs._replace(
        sample_slots=inputs.sample_slots[:count].clone(),
        temperatures=inputs.temperatures[:count].clone(),
        noise_keys=inputs.noise_keys[:count].clone(),
    )
