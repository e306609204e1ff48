"""From engine results to tables.

Files of one size, model, device, dtype and study make one group, which is one table: the same row in two files of one
commit is one row with the samples of both. Figures measured elsewhere on the same workloads stand below, marked.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.engines import ENGINES
from benchmarks.results import LEAST_REPEATS, load_all, mixture
from benchmarks.workloads import SIZES, make_workload, workload_names

STAGE_PACKAGES = list(dict.fromkeys(e.package for e in ENGINES if e.package.startswith("stage_")))


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
                found[row["engine"], row["workload"]] = (
                    before
                    | row
                    | {
                        "samples": before.get("samples", []) + samples,
                        "startup_seconds": before.get("startup_seconds", []) + row.get("startup_seconds", []),
                    }
                )
        return found

    @cached_property
    def engines(self) -> list[str]:
        """Names in table order; rows with options of their own after the engine that they vary, others' at the end.

        In a study, the order in which they were measured first.
        """
        order = {engine.name: place for place, engine in enumerate(ENGINES)}
        elsewhere = {row["engine"] for file in self.files if file["kind"] == "elsewhere" for row in file["rows"]}
        names = dict.fromkeys(engine for engine, _ in self.rows)
        if self.study:
            return list(names)
        return sorted(names, key=lambda n: (n in elsewhere, order.get(n.partition("[")[0], len(order)), len(n), n))

    def is_elsewhere(self, engine: str) -> bool:
        return any(row["engine"] == engine for f in self.files if f["kind"] == "elsewhere" for row in f["rows"])

    def values(self, engine: str, workload: str, figure: str) -> list[float]:
        """Every sample of a figure, in the order in which they were taken; empty where there is none."""
        row = self.rows.get((engine, workload), {})
        if figure == "startup_seconds":
            return row.get("startup_seconds", [])
        return [sample[figure] for sample in row.get("samples", []) if figure in sample]

    def median(self, engine: str, workload: str, figure: str) -> float | None:
        values = self.values(engine, workload, figure)
        return statistics.median(values) if values else None

    def floor(self, workload: str, figure: str) -> float | None:
        return (self.workload(workload) or {"floor": {}})["floor"].get(figure)

    def problem(self) -> str:
        """Why this may not be a table: commits mixed, a changed tree, too few repeats, other work. Empty if it may."""
        found, few = [mixture(self.own)], {}
        for (engine, name), row in self.rows.items():
            repeats = len({(sample["file"], sample["repeat"]) for sample in row["samples"] if "repeat" in sample})
            if row["samples"] and repeats < LEAST_REPEATS and not self.is_elsewhere(engine):
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
    """Groups of files of the kinds `engines` and `elsewhere`, GPU before CPU, larger tables first."""
    keys: dict[tuple[str, ...], list[dict]] = {}
    for payload in sorted(files, key=lambda payload: payload["environment"]["date"]):
        options = payload["options"]
        device, study = payload["environment"]["device"]["name"], options.get("study") or ""
        key = (options["size"], options["model"], device, options["dtype"], study)
        keys.setdefault(key, []).append(payload)
    groups = [Group(*key, tuple(found)) for key, found in keys.items()]
    with_own = [group for group in groups if group.own]
    return sorted(with_own, key=lambda g: (-SIZES.index(g.size), g.device, g.model, g.study))


def recorded_groups() -> list[Group]:
    """The committed measurements of the engines; those of no study first, GPU before CPU."""
    groups = group_results(file for file in load_all() if file["kind"] in ("engines", "elsewhere"))
    return sorted(groups, key=lambda group: group.study)


def number(value: float | None) -> str:
    """Three significant digits, and whole numbers from 100 on; a dash for nothing."""
    if value is None:
        return "–"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def against_floor(figure: str, value: float | None, floor: float | None) -> str:
    """How far from the floor: `2.3 ×` for a time, a share for a rate."""
    if value is None or floor is None:
        return "–"
    return f"{100 * value / floor:.1f} %" if figure.endswith("_per_s") else f"{number(value / floor)} ×"


def spread(values: Sequence[float]) -> str:
    """Median, and the range where there are several."""
    if not values:
        return "–"
    median = number(statistics.median(values))
    return median if len(values) == 1 else f"{median} ({number(min(values))}–{number(max(values))})"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table; all columns but the first aligned to the right."""
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


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


