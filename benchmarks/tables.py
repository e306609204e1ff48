"""The tables of engines: a stage's, a study's, the front page's, and the overview that a run prints.

Each row is an engine; each column is a `Column`: one figure of one workload, the median of all its samples.
"""

from __future__ import annotations

import re
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.groups import Group
from benchmarks.text import against_floor, markdown, number, spread, times

WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Column:
    """A column of a table of engines: one figure of one workload."""

    heading: str
    workload: str
    figure: str
    of_floor: bool = False  # show how far it is from the floor, and not the figure

    def median(self, group: Group, engine: str) -> float | None:
        return group.median(engine, self.workload, self.figure)

    def floor(self, group: Group) -> float | None:
        return group.floor(self.workload, self.figure)

    def range(self, group: Group, engine: str) -> str:
        """Return the median, the smallest and the largest of the samples."""
        return spread(group.values(engine, self.workload, self.figure))

    def cell(self, group: Group, engine: str, ranges: bool = False) -> str:
        if self.of_floor:
            return against_floor(self.figure, self.median(group, engine), self.floor(group))
        return self.range(group, engine) if ranges else number(self.median(group, engine))

    def gain(self, group: Group, engine: str, before: str = "") -> str:
        """Return the speed relative to another engine; by default the stage before, eager or compiled like this one."""
        value, base = self.median(group, engine), self.median(group, before or BEFORE.get(engine, ""))
        if not value or not base:
            return "–"
        return times(value / base if self.figure.endswith("_per_s") else base / value)


START = Column("start-up, s", "single", "startup_seconds")
MEMORY = Column("peak memory, MB", "single", "peak_megabytes")
FIRST = Column("first token: ms", "single", "prefill_ms")
STEP = Column("one request: ms per token", "single", "tpot_ms")
FAR = Column("× the floor", "single", "tpot_ms", of_floor=True)
LAUNCHES = Column("kernel launches per step", "single", "launches")
BATCH = Column("batch: ms per step", "decode32", "step_ms")
LOAD = Column("load: tokens/s", "mixed", "output_tokens_per_s")
LOAD_SHARE = Column("of the floor's tokens/s", "mixed", "output_tokens_per_s", of_floor=True)
PREFIX = Column("shared prefix: s", "prefix", "seconds")
PREFIX_FIRST = Column("shared prefix: ms until half of the requests have their first token", "prefix", "ttft_p50_ms")
# What a stage's lesson is about; at most five columns with the engine's.
STAGE_COLUMNS = {
    "stage_a_naive": (STEP, FAR, LAUNCHES),
    "stage_b_decode_step": (STEP, FAR, LAUNCHES),
    "stage_c_fused_mlp": (STEP, FAR, LAUNCHES),
    "stage_d_paged": (STEP, BATCH, LOAD, PREFIX),
    "stage_e_batching": (STEP, BATCH, LOAD, LOAD_SHARE),
    "stage_f_graph_tp": (STEP, FAR, LOAD, LOAD_SHARE),
}
BEFORE = {"B": "A", "B compiled": "B", "C": "B", "C compiled": "B compiled", "D": "C compiled", "E": "D", "F": "E"}
STUDY_MARKERS = {
    "stage-b": "ablation",
    "stage-d": "sharing",
    "load": "under-load",
    "whole": "whole-load",
    "ranks": "tp",
    "quantization": "quantized-engine",
    "experts": "experts-engine",
}
TOO_LONG = re.compile(r"would take about .*; the limit was (\d+) s")  # what `measure.py` says of a round


