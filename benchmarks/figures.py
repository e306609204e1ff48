"""Measure stale published results again, the most valuable first (`make figures`).

    python -m benchmarks.figures                  # list them
    python -m benchmarks.figures --minutes 20     # measure for at most 20 minutes; the next call goes on
    python -m benchmarks.figures mlp sampling     # only results whose names contain one of these words

`figures.toml` has the command, the machine and the time of every published result. A result is stale if the code has
changed since it was measured (`sources.py`), if its command or its kind of GPU has changed, or if other parts of its
table must be measured at another commit. A mistake that was mended without changing any time is declared under
`[mended]`, with the commits whose results still hold; the next change of that folder makes them stale. Every command is
one of `benchmarks.run`, `benchmarks.micro` or `tools.soak`, and writes one file.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.engines import select
from benchmarks.results import BUSY, RESULTS, ROOT, commit_of_tree, load, made_from, table_of
from benchmarks.run import build_parser
from benchmarks.sources import code_of, folder_of, hash_of
from stage_a_naive.entrypoints.interrupts import run_command

PLAN = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Figure:
    """One published result: the command that measures it, and the machine that it needs ("counted": any)."""

    command: str
    machine: str
    guess: float  # minutes
    folder: Path  # of the results files

    @cached_property
    def words(self) -> list[str]:
        return shlex.split(self.command)

    @cached_property
    def name(self) -> str:
        """Return the name of its file, as the command makes it."""
        module, *words = self.words
        published = words[words.index("--publish") + 1]
        if module == "benchmarks.run":
            return published
        study = ["soak-http" if "--http" in words else "soak"] if module == "tools.soak" else words[:1]
        parts = [word.removeprefix("part=") for word in words if word.startswith("part=")]
        return "-".join([*study, *parts, published])

    @property
    def table(self) -> str:
        """Return the name of its table, which may have several files."""
        return table_of(self.name)

    @cached_property
    def code(self) -> dict[str, str]:
        """Return the hashes of the code that it measures today."""
        module, study, *_ = self.words
        if module == "benchmarks.run":
            args = build_parser().parse_args(self.words[1:])
            return code_of(*(engine.factory for engine in select(args.engines, args.study)))
        if module == "tools.soak":
            return code_of("stage_e_batching:LLM", *["beyond.serving.__main__"] * ("--http" in self.words))
        return code_of(f"benchmarks.micro.{study}")

    @cached_property
    def file(self) -> dict | None:
        path = self.folder / f"{self.name}.json"
        return load(path) if path.is_file() else None

    @property
    def minutes(self) -> float:
        """Return how long it takes: from its file, else an estimate."""
        seconds = self.file and self.file["environment"].get("seconds")
        return seconds / 60 if seconds else self.guess

    @cached_property
    def change(self) -> str:
        """Explain what has changed since the file was measured: code, command or machine. Empty if nothing has."""
        if self.file is None:
            return "not measured yet"
        where = self.file["environment"]
        if "code" not in where:
            return f"does not say which code it measured: {made_from(where)}"
        if shlex.split(where["command"]) != self.words:
            return f"measured by another command: python -m {where['command']}"
        if self.gpus[1] not in where["device"]["name"]:
            return f"measured on {where['device']['name']}"
        before = where["code"]
        has_ranks = self.gpus[0] > 1 or " pipeline " in self.command  # a pipeline's ranks may be on CPUs
        used = [folder for folder in before | self.code if folder != "ranks" or has_ranks]
        holds = partial(still_holds, where["commit"][:8])
        changed = sorted(f for f in used if before.get(f) != self.code.get(f) and not holds(f))
        return f"changed since {made_from(where)}: {', '.join(changed)}" if changed else ""

    @property
    def need(self) -> str:
        """Explain why this machine cannot measure it; empty if it can."""
        for command, need in read_plan()["needs"].items():
            known = find_spec(need) if need.isidentifier() else None
            if f".{command} " in f"{self.command} " and not (known or shutil.which(need) or (ROOT / need).exists()):
                return f"needs {need}"
        if self.machine == "counted":
            return ""
        here = gpus()
        if self.machine == "CPU":
            if here:
                return "needs a machine without a GPU"
            load_now = os.getloadavg()[0]
            return f"needs an idle machine: its load is {load_now:.1f}" if load_now > BUSY else ""
        count, kind = self.gpus
        return "" if len(here) >= count and all(kind in name for name in here) else f"needs {self.machine}"

    @property
    def gpus(self) -> tuple[int, str]:
        """Return the number of GPUs and their kind."""
        count, _, kind = self.machine.rpartition(" × ")
        return (0, "") if self.machine in ("CPU", "counted") else (int(count or 1), kind)

    def measure(self) -> int:
        """Run the command on exactly the GPUs that it needs, of those that are visible; returns its exit status."""
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        numbers = given.split(",") if given else list(map(str, range(len(gpus()))))
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(numbers[: self.gpus[0]])}
        command = [sys.executable, "-m", *self.words]
        return subprocess.run(command, cwd=ROOT, env=os.environ | visible, check=False).returncode


def read_plan() -> dict[str, dict]:
    return tomllib.loads(PLAN.read_text(encoding="utf-8"))


def figures(folder: Path) -> list[Figure]:
    """Return all published results, the most valuable of each machine first."""
    machines = {machine: commands for machine, commands in read_plan().items() if machine not in ("needs", "mended")}
    return [
        Figure(command, m, guess, folder) for m, commands in machines.items() for command, guess in commands.items()
    ]


def still_holds(commit: str, folder: str) -> bool:
    """Tell whether all that was changed in a folder since a commit is declared under `[mended]`."""
    mended = read_plan().get("mended", {}).get(folder)
    return mended is not None and commit in mended["commits"] and whole(folder) == mended["hash"]


@cache
def whole(folder: str) -> str:
    """Return the hash of all Python files of a folder, or of those that only several ranks run ("ranks")."""
    top = ROOT / ("stage_f_graph_tp" if folder == "ranks" else folder)
    files = (path.relative_to(ROOT).as_posix() for path in top.rglob("*.py"))
    return hash_of(sorted(file for file in files if folder_of(file) == folder))


@cache
def gpus() -> list[str]:
    """Return the names of this machine's GPUs. A separate process asks, because asking takes GPU memory."""
    ask = "import torch; print(*map(torch.cuda.get_device_name, range(torch.cuda.device_count())), sep='\\n')"
    told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    return told.split("\n")[:-1] if told.strip() else []


