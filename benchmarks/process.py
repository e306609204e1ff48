"""Start a measuring process, wait for it within a limit, and bring back what it wrote, whatever happened to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

LOG_LINES = 12  # of a failed process's last words


def run_job(job: Mapping[str, object], timeout: float) -> dict:
    """Run `benchmarks.worker` on a job in a process of its own, and end it within a limit, whatever happens to it.

    Returns:
        What the process wrote, `complete` if it got to the end; else with `error`, which says how it ended.
    """
    with tempfile.TemporaryDirectory(prefix="six-engines-bench-") as name:
        job_file, result_file, log_file = (Path(name) / part for part in ("job.json", "result.json", "log.txt"))
        job = {**job, "result": str(result_file), "started": time.time()}
        job_file.write_text(json.dumps(job), encoding="utf-8")
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker", str(job_file)],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )  # fmt: skip
            try:
                how = f"the process ended with exit status {process.wait(timeout)}"
            except subprocess.TimeoutExpired:
                how = f"the process was stopped after {timeout:.0f} s"
            finally:
                with suppress(ProcessLookupError):  # it leads a group of its own: its workers end with it, nothing else
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        result = json.loads(result_file.read_text(encoding="utf-8")) if result_file.is_file() else {}
        if not result.get("complete"):
            lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
            result["error"] = "\n".join([how + (f"; its last words: {lines[-1]}" if lines else ""), *lines])
        return result
