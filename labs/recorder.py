"""The judge's pytest plugin: which tests run, what came of each, and whether an answer left the tests as they were."""

from __future__ import annotations

import builtins
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch

from labs.job import Job

# What a test's verdict rests on: an answer that has changed any of these fails.
GUARDED: tuple[tuple[str, object, tuple[str, ...]], ...] = (
    ("torch", torch, ("allclose", "equal", "isclose", "isnan", "tensor", "randn", "Tensor")),
    (
        "torch.Tensor",
        torch.Tensor,
        (
            "__eq__",
            "__ne__",
            "__bool__",
            "abs",
            "all",
            "allclose",
            "any",
            "argmax",
            "double",
            "equal",
            "float",
            "isnan",
            "item",
            "max",
            "sum",
            "tolist",
        ),
    ),
    ("numpy", numpy, ("allclose", "array_equal", "asarray")),
    ("math", math, ("isclose", "ceil")),
    ("builtins", builtins, tuple(name for name in vars(builtins) if name != "_")),
    ("pytest", pytest, ("raises", "fail", "skip")),
)


class Recorder:
    """Runs the tests of one job and sends a line before and after each.

    Args:
        job: what is judged.
        send: takes one line, `{"event": "start" | "end" | "broken" | "done", …}`.
    """

    def __init__(self, job: Job, send: Callable[[dict[str, object]], object]) -> None:
        self._job, self._send_line = job, send

    def _send(self, event: str, **fields: object) -> None:
        self._send_line({"event": event} | fields)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if _class_of(item) in self._job.classes]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = str(report.longrepr).strip().splitlines()
            errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
            self._send("broken", reason=first_line((errors or lines)[-1]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._send("start", test=item.name)
        before, start = _snapshot(item), time.perf_counter()
        state, reason = "passed", ""
        try:
            return (yield)
        except BaseException as error:
            state = "skipped" if isinstance(error, pytest.skip.Exception) else "failed"
            reason = reason_of(error, Path(self._job.work))
            raise
        finally:
            changed = _restore(before)
            if changed:
                state, reason = "failed", f"not allowed: it changed {changed[0]}"
            self._send("end", test=item.name, state=state, reason=reason, seconds=time.perf_counter() - start)

    def pytest_sessionfinish(self) -> None:
        self._send("done")


class Collector:
    """Tells which tests there are, as `file::Class` and name, in the order in which they would run.

    Args:
        send: takes `{"event": "collected", "tests": …}`.
    """

    def __init__(self, send: Callable[[dict[str, object]], object]) -> None:
        self._send = send

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._send({"event": "collected", "tests": [(_class_of(item), item.name) for item in items]})


def _class_of(item: pytest.Item) -> str:
    """The test class that an item is of, as `file::Class`."""
    return f"{item.path.name}::{item.cls.__name__ if item.cls else ''}"


def _snapshot(item: pytest.Item) -> list[tuple[str, object, dict[str, object]]]:
    """The guarded modules and the tests' own, each with the objects that its names mean."""
    own = {"the tests": item.module} | {name: module for name, module in sys.modules.items() if name[:5] == "labs."}
    guarded = [(name, owner, {key: getattr(owner, key) for key in keys}) for name, owner, keys in GUARDED]
    return guarded + [(name, owner, dict(vars(owner))) for name, owner in [*own.items(), ("the judge", Recorder)]]


def _restore(before: list[tuple[str, object, dict[str, object]]]) -> list[str]:
    """Undo what was changed; returns the names."""
    changed = []
    for name, owner, values in before:
        for key, value in values.items():
            if callable(value) and getattr(owner, key, None) is not value:
                changed.append(f"{name}.{key}")
                setattr(owner, key, value)
    return changed


def reason_of(error: BaseException, work: Path) -> str:
    """One line: what was wrong, and where in the learner's file it came to light."""
    text = str(error).strip()
    if isinstance(error, AssertionError):
        text = expected_and_got(text)
    elif not isinstance(error, pytest.fail.Exception):
        text = f"{type(error).__name__}: {text}"
    return first_line(text) + _place(error, work)


def expected_and_got(text: str) -> str:
    """An assertion's message, with what was expected and what came where it does not say so itself.

    The tests write `assert found == expected`.
    """
    lines = [line.strip() for line in text.splitlines()] or [""]
    compared = next((line for line in lines if line.startswith("assert ")), "")
    got, equal, expected = compared.removeprefix("assert ").partition(" == ")
    if got.count("(") > got.count(")"):  # of `assert (a and b == c)`: the last part failed, and may be no comparison
        parts = compared.removeprefix("assert (").removesuffix(")").split(" and ")
        got, equal, expected = next((part for part in reversed(parts) if part != "True"), "").partition(" == ")
    message = "" if lines[0] == compared else f"{lines[0]}: "
    return f"{message}expected {expected}, got {got}" if equal and "got " not in lines[0] else lines[0]


def _place(error: BaseException, work: Path) -> str:
    """The innermost line of the learner's that the error passed through."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if file.is_relative_to(work):
            found = f" ({file.relative_to(work)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found


def first_line(text: str, limit: int = 300) -> str:
    """The first line of a message, shortened."""
    line = text.strip().splitlines()[0].strip() if text.strip() else "no reason given"
    return line if len(line) <= limit else line[: limit - 1] + "…"
