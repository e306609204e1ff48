"""One engine in one process: the part of the benchmark that holds the model, and how it is started and ended.

`run_jobs` starts `python -m benchmarks.worker FOLDER` afresh for every engine and repeat, so that no engine inherits
another's memory, compiled programs or caches. The result is written again after each workload, so that a crash or a
timeout costs the rest and not what was measured. The engine is built before anything else is imported: its start-up
time holds what the engine imports, and not what the benchmark does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.engines import Engine

LOG_LINES = 12  # of a failed process's last words


def run_jobs(jobs: Sequence[Mapping[str, object]], timeout: float) -> list[dict]:
    """Do jobs side by side, each in a process of its own, and end them within a limit, whatever happens to them.

    Args:
        jobs: a job's `gpu`, if it has one, is the only GPU that its process sees.

    Returns:
        What each process wrote, `complete` if it got to the end; else with `error`, which says how it ended.
    """
    until, started = time.monotonic() + timeout, []
    with tempfile.TemporaryDirectory(prefix="six-engines-bench-") as parent:
        try:
            for i, job in enumerate(jobs):
                folder = Path(parent) / str(i)
                started.append((start(job, folder), folder))
            return [finish(process, folder, max(0.0, until - time.monotonic())) for process, folder in started]
        finally:
            for process, _ in started:
                end(process)


def start(job: Mapping[str, object], folder: Path) -> subprocess.Popen:
    """Start a process that does a job; the folder is for its files."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    if job.get("gpu"):
        environment["CUDA_VISIBLE_DEVICES"] = job["gpu"]
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps({**job, "started": time.time()}), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.worker", str(folder)]
    with open(folder / "log.txt", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)


def end(process: subprocess.Popen) -> None:
    """End a process with all that it started: it leads a group of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finish(process: subprocess.Popen, folder: Path, timeout: float) -> dict:
    """Wait for a process of `start`; returns its result."""
    try:
        how = f"the process ended with exit status {process.wait(timeout)}"
    except subprocess.TimeoutExpired:
        how = "the process took too long and was stopped"
    end(process)
    file = folder / "result.json"
    result = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not result.get("complete"):
        lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
        result["error"] = "\n".join([how + (f"; its last words: {lines[-1]}" if lines else ""), *lines])
    return result


def time_workloads(job: dict) -> Iterator[dict]:
    """All workloads of the job through one engine, in order; what has been measured, after each of them."""
    engine = Engine(**job["engine"])
    llm = engine.build(job["model"], job["device"], job["dtype"], job["max_model_len"])
    result: dict = {"startup_seconds": time.time() - job["started"], "workloads": {}}

    from benchmarks.measure import close, run_workload
    from benchmarks.workloads import make_workload

    for name in job["workloads"]:
        try:
            result["workloads"][name] = run_workload(llm, engine, make_workload(name, job["size"]), **job["limits"])
        except Exception as error:  # one workload's failure must not cost the others
            traceback.print_exc()
            result["workloads"][name] = {"error": f"{type(error).__name__}: {error}"}
        yield result
    close(llm)


def main(folder: Path) -> None:
    """Do the job in the folder, and write there what is known so far, each time that there is more."""
    job, file, result = json.loads((folder / "job.json").read_text(encoding="utf-8")), folder / "result.json", {}
    if job["kind"] == "timing":
        results = time_workloads(job)
    else:
        from benchmarks.measure import look

        results = look(job)
    for result in results:
        file.write_text(json.dumps(result), encoding="utf-8")
    file.write_text(json.dumps({**result, "complete": True}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
