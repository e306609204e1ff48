"""One engine in one process: the part of the benchmark that holds the model, and how it is started and ended.

`run_jobs` starts `python -m benchmarks.worker JOB.json` afresh for every engine and repeat, so that no engine inherits
another's memory, compiled programs or caches. The result goes into a JSON file that is rewritten after each workload,
so that a crash or a timeout costs the rest and not what was already measured. The engine is built before anything else
is imported: its start-up time holds what the engine imports, and not what the benchmark does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
    began = time.monotonic()
    with ExitStack() as stack:
        started = [stack.enter_context(start(job)) for job in jobs]
        return [finish(process, Path(folder), began, timeout) for process, folder in started]


@contextmanager
def start(job: Mapping[str, object]) -> Iterator[tuple[subprocess.Popen, str]]:
    """A process that does a job, and the folder it writes to; it has ended when the block is left."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    if job.get("gpu"):
        environment["CUDA_VISIBLE_DEVICES"] = job["gpu"]
    with tempfile.TemporaryDirectory(prefix="six-engines-bench-") as folder:
        job_file = Path(folder) / "job.json"
        job = {**job, "result": f"{folder}/result.json", "started": time.time()}
        job_file.write_text(json.dumps(job), encoding="utf-8")
        with open(f"{folder}/log.txt", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker", str(job_file)],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment,
            )  # fmt: skip
        try:
            yield process, folder
        finally:
            end(process)


def end(process: subprocess.Popen) -> None:
    """End a process with all that it started: it leads a group of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finish(process: subprocess.Popen, folder: Path, began: float, timeout: float) -> dict:
    """Wait for a process of `start`, until `timeout` seconds after `began`; returns its result."""
    try:
        how = f"the process ended with exit status {process.wait(max(0.0, began + timeout - time.monotonic()))}"
    except subprocess.TimeoutExpired:
        how = f"the process was stopped after {timeout:.0f} s"
    end(process)
    result_file = folder / "result.json"
    result = json.loads(result_file.read_text(encoding="utf-8")) if result_file.is_file() else {}
    if not result.get("complete"):
        lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
        result["error"] = "\n".join([how + (f"; its last words: {lines[-1]}" if lines else ""), *lines])
    return result


def timing(job: dict, write: Path) -> dict:
    """All workloads of the job through one engine, in order."""
    engine = Engine(**job["engine"])
    llm = engine.build(job["model"], job["device"], job["dtype"], job["max_model_len"])
    result: dict = {"startup_seconds": time.time() - job["started"], "workloads": {}}

    from benchmarks.measure import close, measured_or_error

    for name in job["workloads"]:
        result["workloads"][name] = measured_or_error(llm, engine, name, job)
        write.write_text(json.dumps(result))
        print(f"{name}: {json.dumps(result['workloads'][name])}", flush=True)
    close(llm)
    return result


def main(path: str) -> None:
    """Do the job in the file and write its result where the job says."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    write = Path(job["result"])
    if job["kind"] == "timing":
        result = timing(job, write)
    elif job["kind"] == "look":
        from benchmarks.measure import look

        result = look(job, write)
    else:
        raise ValueError(f"no job is called {job['kind']!r}")
    write.write_text(json.dumps({**result, "complete": True}))


if __name__ == "__main__":
    main(sys.argv[1])
