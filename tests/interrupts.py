"""Exceptions at a chosen moment: for tests of what an interrupted step leaves behind."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TRACED = (
    "stage_e_batching/",
    "stage_f_graph_tp/overlap.py",
    "stage_d_paged/",
    "stage_a_naive/outputs.py",
    "stage_a_naive/llm.py",
    "stage_b_decode_step/",
    "beyond/scale_out/",
    "beyond/speculation/",
)


class Countdown:
    """Raises `error` before line number `lines` of the engines' code is run, once; counts the lines it has seen.

    Lines that begin with `with` are left out: tracing stops there a second time when the block has been left and its
    lock is not released yet, where the interpreter itself never lets a signal in.
    """

    def __init__(self, lines: int, error: type[BaseException]) -> None:
        self.lines = lines
        self.seen = 0
        self._error = error

    def __call__(self, frame: FrameType, event: str, arg: object) -> object:
        if not any(part in frame.f_code.co_filename for part in TRACED):
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, arg: object) -> object:
        if event == "line":
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if not source.lstrip().startswith("with "):
                self.seen += 1
                if self.seen == self.lines:
                    self.at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    raise self._error(f"at {frame.f_code.co_filename}:{frame.f_lineno}")
        return self._line


@contextmanager
def interrupt_after(lines: int, error: type[BaseException] = KeyboardInterrupt) -> Iterator[Countdown]:
    """Within the block, raise `error` at one line of the engines' code."""
    countdown = Countdown(lines, error)
    before = sys.gettrace()
    sys.settrace(countdown)
    try:
        yield countdown
    finally:
        sys.settrace(before)
