"""Start a measuring process, wait for it within a limit, and bring back what it wrote, whatever happened to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.engines import Engine
from benchmarks.environment import ROOT

LOG_LINES = 12  # of a failed process's last words


def engine_job(kind: str, engine: Engine, **more: object) -> dict:
    """A job for one engine, ready for JSON."""
    return {"kind": kind, "engine": asdict(engine), **more}


def run_job(job: dict, timeout: float) -> dict:
    """Run `benchmarks.measure` on a job in a process of its own.

    Returns:
        What the process wrote, `complete` if it got to the end; else with `error`, which says how it ended.
    """
    with tempfile.TemporaryDirectory(prefix="six-engines-bench-") as name:
        directory = Path(name)
        job_file, result_file, log_file = directory / "job.json", directory / "result.json", directory / "log.txt"
        job_file.write_text(json.dumps({**job, "result": str(result_file)}), encoding="utf-8")
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.measure", str(job_file)],
                cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )  # fmt: skip
            try:
                how = _ending(process, timeout)
            finally:
                _kill_group(process)
        result = json.loads(result_file.read_text(encoding="utf-8")) if result_file.is_file() else {}
        if not result.get("complete"):
            log = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
            last_words = f"; its last words: {log[-1]}" if log else ""
            result["error"] = "\n".join([how + last_words, *log])
        return result


def _ending(process: subprocess.Popen, timeout: float) -> str:
    try:
        return f"the process ended with exit status {process.wait(timeout)}"
    except subprocess.TimeoutExpired:
        return f"the process was stopped after {timeout:.0f} s"


def _kill_group(process: subprocess.Popen) -> None:
    """End the process and its workers; it leads a group of its own, so nothing else is hit."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
