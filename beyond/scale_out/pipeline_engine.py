"""The engine's loop with as many batches in flight as there are stages.

    sample batch n - m  ->  schedule and launch batch n  ->  wait for the tokens of batch n - m  ->  postprocess them

A batch is sampled on the device, where the next one that runs its sequences reads the tokens. So that one is launched
before the tokens have arrived on the host, as in stage F: while the CPU takes them in, the GPU has the next batch.
The batches that have not been sampled have different sequences (`pipeline_scheduler.py`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from beyond.scale_out.pipeline_scheduler import PipelineScheduler, PipelineSequence
from stage_e_batching.engine import Sampled
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.head import InFlight
from stage_f_graph_tp.overlap import OverlappedEngine

if TYPE_CHECKING:  # one rank needs no torch.distributed
    from beyond.scale_out.stage_head import Returning
    from stage_f_graph_tp.runner import StepRunner


class PipelineEngine(OverlappedEngine):
    """Stage F's engine, several batches ahead of the tokens."""

    sequence_class = PipelineSequence
    scheduler: PipelineScheduler
    runner: StepRunner

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._launched: deque[tuple[ScheduledStep, Returning]] = deque()  # and not sampled yet, oldest first

    def run_step(self) -> None:
        """Sample the oldest batch if enough are in flight, launch the next, then take in the oldest one's tokens."""
        scheduler, oldest = self.scheduler, None
        if len(self._launched) >= scheduler.num_micro_batches or not scheduler.has_ready():
            oldest = self._sample_oldest()
        step = self.schedule()
        if step.sequences:
            self._launched.append((step, self.runner.launch(step)))
            self._count_in_flight(step)
        else:  # what waits does not fit, or there is nothing
            self.postprocess(step, Sampled([]))
            oldest = oldest or self._sample_oldest()
        if oldest:
            self._take_in(oldest[0], oldest[1].wait())
            scheduler.release_slots()

    def _sample_oldest(self) -> tuple[ScheduledStep, InFlight] | None:
        """Launch the sampling of the oldest batch: its sequences can run again. None if no batch is in flight."""
        if not self._launched:
            return None
        step, states = self._launched.popleft()
        sampled = states.sample()
        self._mark(step, is_unsampled=False)
        return step, sampled

    def _count_in_flight(self, step: ScheduledStep) -> None:
        super()._count_in_flight(step)
        self._mark(step, is_unsampled=True)

    def _mark(self, step: ScheduledStep, is_unsampled: bool) -> None:
        for sequence, samples in zip(step.sequences, step.samples, strict=True):
            if samples:
                sequence.is_unsampled = is_unsampled

    def _recover(self) -> None:
        """Also discard the batches in flight: their tokens are invalid, like their blocks."""
        self._launched.clear()
        try:
            self.runner.forget()
        finally:
            super()._recover()
