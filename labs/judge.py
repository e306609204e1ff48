"""Runs a lab's tests on the learner's code and writes down what came of each.

    python -m labs.judge RESULTS TESTS_DIRECTORY... -- D.1 D.2

The grader starts this in a process of its own, with the learner's copies first on Python's path. Every exercise is
judged by itself: while its tests run, all other exercises are the reference's, so that a mistake in one function costs
the points of one exercise, and the exercises can be done in any order. (`isolated` does it, and for C++ and CUDA
`native.py`.) Results are written line by line: if the learner's code takes the process down, the grader knows where.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import linecache
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType

import pytest

from labs import bodies
from labs.exercises import WORK, Exercise, all_exercises, load_labs

TEST_TIMEOUT = 120  # seconds
WORK_VARIABLE = "SIX_ENGINES_LAB_WORK"  # the environment variable that says where the learner's copies are


class TooSlow(BaseException):
    """A test ran longer than `TEST_TIMEOUT`. Not an `Exception`, which the code under test might catch."""


def reference_function(exercise: Exercise, module: ModuleType) -> object:
    """The reference's function, made to live in the learner's module.

    It is compiled under the name and line numbers of the reference's file, so that tracebacks, and Triton, which reads
    a kernel's source, find its text.
    """
    text = exercise.reference.read_text(encoding="utf-8")
    span = bodies.find(text, exercise.name, exercise.path)
    *classes, name = exercise.name.split(".")
    source = "".join(f"{'    ' * depth}class {outer}:\n" for depth, outer in enumerate(classes))
    first_line = text.count("\n", 0, span.start)
    padding = "\n" * (first_line - len(classes))
    found: dict[str, object] = {}
    code = compile(padding + source + text[span.start : span.end], str(exercise.reference), "exec", dont_inherit=True,
                   flags=_future_flags(text))  # fmt: skip
    exec(code, vars(module), found)
    value: object = None
    for part in exercise.name.split("."):
        value = found[part] if value is None else vars(value)[part]
    return value


def _future_flags(text: str) -> int:
    import __future__

    return __future__.annotations.compiler_flag if "from __future__ import annotations" in text else 0


@contextlib.contextmanager
def isolated(judged: str) -> Iterator[None]:
    """Within the block, all exercises but `judged` are the reference's, in the learner's modules.

    A function that other modules have imported by name is exchanged there too.
    """
    restore: list[tuple[object, str, object]] = []
    modules = [module for name, module in list(sys.modules.items()) if "stage_" in name or "test_lab_" in name]
    for exercise in all_exercises():
        module = sys.modules.get(exercise.module)
        if exercise.id == judged or not exercise.is_python or exercise.is_break_it or module is None:
            continue
        *outer, name = exercise.name.split(".")
        owner: object = module
        for part in outer:
            owner = getattr(owner, part)
        original = vars(owner)[name]
        places = [(owner, name)]
        if not outer:
            places += [(m, n) for m in modules if m is not module for n, v in vars(m).items() if v is original]
        for place, attribute in places:
            restore.append((place, attribute, original))
            setattr(place, attribute, _cached_reference(exercise, module))
    try:
        yield
    finally:
        for place, attribute, value in restore:
            setattr(place, attribute, value)


def _cached_reference(exercise: Exercise, module: ModuleType) -> object:
    cache = vars(module).setdefault("__lab_references__", {})
    if exercise.id not in cache:
        cache[exercise.id] = reference_function(exercise, module)
    return cache[exercise.id]


class Recorder:
    """The pytest plugin: isolates each test, stops one that hangs, writes a line before and after it."""

    def __init__(self, results: Path, work: Path, selected: list[str]) -> None:
        self._results = results
        self._work = work
        self._exercise_of = {
            test: exercise for exercise in all_exercises() if exercise.id in selected for test in exercise.tests
        }
        self._whole = {load_labs()[s.lower()].whole: s for s in selected if s.lower() in load_labs()}

    def _write(self, **line: object) -> None:
        with self._results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _id_of(self, item: pytest.Item) -> str | None:
        """The exercise that a test judges, or the lab's letter for a test of the whole stage."""
        key = f"{item.path.name}::{item.cls.__name__}" if item.cls is not None else ""
        exercise = self._exercise_of.get(key)
        return exercise.id if exercise else self._whole.get(key)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self._id_of(item)]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            error = getattr(report.longrepr, "reprcrash", None)
            text = str(report.longrepr).strip().splitlines()
            self._write(event="broken", reason=_first_line(error.message if error else _last_error(text)))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        exercise = self._id_of(item)
        self._write(event="start", exercise=exercise, test=item.name)
        signal.signal(signal.SIGALRM, _alarm)
        signal.alarm(TEST_TIMEOUT)
        start = time.perf_counter()
        shield = isolated(exercise) if "." in exercise else contextlib.nullcontext()
        with shield:
            outcome = yield
        signal.alarm(0)
        error = outcome.excinfo[1] if outcome.excinfo else None
        if isinstance(error, TooSlow):
            outcome.force_exception(RuntimeError(str(error)))
        skipped = isinstance(error, pytest.skip.Exception)
        state = "skipped" if skipped else "passed" if error is None else _state_of(error)
        reason = "" if error is None else _reason(error, self._work)
        seconds = time.perf_counter() - start
        self._write(event="end", exercise=exercise, test=item.name, state=state, reason=reason, seconds=seconds)


