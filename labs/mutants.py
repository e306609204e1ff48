"""The break-it exercises: does the learner's test tell a broken engine from the reference?

The test runs on copies of the reference with the module in question compiled and its source removed: one as it is, the
others with a bug each. So what it can tell apart is behaviour: a test that reads the source finds none.
"""

from __future__ import annotations

import os
import py_compile
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from labs import bodies
from labs.audit import STAGES
from labs.exercises import LABS, ROOT, WORK, load_labs
from labs.job import WORK_VARIABLE

MUTATIONS = LABS / "break_it" / "mutations.toml"
RUNS = 3  # on each engine: a test that tosses a coin is found out
TIMEOUT = 60.0  # seconds for a learner's test on one engine


@dataclass(frozen=True)
class Mutation:
    """A bug: in `file`, `find` becomes `put`."""

    file: str
    find: str
    put: str

    def apply(self, text: str) -> str:
        """The file's text with the bug in it."""
        if text.count(self.find) != 1:
            raise ValueError(f"the mutation's text is {text.count(self.find)} times in {self.file}, expected once")
        return text.replace(self.find, self.put)

    def write(self, folder: Path, broken: bool) -> Path:
        """A copy of the package in which the file is compiled, with or without the bug, and has no source."""
        package = Path(self.file).parts[0]
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
        (folder / "models").symlink_to(ROOT / "models")
        path = folder / self.file
        text = path.read_text(encoding="utf-8")
        path.write_text(self.apply(text) if broken else text, encoding="utf-8")
        py_compile.compile(str(path), cfile=str(path.with_suffix(".pyc")), dfile=path.name, doraise=True)
        path.unlink()
        return folder


def load_mutations() -> dict[str, list[Mutation]]:
    """The bugs of the break-it exercises, by the lab's letter; those of a lab are in one file."""
    entries = tomllib.loads(MUTATIONS.read_text(encoding="utf-8"))
    return {
        letter: [Mutation(lab["file"], *change) for change in zip(lab["find"], lab["put"], strict=True)]
        for letter, lab in entries.items()
    }


@dataclass(frozen=True)
class Verdict:
    """What came of a learner's tests on one engine, of each run. None: it did not end in time."""

    passed: list[bool | None]
    output: str  # of the first run


@cache
def verdicts(text: str, mutations: tuple[Mutation, ...]) -> list[Verdict]:
    """Run the tests of a file's text on the reference and on broken copies, RUNS times each.

    It ends with the first engine whose verdict settles the matter. No name says which engine is which.
    """
    found: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="six-engines-lab-") as folder:
        test_file = Path(folder) / "test_break.py"
        test_file.write_text(text, encoding="utf-8")
        for number, mutation in enumerate([mutations[0], *mutations]):
            engine = mutation.write(Path(folder) / secrets.token_hex(8), broken=number > 0)
            runs = [_start(test_file, engine) for _ in range(RUNS)]
            deadline = time.monotonic() + TIMEOUT
            passed = [_finish(process, deadline) for process, _ in runs]
            found.append(Verdict(passed, runs[0][1].read_text(errors="replace")))
            if passed != [number == 0] * RUNS:
                break
    return found


def _start(test_file: Path, engine: Path) -> tuple[int, Path]:
    """Run a test file in a fork of this process, where the stages are those in the folder `engine`."""
    log = engine / f"{secrets.token_hex(8)}.txt"
    child = os.fork()
    if child == 0:
        code = 2
        try:
            sys.stdout = sys.stderr = log.open("w", encoding="utf-8")
            os.dup2(sys.stdout.fileno(), 1)
            os.dup2(sys.stdout.fileno(), 2)
            package = next(path.name for path in engine.iterdir() if path.name in STAGES)
            later = STAGES[STAGES.index(package) :]
            for name in [name for name in sys.modules if name.split(".")[0] in later]:
                del sys.modules[name]
            sys.path.insert(0, str(engine))
            options = ["-q", "-x", "-p", "no:cacheprovider", "-c", "/dev/null", "--tb=short", "--import-mode=importlib"]
            code = int(pytest.main([*options, f"--rootdir={test_file.parent}", str(test_file)]))
        finally:
            sys.stdout.flush()
            os._exit(code)
    return child, log


def _finish(child: int, deadline: float) -> bool | None:
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def assert_catches(letter: str, *held_out: Mutation) -> None:
    """Fail, saying what to do, unless the learner's test passes on the reference and fails on each broken engine.

    Only the test's own body is the learner's; the rest of the file is as it was given. `held_out`: more bugs than those
    of `mutations.toml`, which learners have.
    """
    [exercise] = [exercise for exercise in load_labs()[letter].exercises if exercise.is_break_it]
    work = Path(os.environ.get(WORK_VARIABLE, WORK))
    given, theirs = exercise.reference.read_text(encoding="utf-8"), exercise.copy_in(work).read_text(encoding="utf-8")
    text = bodies.transplant(given, theirs, exercise.name, exercise.path)
    found = verdicts(text, held_out or tuple(load_mutations()[letter]))
    right, *broken = [verdict.passed for verdict in found]
    errors = re.findall(r"^E\s+(.+)$", found[0].output, flags=re.MULTILINE)
    assert None not in right, "your test does not end on the reference"
    assert any(right), f"your test fails on the reference, which is right: {(errors or ['no test ran'])[0]}"
    assert all(right), (
        f"your test passes on the reference in {sum(right)} of {RUNS} runs: {(errors or ['at times'])[0]}"
    )
    for number, passed in enumerate(broken, 1):
        which = f"broken engine {number}" if len(broken) > 1 else "the broken engine"
        assert None not in passed, f"your test does not end on {which}; let it give up after some steps"
        assert not all(passed), f"your test passes on {which} too: it does not see the bug"
        assert not any(passed), f"your test passes on {which} in {sum(passed)} of {RUNS} runs"
