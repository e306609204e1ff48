"""The tables of engines: a stage's, a study's, and the overview that a run prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engines import ENGINES
from benchmarks.groups import Group
from benchmarks.results import LEAST_REPEATS
from benchmarks.text import against_floor, markdown, number, spread, times

STAGE_PACKAGES = list(dict.fromkeys(e.package for e in ENGINES if e.package.startswith("stage_")))


@dataclass(frozen=True)
class Column:
    """A column of a table of engines: one figure of one workload."""

    heading: str
    workload: str
    figure: str
    of_floor: bool = False  # show how far it is from the floor, and not the figure

    def cell(self, group: Group, engine: str, ranges: bool) -> str:
        median = group.median(engine, self.workload, self.figure)
        if self.of_floor:
            return against_floor(self.figure, median, group.floor(self.workload, self.figure))
        return spread(group.values(engine, self.workload, self.figure)) if ranges else number(median)


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
        "too_long": "{}: not run, because serving it once would take longer than the limit of {} s (estimated: {})",
        "seconds": "{} {:,} s",
    },
    "zh": {
        "work": ["单个请求", "批处理", "高负载", "共享前缀", "首个 token"], "comma": "，", "colon": "：",
        "not_run": "没有运行：", "error": "失败：",
        "first": "{}，{}：进程第一次处理这些长度的请求时 {} 毫秒/token，此后 {} 毫秒/token",
        "elsewhere": "在别处测量，负载相同：",
        "too_long": "{}：没有运行，因为完成一遍会超过上限 {} 秒（估计：{}）", "seconds": "{} {:,} 秒",
    },
}  # fmt: skip
TOO_LONG = re.compile(r"would take about (\d+) s.*; the limit was (\d+) s")  # what `measure.py` says of a round
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


def overview(group: Group) -> list[str]:
    """The table that compares the engines at a glance."""
    ttft = group.workloads["ttft"]["floor"] if "ttft" in group.workloads else {}
    columns = [START, STEP, FAR, BATCH, LOAD, LOAD_SHARE, PREFIX]
    columns += [Column(f"first token of {figure.split('_')[1]}: ms", "ttft", figure) for figure in ttft]
    return table(group, group.engines, [column for column in columns if column.workload in group.workloads])


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
    columns = [c for c in STAGE_COLUMNS[package] if c.workload in group.workloads]
    if not any(group.values(engine, LAUNCHES.workload, LAUNCHES.figure) for engine in engines):  # not a GPU
        columns = [c for c in columns if c is not LAUNCHES]
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
    first, *_ = group.engines
    columns, body = [column for column in (STEP, BATCH, LOAD) if column.workload in group.workloads], []
    for engine in group.engines:
        cells, single = [engine], group.rows.get((engine, "single"), {})
        for c in columns:
            factor = gain(group, engine, c, first)
            cells.append(spread(group.values(engine, c.workload, c.figure)) + (f", {factor}" if factor != "–" else ""))
        prefill = number(group.median(engine, "single", "prefill_ms"))
        counts = single.get("launches")
        counted = f"{counts['kernels']:.0f}, {counts['launches']:.0f}" if counts else "–"
        body.append([*cells, f"{prefill} ({number(single.get('first_prefill_ms'))})", counted])
    heads = ["", *(f"{column.heading}, and × *{first}*" for column in columns)]
    heads += ["prefill, ms (the process's first)", "kernels run, and launches by the CPU, per step"]
    below = notes(group, group.engines, [column.workload for column in columns])
    return [*caption(group), *markdown(heads, body), *launch_cost(group), *below, ""]


def table(group: Group, engines: Sequence[str], columns: Sequence[Column], ranges: bool = False) -> list[str]:
    """One row per engine, the floor first, and below what was not run and what was measured elsewhere."""
    floors = [group.floor(c.workload, c.figure) for c in columns]
    cells = ["1 ×" if c.of_floor else number(floor) if floor else "" for c, floor in zip(columns, floors, strict=True)]
    rows = [["*floor*", *cells]]
    for engine in engines:
        name = f"*{engine}* †" if engine in group.elsewhere else engine
        rows.append([name, *(column.cell(group, engine, ranges) for column in columns)])
    below = notes(group, engines, [column.workload for column in columns])
    return markdown(["engine", *(column.heading for column in columns)], rows) + below


def notes(group: Group, engines: Sequence[str], workloads: Sequence[str], language: str = "en") -> list[str]:
    """Why there is a dash, what a dagger means, and the first visit where it was much slower than the second."""
    words, lines, work = NOTES[language], [], dict(zip(WORDS, NOTES[language]["work"], strict=True))
    reasons: dict[tuple[str, str], list[str]] = {}
    too_long: dict[tuple[str, str], list[str]] = {}  # by workload and limit
    for (engine, name), row in sorted(group.rows.items(), key=lambda item: group.engines.index(item[0][0])):
        if engine not in engines or name not in workloads:
            continue
        for outcome in ("not_run", "error"):
            if outcome in row and not row["samples"]:
                reason = row[outcome].splitlines()[0]
                if match := TOO_LONG.match(reason):
                    engine_seconds = words["seconds"].format(engine, int(match[1]))
                    too_long.setdefault((work[name], match[2]), []).append(engine_seconds)
                else:
                    reasons.setdefault((engine, words[outcome] + reason), []).append(work[name])
        first, again = (row.get("first_visit") or {}).get("tpot_ms"), group.median(engine, name, "tpot_ms")
        if first and again and first > 1.5 * again:
            lines.append("- " + words["first"].format(engine, work[name], number(first), number(again)))
    for (engine, text), names in reasons.items():
        some = names if len(names) < len(work) else []  # else all of them
        lines.append("- " + words["comma"].join([engine, *some]) + words["colon"] + text)
    lines += ["- " + words["too_long"].format(*key, words["comma"].join(those)) for key, those in too_long.items()]
    for file in group.files:
        if file["kind"] == "elsewhere" and any(row["engine"] in engines for row in file["rows"]):
            lines.append(f"- † {words['elsewhere']}{file.get(f'source_{language}', file['source'])}")
    return ["", *lines] if lines else []


def caption(group: Group) -> list[str]:
    """The heading of a group and what it was measured with; and, where it is no table by our rules, that."""
    where = group.own[-1]["environment"]
    commits = ", ".join(dict.fromkeys(f"`{f['environment']['commit'][:10]}`" for f in group.own))
    text = f"Commit {commits}, {where['date'][:10]}, torch {where['versions']['torch']}."
    if group.problem:
        why = f"commits are mixed, the work has changed since, or rows have fewer than {LEAST_REPEATS} repeats"
        text = f"To be measured again: {why}. {text}"
    return [f"**{group.model}** in {group.dtype} on {group.device}", "", text, ""]
