"""From results files to Markdown.

Files of one size, model, device and dtype make one group. Where the same engine was measured on the same workload in
two of them, the newer figure counts, so that a single engine can be measured again without the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.engines import ENGINES
from benchmarks.workloads import SIZES, workload_names

STAGE_PACKAGES = list(dict.fromkeys(e.package for e in ENGINES if e.package.startswith("stage_")))


@dataclass(frozen=True)
class Group:
    """Comparable measurements: same size, model, device and dtype."""

    size: str
    model: str
    device: str
    dtype: str
    files: tuple[dict, ...]  # oldest first

    @property
    def newest(self) -> dict:
        return self.files[-1]

    @property
    def slug(self) -> str:
        text = f"{self.size}-{self.model.removeprefix('random:')}-{self.device}".lower()
        return "-".join("".join(c if c.isalnum() or c == "." else " " for c in text).split())

    def workload(self, name: str) -> dict | None:
        """Hash, description and floors of a workload, as the newest file that has it says."""
        return next((f["workloads"][name] for f in reversed(self.files) if name in f["workloads"]), None)

    @property
    def rows(self) -> dict[tuple[str, str], dict]:
        """(engine, workload) -> the newest row."""
        return {(row["engine"], row["workload"]): row for payload in self.files for row in payload["rows"]}

    @property
    def engines(self) -> list[str]:
        """Names in table order; rows with options of their own stand after the engine that they vary."""
        order = {engine.name: place for place, engine in enumerate(ENGINES)}
        names = dict.fromkeys(engine for engine, _ in self.rows)
        return sorted(names, key=lambda name: (order.get(name.partition("[")[0], len(order)), name))


def group_results(files: Sequence[dict]) -> list[Group]:
    """Groups of `engines` files, GPU before CPU."""
    keys: dict[tuple[str, str, str, str], list[dict]] = {}
    for payload in sorted(files, key=lambda payload: payload["environment"]["date"]):
        device = payload["environment"]["device"]["name"]
        keys.setdefault((payload["size"], payload["model"], device, payload["dtype"]), []).append(payload)
    groups = [Group(*key, tuple(found)) for key, found in keys.items()]
    return sorted(groups, key=lambda g: (-SIZES.index(g.size), g.device, g.model))


def number(value: float) -> str:
    """Three significant digits, and whole numbers from 100 on."""
    if value == 0:
        return "0"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _median(row: dict, figure: str) -> str:
    return number(row["figures"][figure]["median"])


def _with_spread(row: dict, figure: str) -> str:
    summary = row["figures"][figure]
    if summary["samples"] == 1:
        return number(summary["median"])
    return f"{number(summary['median'])} ({number(summary['min'])}–{number(summary['max'])})"


def _percent(row: dict, figure: str) -> str:
    share = row["figures"][figure].get("percent_of_floor")
    return "–" if share is None else f"{share:.1f} %"


def _memory(row: dict) -> str:
    return f"{row['peak_memory']['bytes'] / 2**30:.2f}"


Cell = Callable[[dict, str], str]


def overview_columns(group: Group) -> list[tuple[str, str, str, Cell]]:
    """(heading, workload, figure, cell) of the table that compares the engines at a glance."""
    columns: list[tuple[str, str, str, Cell]] = [
        ("single: prefill, ms", "single", "prefill_ms", _median),
        ("single: ms a token", "single", "tpot_ms", _median),
        ("% of floor", "single", "tpot_ms", _percent),
        ("decode32: tokens/s", "decode32", "output_tokens_per_s", _median),
        ("mixed: tokens/s", "mixed", "output_tokens_per_s", _median),
        ("% of floor", "mixed", "output_tokens_per_s", _percent),
        ("prefix: s", "prefix", "seconds", _median),
    ]
    for figure in (group.workload("ttft") or {"floor": {}})["floor"]:
        columns.append((f"TTFT of {figure.split('_')[1]}, ms", "ttft", figure, _median))
    return [column for column in columns if group.workload(column[1])]


def overview(group: Group, engines: Sequence[str], spread: bool = False) -> list[str]:
    """The lines of a table with one row an engine, the floor first, and what was not run below."""
    columns = overview_columns(group)
    memory_at = "single" if group.workload("single") else columns[0][1]
    lines = ["| engine | " + " | ".join(heading for heading, *_ in columns) + f" | memory in {memory_at}, GiB |"]
    lines.append("|---|" + "---:|" * (len(columns) + 1))
    floor = []
    for _, name, figure, cell in columns:
        best = group.workload(name)["floor"].get(figure)
        floor.append("" if best is None else "100 %" if cell is _percent else number(best))
    lines.append("| *floor* | " + " | ".join(floor) + " | |")
    rows = group.rows
    for engine in engines:
        cells = []
        for _, name, figure, cell in columns:
            row = rows.get((engine, name), {})
            shown = _with_spread if spread and cell is _median else cell
            cells.append(shown(row, figure) if figure in row.get("figures", {}) else "–")
        row = rows.get((engine, memory_at), {})
        lines.append(f"| {engine} | " + " | ".join(cells) + f" | {_memory(row) if 'figures' in row else '–'} |")
    return lines + left_out(group, engines)


def left_out(group: Group, engines: Sequence[str]) -> list[str]:
    """Why there is a dash, where there is one."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for (engine, name), row in group.rows.items():
        for outcome, words in (("not_run", "not run"), ("error", "failed")):
            if engine in engines and outcome in row:
                text = f"{words}: {row[outcome].splitlines()[0]}"
                reasons.setdefault((engine, text), []).append(name)
    lines = [f"- {engine}, {', '.join(names)}: {text}" for (engine, text), names in reasons.items()]
    return ["", *lines] if lines else []


