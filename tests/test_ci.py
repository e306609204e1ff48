"""What `.ci/run` makes of failed tests: a flaky one is named, a broken one fails the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEST = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({flaky}))
def test_fails_once(number):
    file = Path(f"ran {{number}}")
    ran, _ = file.exists(), file.touch()
    assert ran

@pytest.mark.parametrize("number", range({broken}))
def test_fails(number):
    assert False

def test_passes():
    pass
"""


@pytest.mark.parametrize(
    "flaky, broken, status", [(5, 0, 0), (6, 0, 1), (1, 1, 1), (0, 0, 1)], ids=lambda count: str(count)
)
def test_at_most_five_failed_tests_get_a_second_try_alone(
    flaky: int, broken: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take most of the time
    (tmp_path / "test_some.py").write_text(TEST.format(flaky=flaky, broken=broken))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )

    assert run("-m", "pytest", "-q").returncode == (flaky + broken > 0)
    again = run(str(ROOT / ".ci/again.py"))
    assert again.returncode == status, again.stdout + again.stderr
    named = [line for line in again.stdout.splitlines() if line.startswith("flaky:")]
    assert named == (
        [f"flaky: test_some.py::test_fails_once[{n}]" for n in range(flaky)] if flaky + broken <= 5 else []
    )


def test_what_the_suite_was_told_to_ignore_ends_the_programs_that_tests_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "test_signals.py").write_text(
        "import signal, subprocess, sys\n"
        "def test_a_child_has_the_default():\n"
        "    code = 'import os, signal, time; os.kill(os.getpid(), signal.SIGHUP); time.sleep(60)'\n"
        "    assert subprocess.run([sys.executable, '-c', code]).returncode == -signal.SIGHUP\n"
    )
    (tmp_path / "conftest.py").write_bytes((ROOT / "tests/conftest.py").read_bytes())
    done = subprocess.run(
        ["nohup", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
