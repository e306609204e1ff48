"""One engine in one process: the part of the benchmark that holds the model.

    python -m benchmarks.worker JOB.json

`run.py` starts this module afresh for every engine and repeat, so that no engine inherits another's memory, compiled
programs or caches. The result goes into a JSON file that is rewritten after each workload, so that a crash or a timeout
costs the rest and not what was already measured. The engine is built before anything else is imported: its start-up
time holds what the engine imports, and not what the benchmark does.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.engines import Engine


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


def main(path: str) -> int:
    """Do the job in the file and write its result where the job says."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    write = Path(job["result"])
    if job["kind"] not in ("timing", "look"):
        raise ValueError(f"no job is called {job['kind']!r}")
    if job["kind"] == "timing":
        result = timing(job, write)
    else:
        from benchmarks.measure import look

        result = look(job, write)
    write.write_text(json.dumps({**result, "complete": True}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