def _alarm(number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"ran longer than {TEST_TIMEOUT} s: an endless loop?")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _state_of(error: BaseException) -> str:
    """`not started` if the error comes from a body that is still missing."""
    return "not started" if any(_is_missing_body(e) for e in _chain(error)) else "failed"


def _is_missing_body(error: BaseException) -> bool:
    messages = {exercise.message for exercise in all_exercises()}
    is_stub = isinstance(error, NotImplementedError) or "static assertion" in str(error) or "InterpreterError" in repr(
        type(error)
    )
    return is_stub and any(message in str(error) for message in messages)


def _reason(error: BaseException, work: Path) -> str:
    """One line: what was wrong, and where in the learner's file it came to light."""
    for cause in _chain(error):
        if _is_missing_body(cause):
            return _first_line(str(cause))
    text = str(error).strip()
    if not isinstance(error, AssertionError | pytest.fail.Exception):
        text = f"{type(error).__name__}: {text}"
    return _first_line(text) + _place(error, work)


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


def _first_line(text: str, limit: int = 300) -> str:
    line = text.strip().splitlines()[0].strip() if text.strip() else "no reason given"
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _last_error(lines: list[str]) -> str:
    """Of a collection error's traceback, the line that names the error."""
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return "; ".join([errors[0], errors[-1]] if len(errors) > 1 else errors or lines[-1:])


def run_tests(results: Path, directories: list[Path], selected: list[str], work: Path = WORK) -> int:
    """Judge the exercises `selected` (and the whole stage, by its letter) with the tests in these directories."""
    results.write_text("")
    names = {load_labs()[s[0].lower()].letter for s in selected}
    files = [directory / f"test_lab_{letter}.py" for directory in directories for letter in sorted(names)]
    files = [str(file) for file in files if file.exists()]
    importlib.invalidate_caches()
    linecache.clearcache()
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--tb=short", "-c", "/dev/null"]
    recorder = Recorder(results, work.resolve(), selected)
    return int(pytest.main([*options, "--rootdir", str(directories[0]), *files], plugins=[recorder]))


def main(argv: list[str]) -> int:
    results, *rest = argv
    split = rest.index("--")
    work = Path(os.environ.get(WORK_VARIABLE, WORK))
    return run_tests(Path(results), [Path(directory) for directory in rest[:split]], rest[split + 1 :], work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