def stale(found: Iterable[Figure], commit: str | None) -> dict[Figure, str]:
    """Return the stale figures, and why. All parts of a table must come from one commit."""
    tables: dict[str, list[Figure]] = {}
    for figure in found:
        tables.setdefault(figure.table, []).append(figure)
    reasons: dict[Figure, str] = {}
    for parts in tables.values():
        commits = {part.file["environment"]["commit"][:7] for part in parts if part.file}
        if any(part.change for part in parts) or len(commits) > 1:
            for part in parts:
                if part.change or part.file["environment"]["commit"][:7] != (commit or "")[:7]:
                    reasons[part] = part.change or "another part of its table is measured again"
    return {figure: reasons[figure] for figure in found if figure in reasons}


def left_over(found: Iterable[Figure], folder: Path) -> list[str]:
    """Return the files that no command makes and whose table has a newer commit."""
    known = {figure.name for figure in found}
    commits = {figure.table: figure.file["environment"]["commit"][:7] for figure in found if figure.file}
    files = {path.stem: load(path)["environment"] for path in sorted(folder.glob("*.json")) if path.stem not in known}
    return [name for name, own in files.items() if (own.get("commit") or "")[:7] != commits.get(table_of(name), "")]


def main(argv: list[str] | None = None) -> int:
    """List stale results and measure them for some minutes; returns 1 if a command failed, 2 without a clean commit."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="only results whose names contain one of them")
    parser.add_argument("--minutes", type=float, help="measure for at most this long (default: only list)")
    args = parser.parse_args(argv)
    (commit, dirty), every = commit_of_tree(), figures(RESULTS)
    todo = {f: why for f, why in stale(every, commit).items() if not args.words or any(w in f.name for w in args.words)}
    here = " and ".join(gpus()) or f"no GPU, a load of {os.getloadavg()[0]:.1f}"
    print(f"{len(todo)} of {len(every)} results are stale. This machine: {here}; commit {(commit or 'unknown')[:10]}")
    for figure, why in todo.items():
        need = f"; {figure.need}" if figure.need else ""
        print(f"{figure.minutes:5.1f} min  {figure.name}: {why}{need}")
    for name in left_over(every, RESULTS):
        print(f"left over  {name}: no command of figures.toml makes it any more; git rm benchmarks/results/{name}.json")
    ready = [figure for figure in todo if not figure.need]
    print(f"{sum(f.minutes for f in ready):.0f} minutes here, {sum(f.minutes for f in todo):.0f} on all machines")
    if args.minutes is None or not ready:
        return 0
    if commit is None or dirty:
        print("error: results need a clean commit (git, or BENCH_COMMIT); commit first", file=sys.stderr)
        return 2
    return measure(ready, args.minutes)


def measure(ready: Iterable[Figure], minutes: float) -> int:
    """Measure figures one after another; skip those that would take longer than the remaining minutes."""
    end, status = time.monotonic() + 60 * minutes, 0
    for figure in ready:
        if time.monotonic() + 60 * figure.minutes <= end:
            print(f"\n=== {figure.name}: python -m {figure.command}", flush=True)
            if (failed := figure.measure()) == 130:
                return 130
            status |= bool(failed)
    return status


if __name__ == "__main__":
    raise SystemExit(run_command(main))