def details(group: Group, name: str) -> list[str]:
    """The lines of one workload's table.

    A figure is shown as median (least–most), with its share of the floor where it has one; then peak memory and the
    number of samples.
    """
    rows = [(engine, group.rows.get((engine, name))) for engine in group.engines]
    figures = list(dict.fromkeys(figure for _, row in rows if row for figure in row.get("figures", {})))
    workload = group.workload(name)
    lines = [f"**{name}**: {workload['description']}. Hash `{workload['hash'][:12]}`.", ""]
    if not figures:
        return lines
    lines.append("| engine | " + " | ".join(map(_heading, figures)) + " | peak memory, GiB | samples |")
    lines.append("|---|" + "---:|" * (len(figures) + 2))
    floor = [number(workload["floor"][figure]) if figure in workload["floor"] else "" for figure in figures]
    lines.append("| *floor* | " + " | ".join(floor) + " | | |")
    for engine, row in rows:
        if row is None or "figures" not in row:
            continue
        cells = []
        for figure in figures:
            summary = row["figures"].get(figure)
            share = f", {_percent(row, figure)}" if summary and "percent_of_floor" in summary else ""
            cells.append(_with_spread(row, figure) + share if summary else "–")
        lines.append(f"| {engine} | " + " | ".join(cells) + f" | {_memory(row)} | {len(row['samples'])} |")
    return lines


def _heading(figure: str) -> str:
    words = figure.replace("_per_s", "/s").removesuffix("_ms").replace("_", " ")
    return f"{words}, ms" if figure.endswith("_ms") else words.replace("seconds", "s")


def caption(group: Group) -> list[str]:
    """The heading of a group and what it was measured with."""
    where = group.newest["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    commits = dict.fromkeys(
        f"`{f['environment']['commit'][:10]}`{' (changed)' if f['environment']['dirty'] else ''}, "
        f"{f['environment']['date'][:10]}"
        for f in group.files
    )
    top = group.newest["ceilings"]
    return [
        f"**{group.model}** in {group.dtype} on {group.device}, size `{group.size}`",
        "",
        f"Commit {'; '.join(commits)}. {versions}. Measured there: copies "
        f"{number(top['copy_bytes_per_s'] / 1e9)} GB/s, matrix products "
        f"{number(top['matmul_operations_per_s'] / 1e12)} TFLOP/s.",
        "",
    ]


def all_details(group: Group) -> list[str]:
    lines = caption(group)
    for name in workload_names():
        if group.workload(name):
            lines += [*details(group, name), ""]
    return lines + left_out(group, group.engines)
