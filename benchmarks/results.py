"""Results files: their contents, and which of them may be shown.

One layout for all of them:

    kind         "engines" (run.py), or the name of a module of `micro`
    environment  versions, device, commit, dirty, date; `code`, the hashes of what was measured (sources.py); the
                 `command` and the `seconds` that it took
    options      the options of the measurement
    rows         a dict per row, with every sample (`samples`, in seconds where a study times something)

The commit comes from the environment variable `BENCH_COMMIT` where it is set (a hash, with `-dirty` after it where the
tree differs), else from git. Committed files are in `results/` and change on purpose alone (`--publish`); a learner's
own go to `local/`, which git ignores. A table is one commit, clean, and at least three repeats of every row.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

import torch

from tools.doctor import cpu_name, driver_version

ROOT = Path(__file__).resolve().parent.parent
RESULTS, LOCAL = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "local"
PACKAGES = ("torch", "transformers", "triton", "flash-attn", "numpy")
PEERS = ("vllm", "nanovllm", "minisgl")  # modules of other projects' engines
LEAST_REPEATS = 3
BUSY = 0.5  # running programs, on average over a minute, from which on times of a CPU are not to be trusted


class ResultsError(ValueError):
    """A results file that must not be shown; the message names the file and the reason."""


def environment() -> dict[str, object]:
    """Return `versions`, `device`, `commit`, `dirty` and `date`; commit and dirty are None if unknown."""
    commit, dirty = commit_of_tree()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"versions": versions(), "device": device_description(), "commit": commit, "dirty": dirty, "date": date}


def versions() -> dict[str, str | None]:
    """Return the versions of this project, of Python and of each relevant package; None if it is missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, str | None] = {"six engines": project["version"], "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    for module in filter(find_spec, PEERS):
        found |= {name: version_and_commit(name) for name in packages_distributions()[module]}
    return found | {"cuda": torch.version.cuda, "driver": driver_version()}


def version_and_commit(package: str) -> str:
    """Return an installed package's version, and its commit if pip installed it from a repository."""
    origin = json.loads(distribution(package).read_text("direct_url.json") or "{}")
    commit = origin.get("vcs_info", {}).get("commit_id", "")
    return " ".join(filter(None, [version(package), commit and f"commit {commit[:10]}"]))


def device_description() -> dict[str, object]:
    """Return the GPU if PyTorch sees one, else the CPU. The CPU is always named, because it launches the kernels."""
    cpu = {"cpu": cpu_name(), "cpu_cores": os.cpu_count()}
    if not torch.cuda.is_available():
        return {"type": "cpu", "name": cpu_name(), "threads": torch.get_num_threads(), **cpu}
    gpu = torch.cuda.get_device_properties(0)
    found = {"type": "cuda", "name": gpu.name, "count": torch.cuda.device_count(), "memory_bytes": gpu.total_memory}
    return found | {"capability": f"{gpu.major}.{gpu.minor}", **cpu}


def commit_of_tree() -> tuple[str | None, bool | None]:
    """Return the commit and whether the tree differs from it, from `BENCH_COMMIT` or git; (None, None) if unknown."""
    given = os.environ.get("BENCH_COMMIT", "").strip()
    if given:
        return given.removesuffix("-dirty"), given.endswith("-dirty")
    commit = _output("git", "rev-parse", "HEAD") if (ROOT / ".git").exists() else ""
    if not commit:
        return None, None
    # What measuring writes changes nothing about what was measured.
    return commit, bool(_output("git", "status", "--porcelain", "--", ".", ":!benchmarks/results", ":!*.svg"))


def command() -> str:
    """Return this process's command, after `python -m`."""
    spec = sys.modules["__main__"].__spec__
    return shlex.join([spec.name.removesuffix(".__main__") if spec else "", *sys.argv[1:]])


def made_from(where: dict) -> str:
    """Return the version and commit in a file's `environment`, and the date of its measurement."""
    version, commit = where.get("versions", {}).get("six engines"), where.get("commit")
    named = [version and f"version {version}", commit and f"commit {commit[:10]}", where["date"][:10]]
    return ", ".join(filter(None, named))


def table_of(name: str) -> str:
    """Return the name of a results file's table: the file's name without the number at its end."""
    return re.sub(r"-\d+$", "", name)


def _output(*command: str) -> str:
    """Return a program's output; "" if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else ""


def write(payload: dict, path: Path) -> None:
    """Write a results file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(as_text(payload), encoding="utf-8")
    new.replace(path)


def as_text(payload: dict) -> str:
    """Format as JSON with a line for each value, and a line for each dict of a list such as `rows`."""
    lines = []
    for key, value in payload.items():
        is_table = isinstance(value, list) and value and isinstance(value[0], dict)
        texts = [json.dumps(item, ensure_ascii=False) for item in (value if is_table else [value])]
        lines.append(f'"{key}": ' + ("[\n  " + ",\n  ".join(texts) + "\n ]" if is_table else texts[0]))
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def load(path: Path) -> dict:
    """Read a results file, add its name as `file`, and check that it describes its measurement.

    Raises:
        ResultsError: it is not JSON, or lacks a field that is needed to repeat it.
    """
    try:
        payload = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ResultsError(f"{path.name} is not JSON: {error}") from error
    where = payload.get("environment") or {}
    needed = {"kind": payload.get("kind"), "rows": payload.get("rows")}
    needed |= {name: where.get(name) for name in ("device", "date")}
    if payload.get("kind") == "elsewhere":
        needed["source"] = payload.get("source")
    else:
        is_commit = re.fullmatch("[0-9a-f]{7,40}", where.get("commit") or "") and where.get("dirty") is not None
        needed |= {"versions": where.get("versions"), "commit": is_commit}
    missing = [name for name, value in needed.items() if not value]
    if missing:
        raise ResultsError(f"{path.name}: no {', '.join(missing)}; measure in a git tree, or set BENCH_COMMIT")
    return payload | {"file": path.name}


def load_all(directory: Path = RESULTS) -> list[dict]:
    """Return every results file of the directory, the newest first."""
    found = [load(path) for path in sorted(directory.glob("*.json"))]
    return sorted(found, key=lambda payload: payload["environment"]["date"], reverse=True)


def of_kind(kind: str) -> list[dict]:
    """Return the committed results files of one kind, the newest first."""
    return [payload for payload in load_all() if payload["kind"] == kind]


def mixture(payloads: Iterable[dict]) -> str:
    """Explain why these files may not share one table: several commits, or a changed tree. Empty if they may."""
    where = {payload["file"]: payload["environment"] for payload in payloads}
    commits = {file: own["commit"][:10] + " with changes" * own["dirty"] for file, own in where.items()}
    if len(set(commits.values())) == 1 and not any(own["dirty"] for own in where.values()):
        return ""
    return "; ".join(f"{file}: commit {commit}" for file, commit in commits.items())


def few_repeats(payload: dict) -> str:
    """Explain why a study's file may not become a table: rows with too few samples. Empty if it may."""
    few = sum(len(row["samples"]) < LEAST_REPEATS for row in payload["rows"] if "samples" in row)
    return f"{few} rows with fewer than {LEAST_REPEATS} samples" if few else ""
