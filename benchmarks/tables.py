"""The tables of engines: a stage's, a study's, the overview that a run prints, and every figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.engines import ENGINES
from benchmarks.groups import Group
from benchmarks.results import LEAST_REPEATS
from benchmarks.text import against_floor, markdown, number, spread, times
from benchmarks.workloads import workload_names

STAGE_PACKAGES = list(dict.fromkeys(e.package for e in ENGINES if e.package.startswith("stage_")))


@dataclass(frozen=True)
class Column:
    """A column of a table of engines: one figure of one workload."""

    heading: str
    workload: str
    figure: str
    of_floor: bool = False  # show how far it is from the floor, and not the figure

    def cell(self, group: Group, engine: str, show: Callable[[Sequence[float]], str]) -> str:
        values = group.values(engine, self.workload, self.figure)
        if self.of_floor:
            floor = group.floor(self.workload, self.figure)
            return against_floor(self.figure, statistics.median(values) if values else None, floor)
        return show(values)


# What a table calls a workload.
WORDS = {
    "single": "one request", "decode32": "batch", "mixed": "load", "prefix": "shared prefix", "ttft": "first token",
}  # fmt: skip
NOTES = {  # what stands below a table, by language
    "en": {
        "work": list(WORDS.values()), "comma": ", ", "colon": ": ", "not_run": "not run: ", "error": "failed: ",
        "first": "{}, {}: {} ms per token the first time that a process serves requests of these lengths, "
                 "{} ms from then on",
        "elsewhere": "measured elsewhere, same workload: ",
    },
    "zh": {
        "work": ["单个请求", "批处理", "高负载", "共享前缀", "首个 token"], "comma": "，", "colon": "：",
        "not_run": "没有运行：", "error": "失败：",
        "first": "{}，{}：进程第一次处理这些长度的请求时 {} 毫秒/token，此后 {} 毫秒/token",
        "elsewhere": "在别处测量，负载相同：",
    },
}  # fmt: skip
START = Column("start-up, s", "single", "startup_seconds")
STEP = Column("one request: ms per token", "single", "tpot_ms")
FAR = Column("× the floor", "single", "tpot_ms", of_floor=True)
LAUNCHES = Column("kernel launches per step", "single", "launches")
BATCH = Column("batch: ms per step", "decode32", "step_ms")
LOAD = Column("load: tokens/s", "mixed", "output_tokens_per_s")
LOAD_SHARE = Column("of the floor's tokens/s", "mixed", "output_tokens_per_s", of_floor=True)
PREFIX = Column("shared prefix: s", "prefix", "seconds")
# What a stage's lesson is about; at most five columns with the engine's.
STAGE_COLUMNS = {
    "stage_a_naive": (STEP, FAR, LAUNCHES), "stage_b_decode_step": (STEP, FAR, LAUNCHES, START),
    "stage_c_fused_mlp": (STEP, FAR, LAUNCHES, START), "stage_d_paged": (STEP, BATCH, LOAD, PREFIX),
    "stage_e_batching": (STEP, BATCH, LOAD, LOAD_SHARE), "stage_f_graph_tp": (STEP, FAR, LOAD, LOAD_SHARE),
}  # fmt: skip
BEFORE = {"B": "A", "B compiled": "B", "C": "B", "C compiled": "B compiled", "D": "C", "E": "D", "F": "E"}


def overview_columns(group: Group) -> list[Column]:
    """The table that compares the engines at a glance."""
    ttft = (group.workload("ttft") or {"floor": {}})["floor"]
    columns = [START, STEP, FAR, BATCH, LOAD, LOAD_SHARE, PREFIX]
    columns += [Column(f"first token of {figure.split('_')[1]}: ms", "ttft", figure) for figure in ttft]
    return [column for column in columns if group.workload(column.workload)]


def overview_table(group: Group) -> list[str]:
    """Every engine of a group at a glance."""
    return [*caption(group), *table(group, group.engines, overview_columns(group)), ""]


def gain(group: Group, engine: str, column: Column, before: str = "") -> str:
    """How many times as fast as another engine; by default the stage before, eager or compiled as this one is."""
    value = group.median(engine, column.workload, column.figure)
    base = group.median(before or BEFORE.get(engine, ""), column.workload, column.figure)
    if not value or not base:
        return "–"
    return times(value / base if column.figure.endswith("_per_s") else base / value)


def stage_table(group: Group, package: str, before: str | None) -> list[str]:
    """The rows of a stage, with those of its variants, and of the stage before, with the range of the samples.

    Nothing where the stage before was not measured: there is no comparison then.
    """
    packages = {engine: row["package"] for (engine, _), row in group.rows.items() if "package" in row}
    engines = [
        engine for engine in group.engines
        if packages.get(engine) == package or (before and packages.get(engine) == before and "[" not in engine)
    ]  # fmt: skip
    if not {package, before} - {None} <= {packages.get(engine) for engine in engines}:
        return []
    counted = any(group.values(engine, "single", "launches") for engine in engines)  # on a GPU
    columns = [c for c in STAGE_COLUMNS[package] if group.workload(c.workload) and (counted or c is not LAUNCHES)]
    engines = [engine for engine in engines if any(group.values(engine, c.workload, c.figure) for c in columns)]
    cost = launch_cost(group) if LAUNCHES in columns else []
    return [*caption(group), *table(group, engines, columns, ranges=True), *cost, ""]


def launch_cost(group: Group) -> list[str]:
    """Say what a launch costs on the machine of a group; nothing where it was not measured."""
    costs = group.own[-1].get("launch_seconds")
    if not costs:
        return []
    alone, in_graph = 1e6 * costs["alone"], 1e6 * costs["in_graph"]
    return ["", f"On this machine a kernel that does nothing takes {alone:.2f} µs when Python launches it, and "
                f"{in_graph:.2f} µs inside a CUDA graph."]  # fmt: skip


def study_table(group: Group) -> list[str]:
    """The rows of a study in its order, each figure with its factor against the first row."""
    first, single = group.engines[0], {e: group.rows.get((e, "single"), {}) for e in group.engines}
    columns = [column for column in (STEP, LOAD) if group.workload(column.workload)]
    is_counted = any("launches" in row for row in single.values())
    last = "kernels run, and launches by the CPU, per step" if is_counted else "start-up, s"
    body = []
    for engine in group.engines:
        cells = [engine]
        for c in columns:
            factor = gain(group, engine, c, first)
            cells.append(spread(group.values(engine, c.workload, c.figure)) + (f", {factor}" if factor != "–" else ""))
        prefill = number(group.median(engine, "single", "prefill_ms"))
        counts = single[engine].get("launches", {"kernels": 0, "launches": 0})
        counted = f"{counts['kernels']:.0f}, {counts['launches']:.0f}"
        started = number(group.median(engine, "single", "startup_seconds"))
        first_prefill = number(single[engine].get("first_prefill_ms"))
        body.append([*cells, f"{prefill} ({first_prefill})", counted if is_counted else started])
    heads = ["", *(f"{column.heading}, and × *{first}*" for column in columns)]
    heads += ["prefill, ms (the process's first)", last]
    lines = markdown(heads, body) + (launch_cost(group) if is_counted else [])
    return [*caption(group), *lines, *notes(group, group.engines), ""]


def table(group: Group, engines: Sequence[str], columns: Sequence[Column], ranges: bool = False) -> list[str]:
    """One row per engine, the floor first, and below what was not run and what was measured elsewhere."""
    show = spread if ranges else lambda values: number(statistics.median(values) if values else None)
    floor = [number(group.floor(c.workload, c.figure)) if not c.of_floor else "1 ×" for c in columns]
    rows = [["*floor*", *("" if cell == "–" else cell for cell in floor)]]
    for engine in engines:
        name = f"*{engine}* †" if engine in group.elsewhere else engine
        rows.append([name, *(column.cell(group, engine, show) for column in columns)])
    return markdown(["engine", *(column.heading for column in columns)], rows) + notes(group, engines)


def notes(group: Group, engines: Sequence[str], workloads: Sequence[str] = (), language: str = "en") -> list[str]:
    """Why there is a dash, what a dagger means, and the first visit where it was much slower than the second."""
    words, lines, work = NOTES[language], [], dict(zip(WORDS, NOTES[language]["work"], strict=True))
    reasons: dict[tuple[str, str], list[str]] = {}
    for (engine, name), row in sorted(group.rows.items(), key=lambda item: group.engines.index(item[0][0])):
        if engine not in engines or name not in (workloads or (name,)):
            continue
        for outcome in ("not_run", "error"):
            if outcome in row and not row["samples"]:
                reasons.setdefault((engine, f"{words[outcome]}{row[outcome].splitlines()[0]}"), []).append(name)
        first, again = (row.get("first_visit") or {}).get("tpot_ms"), group.median(engine, name, "tpot_ms")
        if first and again and first > 1.5 * again:
            lines.append("- " + words["first"].format(engine, work[name], number(first), number(again)))
    for (engine, text), names in reasons.items():
        some = [work[name] for name in names] if set(names) != set(WORDS) else []  # else all of them
        lines.append("- " + words["comma"].join([engine, *some]) + words["colon"] + text)
    for file in group.files:
        if file["kind"] == "elsewhere" and any(row["engine"] in engines for row in file["rows"]):
            lines.append(f"- † {words['elsewhere']}{file['source']}")
    return ["", *lines] if lines else []


def details(group: Group, name: str) -> list[str]:
    """One workload's every figure: median (least–most), how far from the floor, number of samples."""
    workload = group.workload(name)
    found = {e: group.rows[e, name] for e in group.engines if group.rows.get((e, name), {}).get("samples")}
    figures = dict.fromkeys(figure for row in found.values() for sample in row["samples"] for figure in sample)
    figures = [figure for figure in figures if figure not in ("repeat", "file")]
    summary = f"<details><summary>{WORDS[name]} ({name}): {workload['description']}</summary>"
    lines = [summary, "", f"Hash `{workload['hash'][:12]}`.", ""]
    heads = ["engine", *map(_heading, figures), "samples"]
    rows: list[list[object]] = [["*floor*", *(number(group.floor(name, f)) for f in figures), ""]]
    for engine, row in found.items():
        cells = []
        for figure in figures:
            far = against_floor(figure, group.median(engine, name, figure), group.floor(name, figure))
            cells.append(spread(group.values(engine, name, figure)) + (f", {far}" if far != "–" else ""))
        name, count = (f"*{engine}* †", "") if engine in group.elsewhere else (engine, len(row["samples"]))
        rows.append([name, *cells, count])
    return lines + markdown(heads, rows) + ["", "</details>", ""]