START, STEP, FAR = (Column("start-up, s", "single", "startup_seconds"),
                    Column("single: ms per token", "single", "tpot_ms"),
                    Column("× the floor", "single", "tpot_ms", of_floor=True))  # fmt: skip
BATCH, LOAD = (
    Column("decode32: ms per step", "decode32", "step_ms"),
    Column("mixed: tokens/s", "mixed", "output_tokens_per_s"),
)
LOAD_SHARE = Column("of the floor's", "mixed", "output_tokens_per_s", of_floor=True)
PREFIX = Column("prefix: s", "prefix", "seconds")
# What a stage's lesson is about; at most five columns with the engine's.
STAGE_COLUMNS = {
    "stage_a_naive": (START, STEP, FAR, LOAD), "stage_b_decode_step": (START, STEP, FAR, LOAD),
    "stage_c_fused_mlp": (START, STEP, FAR, LOAD), "stage_d_paged": (STEP, BATCH, LOAD, PREFIX),
    "stage_e_batching": (STEP, BATCH, LOAD, LOAD_SHARE), "stage_f_graph_tp": (STEP, FAR, LOAD, LOAD_SHARE),
}  # fmt: skip
FRONT_ROWS = ("transformers", "A", "B", "B compiled", "C", "C compiled", "D", "E", "F")
BEFORE = {"B": "A", "B compiled": "B", "C": "B", "C compiled": "B compiled", "D": "C", "E": "D", "F": "E"}
FRONT_TEXT = {  # language: the heads, and what each row adds
    "en": (("stage", "adds", "ms per token, one request", "tokens/s under load", "× the stage before"), {
        "transformers": "(`generate` of the library, for comparison)",
        "A": "prefill and decode with a KV cache",
        "B": "static cache, SDPA, fewer synchronisations",
        "B compiled": "`torch.compile`",
        "C": "the MLP as one CUDA kernel",
        "C compiled": "`torch.compile`",
        "D": "a model of our own, paged KV cache, batches",
        "E": "continuous batching",
        "F": "CUDA graphs, overlap, fused kernels",
        "elsewhere": "(measured elsewhere, same workload)",
        "floor": "(weights and KV cache read once)",
    }),
    "zh": (("阶段", "增加了什么", "单个请求，毫秒/token", "高负载，token/秒", "× 前一阶段"), {
        "transformers": "（库自带的 `generate`，作对比）",
        "A": "带 KV cache 的预填充与解码",
        "B": "静态缓存、SDPA、更少的同步",
        "B compiled": "`torch.compile`",
        "C": "MLP 融合成一个 CUDA kernel",
        "C compiled": "`torch.compile`",
        "D": "自己写的模型、分页 KV cache、批处理",
        "E": "连续批处理",
        "F": "CUDA graph、重叠调度、融合 kernel",
        "elsewhere": "（在别处测量，负载相同）",
        "floor": "（权重与 KV cache 各读一次）",
    }),
}  # fmt: skip


def overview_columns(group: Group) -> list[Column]:
    """The table that compares the engines at a glance."""
    ttft = (group.workload("ttft") or {"floor": {}})["floor"]
    columns = [START, STEP, FAR, BATCH, LOAD, LOAD_SHARE, PREFIX]
    columns += [Column(f"TTFT of {figure.split('_')[1]}, ms", "ttft", figure) for figure in ttft]
    return [column for column in columns if group.workload(column.workload)]


def front_rows(group: Group) -> list[str]:
    """The engines of the front page: the stages, and what was measured elsewhere."""
    return [engine for engine in group.engines if engine in FRONT_ROWS or group.is_elsewhere(engine)]


def times(factor: float) -> str:
    return f"{factor:.0f} ×" if factor >= 9.95 else f"{factor:.1f} ×"


def gain(group: Group, engine: str, column: Column) -> str:
    """How many times as fast as the stage before, eager against eager and compiled against compiled."""
    value = group.median(engine, column.workload, column.figure)
    base = group.median(BEFORE.get(engine, ""), column.workload, column.figure)
    if not value or not base:
        return "–"
    return times(value / base if column.figure.endswith("_per_s") else base / value)


