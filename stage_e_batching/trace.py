"""A record of every step, one JSON object a line: what the scheduler decided and how long it took.

`benchmarks/pictures/timeline.py` draws it: which request ran when, how a step's tokens were distributed, how full the
pool was.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import BatchSequence, ScheduledStep


class Trace:
    """Writes the records to `path`, replacing the file; `OSError` if it cannot be written."""

    def __init__(self, path: str | PathLike[str]) -> None:
        try:
            self._file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115 (open while the engine is)
        except OSError as error:
            reason = f"trace cannot be written ({error.strerror}; name a file in a folder that exists)"
            raise OSError(error.errno, reason, str(path)) from error
        self._start = time.perf_counter()
        self._open: dict[int, dict[str, Any]] = {}  # records of steps that have begun, by number

    def begin(self, step: ScheduledStep, scheduler: Scheduler) -> None:
        """Record the scheduler's decision, and the state of pool and queue while the step runs."""
        self._open[step.number] = {
            "step": step.number,
            "start": step.time - self._start,  # seconds since the trace began
            "num_tokens": step.total_tokens,
            "sequences": [
                {
                    "id": e.sequence.request_id,
                    "start": e.start,
                    "tokens": e.num_tokens,
                    "samples": e.samples,
                    "blocks": len(e.sequence.block_table),
                }
                for e in step
            ],
            "num_decodes": step.num_decodes,
            "num_recomputed": step.num_recomputed,
            "admitted": [sequence.request_id for sequence in step.admitted],
            "preempted": [
                {"id": p.sequence.request_id, "blocks": p.num_blocks, "tokens": p.num_tokens, "reason": p.reason}
                for p in step.preempted
            ],
            "waiting": [sequence.request_id for sequence in scheduler.waiting],
            "used_blocks": scheduler.block_manager.num_used,
            "num_blocks": scheduler.block_manager.num_blocks,
            "idle_reason": step.idle_reason,
        }

    def end(self, step: ScheduledStep, ended: list[BatchSequence], ran: float) -> None:
        """Append the step's record.

        Args:
            ended: those that got their last token.
            ran: when the step's tokens were known (monotonic clock).
        """
        record = self._open.pop(step.number) | {
            "end": ran - self._start,
            "finished": [{"id": s.request_id, "reason": s.completion.finish_reason} for s in ended],
        }
        line = json.dumps(record) + "\n"
        with suppress(ValueError):  # the file is closed: another thread may close the engine while a call runs
            self._file.write(line)

    def forget(self) -> None:
        """Drop the records of steps that broke off."""
        self._open.clear()

    def close(self) -> None:
        self._file.close()
