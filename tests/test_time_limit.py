"""A test that hangs ends, and says where it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pytest_timeout", reason="pytest-timeout is not installed: pip install -e .[dev]")
ROOT = Path(__file__).resolve().parent.parent
HANGS = """
import signal, threading

def test_waits_for_ever():
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # tests of interrupts have handlers of their own
    lock = threading.Lock()
    while True:
        lock.acquire()

def test_comes_after_it():
    pass
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    command += [f"--rootdir={folder}", "-o", "timeout=2", "-o", "pythonpath=", *options, str(folder / "test_hangs.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_test_that_hangs_ends_its_process_with_the_line_where_it_was(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1 and "Timeout" in done.stdout, done.stdout + done.stderr
    assert "in test_waits_for_ever\n    lock.acquire()" in done.stdout


def test_with_several_processes_another_takes_over(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed: pip install -e .[dev]")
    done = run(tmp_path, "-n", "1")
    assert done.returncode == 1 and "test_waits_for_ever" in done.stdout, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout


def test_every_test_has_a_limit(request: pytest.FixtureRequest) -> None:
    assert float(request.config.getini("timeout")) >= 300 and request.config.getini("timeout_method") == "thread"