def front_table(group: Group, language: str) -> list[str]:
    """Stage, what it adds, one request, load, and both against the stage before."""
    (heads, adds_of), body = FRONT_TEXT[language], []
    for engine in front_rows(group):
        elsewhere = group.is_elsewhere(engine)
        values = [number(group.median(engine, c.workload, c.figure)) for c in (STEP, LOAD)]
        gains = " · ".join(gain(group, engine, c) for c in (STEP, LOAD)) if engine in BEFORE else ""
        adds = adds_of["elsewhere" if elsewhere else engine]
        body.append([f"*{engine}* †" if elsewhere else engine, adds, *values, gains])
    floor = [number(group.floor(c.workload, c.figure)) for c in (STEP, LOAD)]
    body.append(["*floor*", adds_of["floor"], *floor, ""])
    lines = markdown(heads, body)
    return [lines[0], "|---|---|---:|---:|---:|", *lines[2:], *notes(group, front_rows(group), ("single", "mixed"))]


def stage_table(group: Group, package: str, before: str | None) -> list[str]:
    """The rows of a stage, with those of its variants, and of the stage before, with the range of the samples."""
    packages = {engine: row["package"] for (engine, _), row in group.rows.items() if "package" in row}
    engines = [
        engine for engine in group.engines
        if packages.get(engine) == package or (packages.get(engine) == before and "[" not in engine)
    ]  # fmt: skip
    if package not in (packages.get(engine) for engine in engines):
        return []
    columns = [column for column in STAGE_COLUMNS[package] if group.workload(column.workload)]
    return [*caption(group), *table(group, engines, columns, ranges=True), ""]


def study_table(group: Group) -> list[str]:
    """The rows of a study in its order, each figure with its factor against the first row."""
    first, single = group.engines[0], {e: group.rows.get((e, "single"), {}) for e in group.engines}
    columns = [column for column in (STEP, LOAD) if group.workload(column.workload)]
    is_counted = any("launches" in row for row in single.values())
    last = "kernels, launches per step" if is_counted else "start-up, s"
    heads = ["", *(f"{column.heading}, × {first}" for column in columns), "prefill, ms (the first)", last]
    body = []
    for engine in group.engines:
        cells = [engine]
        for c in columns:
            value, base = (group.median(e, c.workload, c.figure) for e in (engine, first))
            factor = "" if not value else f", {value / base if c.figure.endswith('_per_s') else base / value:.2f} ×"
            cells.append(spread(group.values(engine, c.workload, c.figure)) + factor)
        prefill = number(group.median(engine, "single", "prefill_ms"))
        cells.append(f"{prefill} ({number(single[engine].get('first_prefill_ms'))})")
        counts = single[engine].get("launches")
        counted = f"{counts['kernels']:.0f}, {counts['launches']:.0f}" if counts else "–"
        cells.append(counted if is_counted else number(group.median(engine, "single", "startup_seconds")))
        body.append(cells)
    lines, costs = markdown(heads, body), group.own[-1].get("launch_seconds")
    if costs and is_counted:
        lines += ["", f"A kernel launched from Python takes {1e6 * costs['alone']:.2f} µs here, one inside a graph "
                  f"{1e6 * costs['in_graph']:.2f} µs, even if it does nothing."]  # fmt: skip
    return [*caption(group), *lines, *notes(group, group.engines), ""]


def table(group: Group, engines: Sequence[str], columns: Sequence[Column], ranges: bool = False) -> list[str]:
    """One row per engine, the floor first, and below what was not run and what was measured elsewhere."""
    show = spread if ranges else lambda values: number(statistics.median(values) if values else None)
    floor = [number(group.floor(c.workload, c.figure)) if not c.of_floor else "1 ×" for c in columns]
    rows = [["*floor*", *("" if cell == "–" else cell for cell in floor)]]
    for engine in engines:
        name = f"*{engine}* †" if group.is_elsewhere(engine) else engine
        rows.append([name, *(column.cell(group, engine, show) for column in columns)])
    return markdown(["engine", *(column.heading for column in columns)], rows) + notes(group, engines)