def _heading(figure: str) -> str:
    words = figure.replace("_per_s", "/s").removesuffix("_ms").replace("_", " ")
    words = words.replace("ttft", "TTFT").replace("tpot", "TPOT").replace("seconds", "time, s")
    return f"{words}, ms" if figure.endswith("_ms") else words


def caption(group: Group, full: bool = False) -> list[str]:
    """The heading of a group and what it was measured with; and, where it is no table by our rules, that."""
    where, top = group.own[-1]["environment"], group.own[-1]["ceilings"]
    commits = ", ".join(dict.fromkeys(f"`{f['environment']['commit'][:10]}`" for f in group.own))
    shown = [f"{name} {v}" for name, v in where["versions"].items() if v and (full or name == "torch")]
    text = f"Commit {commits}, {where['date'][:10]}, {', '.join(shown)}."
    if full:
        text += (
            f" Measured there: copies {number(top['copy_bytes_per_s'] / 1e9)} GB/s, matrix products "
            f"{number(top['matmul_operations_per_s'] / 1e12)} TFLOP/s."
        )
    if group.problem:
        why = f"commits are mixed, the work has changed since, or rows have fewer than {LEAST_REPEATS} repeats"
        text = f"To be measured again: {why}. {text}"
    return [f"**{group.model}** in {group.dtype} on {group.device}", "", text, ""]


def all_details(group: Group) -> list[str]:
    """Every workload's table, folded."""
    lines = [line for name in workload_names() if group.workload(name) for line in details(group, name)]
    return caption(group, full=True) + lines + notes(group, group.engines)
