"""Raise exceptions at a chosen moment, to test what an interrupted step leaves behind."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import pytest

from stage_a_naive.contract.detokenize import IncrementalDecoder
from stage_a_naive.contract.outputs import Request
from stage_e_batching.calls import Calls

TRACED = (
    "stage_e_batching/",
    "stage_d_paged/",
    "stage_a_naive/contract/outputs.py",
    "stage_a_naive/llm.py",
    "stage_b_decode_step/",
    "beyond/scale_out/",
    "beyond/speculation/",
    "beyond/windows/",
)


NO_SIGNAL = re.compile(r"\s*(with .*|return \w+, \w+)$")


class Countdown:
    """Raises `error` before line number `lines` of the engines' code is run, once; counts the lines it has seen.

    Lines are left out where the interpreter itself never lets a signal in: those that begin with `with`, because
    tracing stops there a second time when the block has been left and its lock is not released yet, and those that
    return two names right after an assignment.

    Attributes:
        places: the lines it has seen, where it raises at none.
    """

    def __init__(self, lines: int, error: type[BaseException], traced: Sequence[str] = TRACED) -> None:
        self.lines = lines
        self.seen = 0
        self.places: list[str] = []
        self._error = error
        self._traced = traced

    def __call__(self, frame: FrameType, event: str, arg: object) -> object:
        if not any(part in frame.f_code.co_filename for part in self._traced):
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, arg: object) -> object:
        if event == "line":
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if not NO_SIGNAL.match(source):
                self.seen += 1
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                if not self.lines:
                    self.places.append(place)
                elif self.seen == self.lines:
                    raise self._error(f"at {place}")
        return self._line


@contextmanager
def interrupt_after(
    lines: int, error: type[BaseException] = KeyboardInterrupt, traced: Sequence[str] = TRACED
) -> Iterator[Countdown]:
    """Within the block, raise `error` at one line of the engines' code, those files whose paths contain a `traced`."""
    countdown = Countdown(lines, error, traced)
    before = sys.gettrace()
    sys.settrace(countdown)
    try:
        yield countdown
    finally:
        sys.settrace(before)


def answer_all(calls: Calls, requests: Sequence[Request], lines: int) -> tuple[dict[int, list[int]], int]:
    """Add the requests and step until all are answered, with an interrupt before line number `lines` of the steps.

    Returns:
        The tokens by request id, without those of the interrupted step, and how many lines were run.
    """
    for request in requests:
        calls.add_request(request, streams=False)
    outputs, unfinished = {}, True
    with interrupt_after(lines) as countdown:
        while unfinished:
            with suppress(KeyboardInterrupt):
                outputs |= {event.request_id: event.output["token_ids"] for event in calls.step()}
                unfinished = calls.has_unfinished()
    return outputs, countdown.seen


def fail_at_token(monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    """Let reading the text of the token `bad` raise a `UnicodeError` that says it "has no text"."""
    append = IncrementalDecoder.append

    def failing(self: IncrementalDecoder, token_id: int) -> str:
        if token_id == bad:
            raise UnicodeError(f"token {bad} has no text")
        return append(self, token_id)

    monkeypatch.setattr(IncrementalDecoder, "append", failing)
