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
"""


def test_a_test_that_hangs_ends_its_process_with_the_line_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    command += [f"--rootdir={tmp_path}", "-o", "timeout=2", "-o", "pythonpath=", str(tmp_path / "test_hangs.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "Timeout" in done.stdout, done.stdout + done.stderr
    assert "in test_waits_for_ever\n    lock.acquire()" in done.stdout


def test_every_test_has_a_limit(request: pytest.FixtureRequest) -> None:
    assert float(request.config.getini("timeout")) >= 300 and request.config.getini("timeout_method") == "thread"
