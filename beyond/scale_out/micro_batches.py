"""The depth of a pipeline's engine: one batch in flight per stage.

    sample batch n - m  ->  schedule and launch batch n  ->  wait for the tokens of batch n - m  ->  postprocess them

A batch is sampled on the device, where the next batch with the same sequences reads the tokens. So the next batch is
launched before the tokens have arrived on the host, as in stage F: while the CPU processes them, the GPU runs the next
batch. The batches that have not been sampled have different sequences (`pipeline_scheduler.py`).
"""

from __future__ import annotations

from collections import deque
from typing import Any

from beyond.scale_out.pipeline_scheduler import PipelineScheduler
from stage_e_batching.step import ScheduledStep


class MicroBatches:
    """Decides how many batches stay in flight, and samples the oldest one when it is due.

    Args:
        scheduler: knows which sequences may run before another batch is sampled.
    """

    def __init__(self, scheduler: PipelineScheduler) -> None:
        self._scheduler = scheduler

    def next_depth(self, launched: deque[tuple[ScheduledStep, Any]]) -> int:  # `Returning`s, which can be sampled
        """Sample the oldest batch if enough are in flight, or no other can run; return how many stay in flight."""
        scheduler = self._scheduler
        if not launched or (len(launched) < scheduler.num_micro_batches and scheduler.has_ready()):
            return len(launched) + 1
        step, states = launched[0]
        launched[0] = step, states.sample()
        scheduler.note_sampled(step)
        return len(launched)
