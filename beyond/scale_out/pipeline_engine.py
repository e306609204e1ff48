"""The engine's loop with as many batches in flight as there are stages.

    schedule and launch batch n  ->  wait for the tokens of batch n - m + 1  ->  postprocess them

Stage F's overlapped engine launches a step before the tokens of the one before have arrived, and lets every sequence
run in both. Here the batches in flight have different sequences (`pipeline_scheduler.py`), so no token is computed in
vain when a request ends.
"""

from __future__ import annotations

from collections import deque

from stage_e_batching.engine import Sampled
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.async_runner import InFlight
from stage_f_graph_tp.overlap import OverlappedEngine


class PipelineEngine(OverlappedEngine):
    """Stage F's engine, several batches ahead of the tokens."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self._launched: deque[tuple[ScheduledStep, InFlight]] = deque()  # oldest first

    def run_step(self) -> None:
        """Launch the next batch, and take in the tokens of the oldest if enough are in flight."""
        step = self.schedule()
        if step.sequences:
            self._launched.append((step, self.runner.launch(step)))
            self._count_in_flight(step)
        else:  # all sequences are in flight, or there are none
            self.postprocess(step, Sampled([]))
        if self._launched and (not step.sequences or len(self._launched) >= self.scheduler.num_micro_batches):
            oldest, tokens = self._launched.popleft()
            self._take_in(oldest, tokens.wait())
            self.scheduler.release_slots()

    def _recover(self) -> None:
        """Also discard the batches in flight: their tokens are invalid, like their blocks."""
        self._launched.clear()
        try:
            self.runner.discard_in_flight()
        finally:
            super()._recover()
