"""One engine in one process: the part of the benchmark that holds the model, and how it is started and ended.

`run_job` starts `python -m benchmarks.worker FOLDER` afresh for every engine and repeat, so that no engine inherits
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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from benchmarks.engines import Engine

LOG_LINES = 12  # of a failed process's last words


def run_job(job: Mapping[str, object], timeout: float) -> dict:
    """Do a job in a process of its own, and end it within a limit, whatever happens to it.

    Returns:
        What the process wrote, `complete` if it got to the end; else with `error`, which says how it ended.
    """
    with tempfile.TemporaryDirectory(prefix="six-engines-bench-") as name:
        folder, file = Path(name), Path(name, "result.json")
        (folder / "job.json").write_text(json.dumps({**job, "started": time.time()}), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.worker", name]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        with open(folder / "log.txt", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        try:
            how = f"the process ended with exit status {process.wait(timeout)}"
        except subprocess.TimeoutExpired:
            how = "the process took too long and was stopped"
        finally:
            with suppress(ProcessLookupError):  # it leads a group of its own: all that it started ends with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
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