def engine_tables(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return the lines of every table of engines by marker, except those of the front page."""
    plain, before = [group for group in groups if not group.study], None
    found: dict[str, list[str]] = {}
    for package in STAGE_COLUMNS:
        marker = f"bench:{'_'.join(package.split('_')[:2])}"
        found[marker], before = [line for g in plain for line in stage_table(g, package, before)], package
    for study, marker in STUDY_MARKERS.items():
        found[marker] = [line for g in groups if g.study == study for line in study_table(g)]
    alone = [group for group in plain if "F" in group.engines and group.size == "gpu"]
    return found | {"f-alone": [line for g in alone for line in [*caption(g), *overview(g, ["F"]), ""]]}


def overview(group: Group, engines: Sequence[str] = ()) -> list[str]:
    """Return the table that compares the engines, by default all of them, at a glance."""
    ttft = group.workloads["ttft"]["floor"] if "ttft" in group.workloads else {}
    columns = [START, STEP, FAR, BATCH, LOAD, LOAD_SHARE, PREFIX]
    columns += [MEMORY] if any(MEMORY.median(group, engine) for engine in group.engines) else []
    columns += [Column(f"first token of {figure.split('_')[1]}: ms", "ttft", figure) for figure in ttft]
    return table(group, engines or group.engines, columns)


def own_results(group: Group) -> list[str]:
    """Format a reader's results as Markdown: throughput, first token, time per token, memory, against the first row.

    The first row is Hugging Face's `generate` where it was measured.
    """
    columns = [column for column in (LOAD, FIRST, STEP, MEMORY) if column.workload in group.workloads]
    where, (first, *_) = group.own[-1]["environment"], group.engines
    body = [["*floor*", *(number(floor) if (floor := c.floor(group)) else "" for c in columns)]]
    for engine in group.engines:
        factors = ["" if c is MEMORY or engine == first else c.gain(group, engine, first) for c in columns]
        pairs = zip((c.cell(group, engine) for c in columns), factors, strict=True)
        body.append([engine, *(f"{cell}, {factor}" if factor.strip("–") else cell for cell, factor in pairs)])
    work = [f"- {name}: {workload['description']}" for name, workload in group.workloads.items()]
    return [
        "# My results",
        "",
        f"**{group.model}** in {group.dtype} on {group.device}, {where['date'][:10]}, "
        f"torch {where['versions']['torch']}. `n ×`: times as good as *{first}*.",
        "",
        *markdown(["engine", *(c.heading for c in columns)], body),
        *notes(group, group.engines, columns),
        "",
        "The work (load is `mixed`; the first token and the time per token are of one request, `single`):",
        "",
        *work,
        "",
        "`make bench` overwrites this file: keep your conclusions in another file.",
    ]


def stage_table(group: Group, package: str, before: str | None) -> list[str]:
    """Return the rows of a stage, its variants and the stage before, with the range of the samples.

    Empty if the stage before was not measured, because there is nothing to compare.
    """
    packages = {engine: row["package"] for (engine, _), row in group.rows.items() if "package" in row}
    engines = [
        engine
        for engine in group.engines
        if packages.get(engine) == package or (before and packages.get(engine) == before and "[" not in engine)
    ]
    if not {package, before} - {None} <= {packages.get(engine) for engine in engines}:
        return []
    counted = any(LAUNCHES.median(group, engine) is not None for engine in engines)  # on a GPU
    columns = [c for c in STAGE_COLUMNS[package] if c is not LAUNCHES or counted]
    engines = [engine for engine in engines if any(c.median(group, engine) is not None for c in columns)]
    cost = launch_cost(group) if LAUNCHES in columns else []
    return [*caption(group), *table(group, engines, columns, ranges=True), *cost, ""]


def table(group: Group, engines: Sequence[str], columns: Sequence[Column], ranges: bool = False) -> list[str]:
    """Return one row per engine, the floor first, then engines that were not run or were measured elsewhere."""
    columns = [column for column in columns if column.workload in group.workloads]
    floors = ["1 ×" if c.of_floor else number(floor) if (floor := c.floor(group)) else "" for c in columns]
    rows = [["*floor*", *floors]]
    for engine in engines:
        name = f"*{engine}* †" if engine in group.elsewhere else engine
        rows.append([name, *(column.cell(group, engine, ranges) for column in columns)])
    return markdown(["engine", *(c.heading for c in columns)], rows) + notes(group, engines, columns)


def launch_cost(group: Group) -> list[str]:
    """State the cost of a launch on a group's machine; "" if it was not measured."""
    costs = [file["launch_seconds"] for file in group.own if file.get("launch_seconds")]
    if not costs:
        return []
    alone, in_graph = (1e6 * statistics.median(cost[way] for cost in costs) for way in ("alone", "in_graph"))
    return [
        "",
        f"On this machine a kernel that does nothing takes {alone:.2f} µs when Python launches it, and "
        f"{in_graph:.2f} µs inside a CUDA graph.",
    ]


def study_table(group: Group) -> list[str]:
    """Return the rows of a study in its order, each figure with its factor against the first row."""
    first, *_ = group.engines
    known = (STEP, BATCH, LOAD, PREFIX_FIRST, PREFIX)
    columns, body = [column for column in known if column.workload in group.workloads], []
    for engine in group.engines:
        cells, single = [engine], group.rows.get((engine, "single"), {})
        for c in columns:
            factor = c.gain(group, engine, first)
            cells.append(c.range(group, engine) + (f", {factor}" if factor != "–" else ""))
        if "single" in group.workloads:
            prefill = number(group.median(engine, "single", "prefill_ms"))
            counts = single.get("launches")
            cells.append(f"{prefill} ({number(single.get('first_prefill_ms'))})")
            cells.append(f"{counts['kernels']:.0f}, {counts['launches']:.0f}" if counts else "–")
        body.append(cells)
    heads = ["", *(f"{column.heading}, and × *{first}*" for column in columns)]
    if "single" in group.workloads:
        heads += ["prefill, ms (the process's first)", "kernels run, and launches by the CPU, per step"]
    return [*caption(group), *markdown(heads, body), *launch_cost(group), *notes(group, group.engines, columns), ""]


def front_rows(group: Group) -> list[str]:
    """Return the engines of the front page: the stages, and those measured elsewhere."""
    return [engine for engine in group.engines if engine in WORDS["adds"] or engine in group.elsewhere]


def front_table(group: Group, folder: str = "") -> list[str]:
    """Return the front page's table: stage, what it adds, one request, load, and both against the stage before.

    Args:
        folder: the path to the folders of the stages from where the table is shown, for example `../`.
    """
    columns, body = (STEP, LOAD), []
    for engine in front_rows(group):
        package = group.rows[engine, "single"].get("package", "")
        name = f"[{engine}]({folder}{package}/README.md)" if package.startswith("stage_") else engine
        what = "elsewhere" if engine in group.elsewhere else engine
        gains = " · ".join(c.gain(group, engine) for c in columns) if engine in BEFORE else ""
        cells = [WORDS["adds"][what], *(c.cell(group, engine) for c in columns), gains]
        body.append([f"*{engine}* †" if what == "elsewhere" else name, *cells])
    body.append(["*floor*", WORDS["adds"]["floor"], *(number(c.floor(group)) for c in columns), ""])
    first, _, *others = markdown(WORDS["front"], body)
    return [first, "|---|---|---:|---:|---:|", *others, *notes(group, front_rows(group), columns)]


def notes(group: Group, engines: Sequence[str], columns: Sequence[Column]) -> list[str]:
    """Explain dashes and daggers, and mention a first visit that was much slower than the second."""
    shown, lines = {column.workload for column in columns}, []
    reasons: dict[tuple[str, str], list[str]] = {}
    too_long: dict[tuple[str, str], list[str]] = {}  # by workload and limit
    for (engine, name), row in sorted(group.rows.items(), key=lambda item: group.engines.index(item[0][0])):
        if engine not in engines or name not in shown:
            continue
        work = WORDS["workloads"][name]
        for outcome in ("not_run", "error"):
            if outcome in row and not row["samples"]:
                reason = row[outcome].splitlines()[0]
                if match := TOO_LONG.match(reason):
                    too_long.setdefault((work, match[1]), []).append(engine)
                else:
                    reasons.setdefault((engine, WORDS[outcome] + reason), []).append(work)
        first, again = (row.get("first_visit") or {}).get("tpot_ms"), group.median(engine, name, "tpot_ms")
        if first and again and first > 1.5 * again:
            lines.append("- " + WORDS["first"].format(engine, work, number(first), number(again)))
    for (engine, text), names in reasons.items():
        some = names if len(names) < len(WORDS["workloads"]) else []  # else all of them
        lines.append("- " + ", ".join([engine, *some]) + f": {text}")
    lines += ["- " + WORDS["too_long"].format(*key, ", ".join(those)) for key, those in too_long.items()]
    for file in group.files:
        if file["kind"] == "elsewhere" and any(row["engine"] in engines for row in file["rows"]):
            lines.append(f"- † {WORDS['elsewhere']}{file['source']}")
    return ["", *lines] if lines else []


def caption(group: Group) -> list[str]:
    """Return the heading of a group, and how it was measured."""
    where = group.own[-1]["environment"]
    version = where["versions"].get("six engines")
    made = f"{f'Version {version}, commit' if version else 'Commit'} `{where['commit'][:10]}`, {where['date'][:10]}"
    made += f", torch {where['versions']['torch']}."
    made = f"{made} {group.why_apart}".rstrip()
    return [f"**{group.model}** in {group.dtype} on {group.device}", "", made, ""]
