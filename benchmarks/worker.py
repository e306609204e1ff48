"""One engine in one process: the process that holds the model, and how it is started and ended.

`run_job` starts `python -m benchmarks.worker FOLDER` afresh for every engine and repeat, so that no engine inherits
another's memory, compiled programs or caches. The result is written again after each workload, so a crash or a
timeout loses only the rest. The engine is built before anything else is imported, so its start-up time includes the
engine's imports but not the benchmark's.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread

from benchmarks.engines import Engine

LOG_LINES = 12  # of a failed process's last words
LOOK_SECONDS = 0.2  # how often a process's file is looked at
PARENT = "BENCH_PARENT"  # environment variable: the end of a pipe that its parent holds


def run_job(job: Mapping[str, object], timeout: float, heard: Callable[[dict], None] = lambda found: None) -> dict:
    """Run a job in a separate process, which ends within a time limit whatever happens to it or to this process.

    Args:
        heard: receives the process's results so far, each time there are more.

    Returns:
        the process's results: `complete` if it finished, else with an `error` that says how it ended.
    """
    with tempfile.TemporaryDirectory(prefix="six-engines-bench-") as name:
        folder, file = Path(name), Path(name, "result.json")
        (folder / "job.json").write_text(json.dumps({**job, "started": time.time()}), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.worker", name]
        ear, mouth = os.pipe()  # this process alone holds the other end: when it ends, however, the worker knows
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", PARENT: str(ear)}
        with open(folder / "log.txt", "wb") as log:
            streams = {"stdout": log, "stderr": log}
            process = subprocess.Popen(command, **streams, start_new_session=True, env=environment, pass_fds=[ear])
        try:
            status = wait(process, timeout, file, heard)
            ended = f"ended with exit status {status}" if status is not None else "took too long and was stopped"
            how = f"the process {ended}"
        finally:
            with suppress(ProcessLookupError):  # it leads a process group: everything that it started ends with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(ear)
            os.close(mouth)
        result = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if not result.get("complete"):
            lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
            result["error"] = "\n".join([how + (f"; its last words: {lines[-1]}" if lines else ""), *lines])
        return result


def wait(process: subprocess.Popen, timeout: float, file: Path, heard: Callable[[dict], None]) -> int | None:
    """Wait for a process and report its file's contents; returns its exit status, None after the time limit."""
    end, seen = time.monotonic() + timeout, 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(min(LOOK_SECONDS, max(0.0, end - time.monotonic())))
        if file.is_file() and (changed := file.stat().st_mtime_ns) != seen:
            seen = changed
            heard(json.loads(file.read_text(encoding="utf-8")))
        if time.monotonic() >= end:
            return None


def end_with_parent() -> None:
    """End this process and its children when its parent has ended, by whatever signal."""
    os.read(int(os.environ[PARENT]), 1)  # nothing is ever written: it returns when the other end is closed
    os.killpg(0, signal.SIGKILL)


def write(file: Path, found: dict) -> None:
    """Write a file in one operation, because another process may be reading it."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(found), encoding="utf-8")
    new.replace(file)


def peak_megabytes(device: str) -> float:
    """Return the peak memory of this process: GPU memory if it computes on a GPU, else host memory."""
    import torch  # the engine has imported it

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


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
        result["peak_megabytes"] = peak_megabytes(job["device"])
        yield result
    close(llm)


def main(folder: Path) -> None:
    """Do the job in the folder, and write the results so far there, each time there are more."""
    Thread(target=end_with_parent, daemon=True).start()
    job, file, result = json.loads((folder / "job.json").read_text(encoding="utf-8")), folder / "result.json", {}
    if job["kind"] == "timing":
        results = time_workloads(job)
    else:
        from benchmarks.measure import look

        results = look(job)
    for result in results:
        write(file, result)
    write(file, {**result, "complete": True})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
