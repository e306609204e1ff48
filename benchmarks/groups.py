"""Engine results that may be compared, and whether they may be shown as one table.

Files of one size, model, device, dtype and study make one group, which is one table: the same row in two files of one
commit is one row with the samples of both. Figures measured elsewhere on the same workloads join the group, marked.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from benchmarks.engines import ENGINES
from benchmarks.results import LEAST_REPEATS, mixture
from benchmarks.workloads import SIZES, make_workload


@dataclass(frozen=True)
class Group:
    """Comparable measurements: same size, model, device, dtype and study ("" where it is none)."""

    size: str
    model: str
    device: str
    dtype: str
    study: str
    files: tuple[dict, ...]  # oldest first

    @property
    def slug(self) -> str:
        text = f"{self.size}-{self.model.removeprefix('random:')}-{self.device}".lower()
        return "-".join("".join(c if c.isalnum() or c == "." else " " for c in text).split())

    @property
    def own(self) -> list[dict]:
        """The files that were measured with this repository."""
        return [file for file in self.files if file["kind"] == "engines"]

    def workload(self, name: str) -> dict | None:
        """Hash, description and floors of a workload, as the newest file that has it says."""
        return next((f["workloads"][name] for f in reversed(self.own) if name in f["workloads"]), None)

    @cached_property
    def rows(self) -> dict[tuple[str, str], dict]:
        """(engine, workload) -> the row, samples of all files together."""
        found: dict[tuple[str, str], dict] = {}
        for file in self.files:
            for row in file["rows"]:
                before = found.get((row["engine"], row["workload"]), {})
                samples = [{**sample, "file": file["file"]} for sample in row.get("samples", [])]
                startups = before.get("startup_seconds", []) + row.get("startup_seconds", [])
                merged = {"samples": before.get("samples", []) + samples, "startup_seconds": startups}
                found[row["engine"], row["workload"]] = before | row | merged
        return found

    @cached_property
    def engines(self) -> list[str]:
        """Names in table order; rows with options of their own after the engine that they vary, others' at the end.

        In a study, the order in which they were measured first.
        """
        order = {engine.name: place for place, engine in enumerate(ENGINES)}
        names = dict.fromkeys(engine for engine, _ in self.rows)
        if self.study:
            return list(names)
        return sorted(names, key=lambda n: (n in self.elsewhere, order.get(n.partition("[")[0], len(order)), len(n), n))

    @cached_property
    def elsewhere(self) -> frozenset[str]:
        """The engines that were measured elsewhere."""
        return frozenset(r["engine"] for f in self.files if f["kind"] == "elsewhere" for r in f["rows"])

    def values(self, engine: str, workload: str, figure: str) -> list[float]:
        """Every sample of a figure, in the order in which they were taken; empty where there is none."""
        row = self.rows.get((engine, workload), {})
        if figure == "startup_seconds":
            return row.get("startup_seconds", [])
        if figure == "launches":
            return [row["launches"]["launches"]] if row.get("launches") else []
        return [sample[figure] for sample in row.get("samples", []) if figure in sample]

    def median(self, engine: str, workload: str, figure: str) -> float | None:
        values = self.values(engine, workload, figure)
        return statistics.median(values) if values else None

    def floor(self, workload: str, figure: str) -> float | None:
        return (self.workload(workload) or {"floor": {}})["floor"].get(figure)

    @cached_property
    def problem(self) -> str:
        """Why this may not be a table: commits mixed, a changed tree, too few repeats, other work. Empty if it may."""
        found, few = [mixture(self.own)], {}
        for (engine, name), row in self.rows.items():
            repeats = len({(sample["file"], sample["repeat"]) for sample in row["samples"] if "repeat" in sample})
            if row["samples"] and repeats < LEAST_REPEATS and engine not in self.elsewhere:
                few.setdefault(engine, []).append(name)
        if few:
            rows = "; ".join(f"{engine} ({', '.join(names)})" for engine, names in few.items())
            found.append(f"fewer than {LEAST_REPEATS} repeats: {rows}")
        for file in self.own:
            for name, workload in file["workloads"].items():
                if workload["hash"] != make_workload(name, self.size).hash:
                    found.append(f"{file['file']}: the work of {name!r} is not today's")
        return "; ".join(filter(None, found))


def group_results(files: Iterable[dict]) -> list[Group]:
    """Groups of the files of the kinds `engines` and `elsewhere`, GPU before CPU, larger tables first."""
    keys: dict[tuple[str, ...], list[dict]] = {}
    files = (file for file in files if file["kind"] in ("engines", "elsewhere"))
    for payload in sorted(files, key=lambda payload: payload["environment"]["date"]):
        options = payload["options"]
        device, study = payload["environment"]["device"]["name"], options.get("study") or ""
        key = (options["size"], options["model"], device, options["dtype"], study)
        keys.setdefault(key, []).append(payload)
    groups = [Group(*key, tuple(found)) for key, found in keys.items()]
    with_own = [group for group in groups if group.own]
    return sorted(with_own, key=lambda g: (-SIZES.index(g.size), g.device, g.model, g.study))
