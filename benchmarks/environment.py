"""What a measurement was made with and on: versions, device, commit. A figure without them cannot be repeated.

The commit comes from git; where the tree is an export without `.git`, from the environment variable `BENCH_COMMIT`
(a commit's hash, with `-dirty` after it where the tree differed from that commit).
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "transformers", "triton", "flash-attn", "numpy")


def environment() -> dict[str, object]:
    """`versions`, `device`, `commit`, `dirty` and `date`, ready for JSON.

    `commit` and `dirty` are None where neither git nor `BENCH_COMMIT` tells; the report refuses such a file.
    """
    commit, dirty = commit_of_tree()
    return {
        "versions": versions(),
        "device": device_description(),
        "commit": commit,
        "dirty": dirty,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str | None]:
    """Version of Python and of each package that matters; None where it is not there."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    found["driver"] = driver_version()
    return found


def driver_version() -> str | None:
    """The NVIDIA driver's version, None without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.splitlines()[0].strip() if answer.returncode == 0 and answer.stdout.strip() else None


def device_description() -> dict[str, object]:
    """The GPU where PyTorch sees one, else the CPU; the CPU is named in both cases, because it launches the kernels."""
    cpu = {"cpu": cpu_name(), "cpu_cores": os.cpu_count()}
    if not torch.cuda.is_available():
        return {"type": "cpu", "name": cpu_name(), "threads": torch.get_num_threads(), **cpu}
    properties = torch.cuda.get_device_properties(0)
    return {
        "type": "cuda",
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        **cpu,
    }


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit_of_tree() -> tuple[str | None, bool | None]:
    """(commit, whether the tree differs from it), from git or from `BENCH_COMMIT`; (None, None) where neither tells."""
    commit = _git("rev-parse", "HEAD") if (ROOT / ".git").exists() and shutil.which("git") else ""
    if commit:
        # Measuring writes results; they change nothing about what was measured.
        changes = _git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!benchmarks/plots")
        return commit, bool(changes)
    given = os.environ.get("BENCH_COMMIT", "").strip()
    return (given.removesuffix("-dirty"), given.endswith("-dirty")) if given else (None, None)


def _git(*arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else ""
