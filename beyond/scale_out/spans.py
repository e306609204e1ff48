"""Record when a stage computed, one JSON line per span of work, to measure how long it was idle.

    {"step": 12, "work": "layers", "tokens": 32, "start": 3.25, "end": 3.27}

Times are in seconds on the machine's monotonic clock, which all processes of one machine share. On a GPU they are the
times of the kernels, not of their launches.
"""

from __future__ import annotations

import json
import time
from collections import deque
from os import PathLike
from pathlib import Path
from typing import Any

import torch

Mark = Any  # seconds on a CPU, an event on a GPU


class Spans:
    """Writes the spans of one stage.

    Args:
        path: the file, which is replaced; `OSError` if it cannot be written.
        device: where the stage computes.
    """

    def __init__(self, path: str | PathLike[str], device: torch.device) -> None:
        self._file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115 (open while the engine is)
        self._is_cuda = device.type == "cuda"
        self._done: deque[tuple[dict[str, Any], Mark, Mark]] = deque()  # on a GPU: launched, perhaps not finished
        if self._is_cuda:
            torch.cuda.synchronize(device)
            self._first, self._first_time = self._mark(), time.monotonic()
        self._start = self._mark()

    def begin(self) -> None:
        """Begin a span: its input has arrived."""
        self._start = self._mark()

    def end(self, **what: Any) -> None:
        """End a span: later launches belong to other work."""
        self._done.append((what, self._start, self._mark()))
        while self._done and (not self._is_cuda or self._done[0][2].query()):
            what, start, end = self._done.popleft()
            record = what | {"start": self._seconds(start), "end": self._seconds(end)}
            self._file.write(json.dumps(record) + "\n")

    def _mark(self) -> Mark:
        if not self._is_cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Mark) -> float:
        return mark if not self._is_cuda else self._first_time + self._first.elapsed_time(mark) / 1000


def read_spans(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Return the spans that a stage wrote, in order of time."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def idle_share(stages: list[list[dict[str, Any]]]) -> float:
    """Return the idle share of all stages' time, from the first start to the last end."""
    start = min(span["start"] for spans in stages for span in spans)
    end = max(span["end"] for spans in stages for span in spans)
    busy = sum(span["end"] - span["start"] for spans in stages for span in spans)
    return 1 - busy / ((end - start) * len(stages))


def idle_in_theory(work: str, batches: int, stages: int) -> float:
    """Return the expected idle share of stages that take equally long.

    decode: a batch comes back before it runs again, so `batches` of `stages` are busy. prefill: the chunks of a prompt
    follow one another, and the pipeline fills and empties once (GPipe, Huang et al., 2019).

    Args:
        work: "decode" or "prefill".
        batches: micro-batches in flight, or chunks of the prompt.
        stages: of the pipeline.
    """
    if work == "prefill":
        return (stages - 1) / (batches + stages - 1)
    return 1 - min(1.0, batches / stages)
