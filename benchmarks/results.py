"""Results files: what they hold, and which ones may be shown.

A file in `benchmarks/results/` is one measurement on one machine. All kinds of files say what they were measured with:
`kind`, and `versions`, `device` and `commit` (at the top or under `environment`). Those of kind `engines` come from
`run.py`; each of their workloads carries its hash, and a file whose hash is not that of today's work is refused: its
figures are not comparable any more.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.workloads import make_workload

SCHEMA = 1
RESULTS_DIRECTORY = ROOT / "benchmarks" / "results"


class ResultsError(ValueError):
    """A results file that must not be shown; the message names the file and what is wrong with it."""


def load_results(path: Path) -> dict:
    """A checked results file.

    Raises:
        ResultsError: see `check_results`.
    """
    try:
        payload = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ResultsError(f"{path.name} is not JSON: {error}") from error
    try:
        check_results(payload)
    except ResultsError as error:
        raise ResultsError(f"{path.name}: {error}") from error
    return payload


def load_all(directory: Path = RESULTS_DIRECTORY) -> dict[str, dict]:
    """Every results file of the directory by its name, checked."""
    return {path.name: load_results(path) for path in sorted(directory.glob("*.json"))}


def check_results(payload: object) -> None:
    """Refuse what cannot be trusted or compared.

    Raises:
        ResultsError: versions, device or commit are missing, or a workload is not today's.
    """
    if not isinstance(payload, dict) or not isinstance(payload.get("kind"), str):
        raise ResultsError("there is no 'kind'")
    where = payload.get("environment", payload)
    versions, device, commit = where.get("versions"), where.get("device"), where.get("commit")
    if not isinstance(versions, dict) or not versions.get("python") or not versions.get("torch"):
        raise ResultsError("there are no versions of Python and PyTorch")
    if not (device.get("name") if isinstance(device, dict) else device):
        raise ResultsError("there is no device")
    if not isinstance(commit, str) or not re.fullmatch("[0-9a-f]{7,40}", commit):
        raise ResultsError(f"there is no commit (got {commit!r}); measure in a git tree, or set BENCH_COMMIT")
    if payload["kind"] == "engines":
        _check_engines(payload)


def _check_engines(payload: dict) -> None:
    if payload.get("schema") != SCHEMA:
        raise ResultsError(f"schema {payload.get('schema')!r} is not {SCHEMA}; measure again")
    if payload["size"] == "tiny":
        raise ResultsError("size 'tiny' is for trying the benchmark out; its figures mean nothing")
    if payload["environment"].get("dirty") is None or not payload["environment"].get("date"):
        raise ResultsError("the environment does not say whether the tree was dirty, or has no date")
    for name, workload in payload["workloads"].items():
        expected = make_workload(name, payload["size"]).hash
        if workload["hash"] != expected:
            raise ResultsError(
                f"workload {name!r} has the hash {workload['hash'][:12]}, but today's work has {expected[:12]}; "
                "measure again"
            )
    for row in payload["rows"]:
        if row["workload"] not in payload["workloads"]:
            raise ResultsError(f"row {row['engine']!r} is of workload {row['workload']!r}, which the file lacks")
        if not any(row.get(outcome) for outcome in ("samples", "not_run", "error")):
            raise ResultsError(f"row {row['engine']!r} of {row['workload']!r} has no samples and no reason why not")
