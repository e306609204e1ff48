"""Break-it exercises: does a learner's test tell a broken engine from the reference?"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labs.exercises import LABS, ROOT

TIMEOUT = 100.0  # seconds for a learner's test


@dataclass(frozen=True)
class Mutation:
    """A bug: in `file`, `find` becomes `put`."""

    file: str
    find: str
    put: str

    def write(self, folder: Path) -> Path:
        """A copy of the reference's package with the bug in it."""
        package = Path(self.file).parts[0]
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
        (folder / "models").symlink_to(ROOT / "models")
        path = folder / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.find) != 1:
            raise ValueError(f"the mutation's text stands {text.count(self.find)} times in {self.file}, expected once")
        path.write_text(text.replace(self.find, self.put), encoding="utf-8")
        return folder


def load_mutations() -> dict[str, Mutation]:
    """The bugs of the break-it exercises, by the lab's letter."""
    entries = tomllib.loads((LABS / "break_it" / "mutations.toml").read_text(encoding="utf-8"))
    return {letter: Mutation(**entry) for letter, entry in entries.items()}


@dataclass(frozen=True)
class Verdict:
    """What came of a learner's tests. `passed` is None where they did not end in time."""

    on_reference: bool | None
    on_mutant: bool | None
    output: str  # of the run on the reference


def verdict(test_file: Path, letter: str) -> Verdict:
    """Run the tests of a file on the reference and on the broken copy."""
    return _verdict(test_file.read_text(encoding="utf-8"), letter)


@cache
def _verdict(text: str, letter: str) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="six-engines-lab-") as folder:
        test_file = Path(folder) / f"test_break_{letter}.py"
        test_file.write_text(text, encoding="utf-8")
        mutant = load_mutations()[letter].write(Path(folder) / "mutant")
        runs = [_start(test_file, [ROOT]), _start(test_file, [mutant, ROOT])]
        (on_reference, output), (on_mutant, _) = map(_finish, runs)
    return Verdict(on_reference, on_mutant, output)


def _start(test_file: Path, path: list[Path]) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-c", "/dev/null", "--tb=short"]
    return subprocess.Popen(
        [*command, f"--rootdir={test_file.parent}", str(test_file)],
        env=environment, cwd=test_file.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _finish(process: subprocess.Popen) -> tuple[bool | None, str]:
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None, "the test did not end"
    return process.returncode == 0, output


def assert_catches(test_file: Path, letter: str, message: str) -> None:
    """Fail, saying what to do, unless the learner's test passes on the reference and fails on the broken engine."""
    assert test_file.exists(), f"{test_file} is not there; `make lab-{letter}` writes its beginning"
    if message in test_file.read_text(encoding="utf-8"):
        raise NotImplementedError(message)
    found = verdict(test_file, letter)
    errors = re.findall(r"^E\s+(.+)$", found.output, flags=re.MULTILINE)
    assert found.on_reference is not None, "your test does not end on the reference"
    assert found.on_reference, f"your test fails on the reference, which is right: {(errors or ['no test ran'])[0]}"
    assert found.on_mutant is not None, "your test does not end on the broken engine; let it give up after some steps"
    assert not found.on_mutant, "your test passes on the broken engine too: it does not see the bug"