def notes(group: Group, engines: Sequence[str], workloads: Sequence[str] = ()) -> list[str]:
    """Why there is a dash, what a dagger means, and the first visit where it was much slower than the second."""
    reasons: dict[tuple[str, str], list[str]] = {}
    lines = []
    for (engine, name), row in group.rows.items():
        if engine not in engines or name not in (workloads or (name,)):
            continue
        for outcome, words in (("not_run", "not run"), ("error", "failed")):
            if outcome in row and not row["samples"]:
                reasons.setdefault((engine, f"{words}: {row[outcome].splitlines()[0]}"), []).append(name)
        first, again = (row.get("first_visit") or {}).get("tpot_ms"), group.median(engine, name, "tpot_ms")
        if first and again and first > 1.5 * again:
            lines.append(f"- {engine}, {name}: {number(again)} ms per token at lengths that came up before, "
                         f"{number(first)} ms at their first visit")  # fmt: skip
    lines += [f"- {engine}, {', '.join(names)}: {text}" for (engine, text), names in reasons.items()]
    for file in group.files:
        if file["kind"] == "elsewhere" and any(row["engine"] in engines for row in file["rows"]):
            lines.append(f"- † measured elsewhere, same workload: {file['source']}")
    return ["", *lines] if lines else []


def details(group: Group, name: str) -> list[str]:
    """One workload's every figure: median (least–most), how far from the floor, peak memory, number of samples."""
    workload = group.workload(name)
    keys = [(engine, group.rows[engine, name]) for engine in group.engines if (engine, name) in group.rows]
    skip = ("repeat", "file")
    figures = [f for f in dict.fromkeys(f for _, row in keys for s in row["samples"] for f in s) if f not in skip]
    head = f"<details><summary>{name}: {workload['description']}</summary>"
    lines = [head, "", f"Hash `{workload['hash'][:12]}`.", ""]
    heads = ["engine", *map(_heading, figures), "peak memory, GiB", "samples"]
    rows: list[list[object]] = [["*floor*", *(number(group.floor(name, f)) for f in figures), "", ""]]
    for engine, row in keys:
        if not row["samples"]:
            continue
        cells = []
        for figure in figures:
            far = against_floor(figure, group.median(engine, name, figure), group.floor(name, figure))
            cells.append(spread(group.values(engine, name, figure)) + (f", {far}" if far != "–" else ""))
        memory = f"{row['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in row else ""
        dagger = "*{}* †" if group.is_elsewhere(engine) else "{}"
        rows.append([dagger.format(engine), *cells, memory, len(row["samples"]) if memory else ""])
    return lines + markdown(heads, rows) + ["", "</details>", ""]


def _heading(figure: str) -> str:
    words = figure.replace("_per_s", "/s").removesuffix("_ms").replace("_", " ")
    return f"{words}, ms" if figure.endswith("_ms") else words.replace("seconds", "s")


def caption(group: Group, full: bool = False) -> list[str]:
    """The heading of a group and what it was measured with; and, where it is no table by our rules, that."""
    newest = group.own[-1]
    where, top = newest["environment"], newest["ceilings"]
    commits = dict.fromkeys(f["environment"]["commit"][:10] for f in group.own)
    found = [
        f"{name} {version}" for name, version in where["versions"].items() if version and (full or name == "torch")
    ]
    rates = (
        f" Measured there: copies {number(top['copy_bytes_per_s'] / 1e9)} GB/s, matrix products "
        f"{number(top['matmul_operations_per_s'] / 1e12)} TFLOP/s."
    )
    again = (
        "To be measured again: commits are mixed, or rows have fewer than three repeats. " if group.problem() else ""
    )
    return [
        f"**{group.model}** in {group.dtype} on {group.device}",
        "",
        f"{again}Commit {', '.join(f'`{commit}`' for commit in commits)}, {where['date'][:10]}, {', '.join(found)}."
        + (rates if full else ""),
        "",
    ]


def all_details(group: Group) -> list[str]:
    names = [name for name in workload_names() if group.workload(name)]
    tables = [line for name in names for line in details(group, name)]
    return caption(group, full=True) + tables + notes(group, group.engines)
