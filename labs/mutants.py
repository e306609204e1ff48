"""The break-it exercises: does the learner's test tell a broken engine from the reference?

The test runs twice, on copies of the reference with the module in question compiled and its source removed, once with
the bug in it. So what it can tell apart is behaviour: a test that reads the source finds none.
"""

from __future__ import annotations

import os
import py_compile
import re
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
from labs.exercises import LABS, ROOT, Exercise

MUTATIONS = LABS / "break_it" / "mutations.toml"
TIMEOUT = 100.0  # seconds for a learner's test


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


def load_mutations() -> dict[str, Mutation]:
    """The bugs of the break-it exercises, by the lab's letter."""
    entries = tomllib.loads(MUTATIONS.read_text(encoding="utf-8"))
    return {letter: Mutation(**entry) for letter, entry in entries.items()}


@dataclass(frozen=True)
class Verdict:
    """What came of a learner's tests. `passed` is None where they did not end in time."""

    on_reference: bool | None
    on_mutant: bool | None
    output: str  # of the run on the reference


@cache
def verdict(text: str, letter: str) -> Verdict:
    """Run the tests of a file's text on the reference and on the broken copy."""
    with tempfile.TemporaryDirectory(prefix="six-engines-lab-") as folder:
        test_file = Path(folder) / f"test_break_{letter}.py"
        test_file.write_text(text, encoding="utf-8")
        mutation = load_mutations()[letter]
        engines = [mutation.write(Path(folder) / name, broken=name == "broken") for name in ("right", "broken")]
        runs = [_start(test_file, engine) for engine in engines]
        on_reference, on_mutant = (_finish(process) for process, _ in runs)
        return Verdict(on_reference, on_mutant, runs[0][1].read_text(errors="replace"))


def _start(test_file: Path, engine: Path) -> tuple[int, Path]:
    """Run a test file in a fork of this process, where the stages are those in the folder `engine`."""
    log = engine / "log.txt"
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


def _finish(child: int) -> bool | None:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def assert_catches(exercise: Exercise, work: Path) -> None:
    """Fail, saying what to do, unless the learner's test passes on the reference and fails on the broken engine.

    Only the test's own body is the learner's; the rest of the file is as it was given.
    """
    given, theirs = exercise.reference.read_text(encoding="utf-8"), exercise.copy_in(work).read_text(encoding="utf-8")
    found = verdict(bodies.transplant(given, theirs, exercise.name, exercise.path), exercise.lab)
    errors = re.findall(r"^E\s+(.+)$", found.output, flags=re.MULTILINE)
    assert found.on_reference is not None, "your test does not end on the reference"
    assert found.on_reference, f"your test fails on the reference, which is right: {(errors or ['no test ran'])[0]}"
    assert found.on_mutant is not None, "your test does not end on the broken engine; let it give up after some steps"
    assert not found.on_mutant, "your test passes on the broken engine too: it does not see the bug"
