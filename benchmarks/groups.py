"""Group engine results that may be compared, and check whether a group may be shown as one table.

Files with the same size, model, device, dtype and study form a group, which is one table. A row that two files of one
commit share has the samples of both. Figures measured elsewhere on the same workloads join the group, marked.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.engines import ENGINES, STUDIES
from benchmarks.results import LEAST_REPEATS, mixture
from benchmarks.text import number
from benchmarks.workloads import SIZES, make_workload

# Why a study's table has other values than the overview for the same engine, options, work, model and machine. Its
# caption says so; without a reason `make report` refuses the second value.
_OTHER_COMMIT = "Measured at another commit than the overview's table: compare rows of one table with one another."
_OTHER_RUN = "Measured in another run than the overview's table: compare rows of one table with one another."
WHY_APART = dict.fromkeys(("stage-b", "stage-d", "load", "ranks", "whole"), _OTHER_COMMIT)


@dataclass(frozen=True)
class Group:
    """Comparable measurements: same size, model, device, dtype and study ("" if none)."""

    size: str
    model: str
    device: str
    dtype: str
    study: str
    files: tuple[dict, ...]  # oldest first
    has_overviews_commit: bool = False

    @property
    def slug(self) -> str:
        text = f"{self.size}-{self.model.removeprefix('random:')}-{self.device}".lower()
        return re.sub("[^a-z0-9.]+", "-", text).strip("-")

    @cached_property
    def own(self) -> list[dict]:
        """Return the files measured with this repository."""
        return [file for file in self.files if file["kind"] == "engines"]

    @cached_property
    def workloads(self) -> dict[str, dict]:
        """Return hash, description and floors of each workload; a floor is the median of the files'."""
        found: dict[str, list[dict]] = {}
        for file in self.own:
            for name, workload in file["workloads"].items():
                found.setdefault(name, []).append(workload)
        return {name: same[-1] | {"floor": medians(w["floor"] for w in same)} for name, same in found.items()}

    @cached_property
    def rows(self) -> dict[tuple[str, str], dict]:
        """(engine, workload) -> the row, samples of all files together; the first visit that found nothing prepared."""
        found: dict[tuple[str, str], dict] = {}
        for file in self.files:
            for row in file["rows"]:
                before = found.get((row["engine"], row["workload"]), {})
                samples = [{**sample, "file": file["file"]} for sample in row.get("samples", [])]
                merged = {"samples": before.get("samples", []) + samples}
                for key in ("startup_seconds", "peak_megabytes"):  # of whole processes
                    merged[key] = before.get(key, []) + row.get(key, [])
                if visits := [visit for visit in (before.get("first_visit"), row.get("first_visit")) if visit]:
                    merged["first_visit"] = max(visits, key=lambda visit: visit["tpot_ms"])
                found[row["engine"], row["workload"]] = before | row | merged
        return found

    @cached_property
    def engines(self) -> list[str]:
        """Return names in the order of `ENGINES` or the study; rows with options follow the engine that they vary."""
        known = STUDIES[self.study] if self.study else [engine.name for engine in ENGINES]
        place = {name: place for place, name in enumerate(known)}
        names = dict.fromkeys(engine for engine, _ in self.rows)
        return sorted(names, key=lambda n: (n in self.elsewhere, place.get(n.partition("[")[0], len(place)), len(n), n))

    @cached_property
    def elsewhere(self) -> frozenset[str]:
        """Return the engines measured elsewhere."""
        return frozenset(r["engine"] for f in self.files if f["kind"] == "elsewhere" for r in f["rows"])

    def values(self, engine: str, workload: str, figure: str) -> list[float]:
        """Return every sample of a figure, in the order of measurement; empty if there is none."""
        row = self.rows.get((engine, workload), {})
        if figure == "launches":
            return [row["launches"]["launches"]] if row.get("launches") else []
        # Start-up and memory belong to the whole row.
        return row.get(figure) or [sample[figure] for sample in row.get("samples", []) if figure in sample]

    @property
    def why_apart(self) -> str:
        """Return the explanation why its values differ from other tables'; empty if there is none."""
        why = WHY_APART.get(self.study, "")
        return _OTHER_RUN if why == _OTHER_COMMIT and self.has_overviews_commit else why

    def median(self, engine: str, workload: str, figure: str) -> float | None:
        values = self.values(engine, workload, figure)
        return statistics.median(values) if values else None

    def floor(self, workload: str, figure: str) -> float | None:
        return self.workloads[workload]["floor"].get(figure) if workload in self.workloads else None

    @cached_property
    def problem(self) -> str:
        """Explain why this may not be a table: mixed commits, a changed tree, few repeats, other work. Empty if not."""
        found, few = [mixture(self.own)], {}
        for (engine, _), row in self.rows.items():
            repeats = len({(sample["file"], sample["repeat"]) for sample in row["samples"] if "repeat" in sample})
            if row["samples"] and repeats < LEAST_REPEATS and engine not in self.elsewhere:
                few[engine] = f"fewer than {LEAST_REPEATS} repeats of {engine}"
        found += few.values()
        for file in self.own:
            for name, workload in file["workloads"].items():
                if workload["hash"] != make_workload(name, self.size).hash:
                    found.append(f"{file['file']}: the work of {name!r} is not today's")
        return "; ".join(filter(None, found))


def medians(floors: Iterable[dict[str, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for figure, value in (item for floor in floors for item in floor.items()):
        found.setdefault(figure, []).append(value)
    return {figure: statistics.median(values) for figure, values in found.items()}


def group_results(files: Iterable[dict]) -> list[Group]:
    """Group the files of the kinds `engines` and `elsewhere`: GPU before CPU, larger tables first."""
    keys: dict[tuple[str, ...], list[dict]] = {}
    for payload in sorted(files, key=lambda payload: payload["environment"]["date"]):
        if payload["kind"] in ("engines", "elsewhere"):
            options, device = payload["options"], payload["environment"]["device"]["name"]
            key = (options["size"], options["model"], device, options["dtype"], options.get("study") or "")
            keys.setdefault(key, []).append(payload)
    groups = [group for key, found in keys.items() if (group := Group(*key, tuple(found))).own]
    where = [(group.model, group.device, group.own[-1]["environment"]["commit"]) for group in groups]
    overviews = {own for group, own in zip(groups, where, strict=True) if not group.study}
    groups = [replace(g, has_overviews_commit=own in overviews) for g, own in zip(groups, where, strict=True)]
    return sorted(groups, key=lambda g: (-SIZES.index(g.size), g.device, g.model, g.study))


def two_values(groups: Iterable[Group]) -> str:
    """Find a figure with two values (same engine, options, work, model, machine) that no caption explains."""
    known: dict[tuple, tuple[str, str]] = {}
    for group in (group for group in groups if not group.why_apart):
        for (engine, name), row in group.rows.items():
            options = tuple(sorted((key, str(value)) for key, value in row.get("options", {}).items()))
            work = group.workloads.get(name, {}).get("hash")
            for figure in dict.fromkeys(
                f for sample in row["samples"] for f, v in sample.items() if isinstance(v, float)
            ):
                key = row.get("package"), options, work, group.model, group.device, group.dtype, figure
                value, where = number(group.median(engine, name, figure)), f"{group.study or 'overview'}: {engine}"
                other, elsewhere = known.setdefault(key, (value, where))
                if other != value and engine not in group.elsewhere:
                    found = f"{figure} of {name} is {other} ({elsewhere}) and {value} ({where})"
                    return f"{found}; groups.py's WHY_APART may say why"
    return ""
