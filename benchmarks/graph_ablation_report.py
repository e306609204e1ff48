"""The tables of stage F's README, made from measured files and never typed."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.floor import percent_of_floor
from benchmarks.markers import fill_file
from benchmarks.results import RESULTS_DIRECTORY, ResultsError, load_results
from benchmarks.workloads import make_workload

KIND = "graph_ablation"
README = ROOT / "stage_f_graph_tp" / "README.md"
MARKERS = ("ablation-f", "tp")
COMMANDS = {
    "ablation-f": "python -m benchmarks.graph_ablation",
    "tp": "python -m benchmarks.graph_ablation --tensor-parallel-size 2",
}
# The figure of each workload that is shown.
FIGURES = {"single": "tpot_ms", "mixed": "output_tokens_per_s"}


def report(directory: Path = RESULTS_DIRECTORY, readme: Path = README) -> None:
    """Write all results of this kind between the README's markers.

    Raises:
        ResultsError: a file that must not be shown, or a README without the markers.
    """
    found: dict[str, list[str]] = {marker: [] for marker in MARKERS}
    for path in sorted(directory.glob("graph-ablation-*.json")):
        payload = load_results(path)
        for name, workload in payload["workloads"].items():
            if workload["hash"] != make_workload(name, payload["size"]).hash:
                raise ResultsError(f"{path.name}: the work of {name!r} is not today's; measure again")
        for marker, lines in tables(payload).items():
            found[marker] += lines
    fill_file(readme, {
        marker: "\n".join(lines).strip() or f"No results files yet: run `{COMMANDS[marker]}`."
        for marker, lines in found.items()
    })  # fmt: skip


def tables(payload: dict) -> dict[str, list[str]]:
    """The lines for each marker."""
    return {"ablation-f": _ablation(payload), "tp": _ranks(payload)}


def _ablation(payload: dict) -> list[str]:
    rows = [row for row in payload["rows"] if row["ranks"] == 1]
    if len(rows) < 2:  # measured for the ranks' sake: nothing is switched off
        return []
    slowest = next((row for row in rows if row["name"] == "none of them"), None)
    heads = ["", "kernels a step", "orders a step", *_columns(payload, "single"), *_columns(payload, "mixed")]
    lines = [*_caption(payload), "", _line(heads), "|---" * len(heads) + "|"]
    for row in rows:
        launches = row["launches"]
        counts = [f"{launches['kernels']:.0f}", f"{launches['orders']:.0f}"] if launches else ["–", "–"]
        cells = [cell for name in FIGURES for cell in _cells(payload, row, name, slowest)]
        lines.append(_line([row["name"], *counts, *cells]))
    floor = [cell for name in FIGURES for cell in _floor_cells(payload, name)]
    lines.append(_line(["floor", "1", "1", *floor]))
    costs = payload["launch_costs"]
    if costs:
        lines += ["", f"A kernel ordered from Python takes {costs['alone']:.2f} µs here, one inside a graph "
                  f"{costs['in_graph']:.2f} µs, even if it does nothing."]  # fmt: skip
    return [*lines, ""]


def _columns(payload: dict, name: str) -> list[str]:
    if name not in payload["workloads"]:
        return []
    figure = {"single": "`single`, ms a step (range)", "mixed": "`mixed`, tokens/s (range)"}[name]
    return [figure, "of the floor", "against none"]


def _cells(payload: dict, row: dict, name: str, slowest: dict | None) -> list[str]:
    if name not in payload["workloads"]:
        return []
    figure, floor = FIGURES[name], payload["workloads"][name]["floor"]
    values = [sample[figure] for sample in row["workloads"][name]]
    median = statistics.median(values)
    against = "–"
    if slowest is not None:
        base = statistics.median(sample[figure] for sample in slowest["workloads"][name])
        against = f"{(median / base if figure.endswith('_per_s') else base / median):.2f} ×"
    shown = _number(median) + (f" ({_number(min(values))}–{_number(max(values))})" if len(values) > 1 else "")
    return [shown, f"{percent_of_floor(figure, median, floor[figure]):.0f}%", against]


def _floor_cells(payload: dict, name: str) -> list[str]:
    if name not in payload["workloads"]:
        return []
    return [_number(payload["workloads"][name]["floor"][FIGURES[name]]), "100%", ""]


def _ranks(payload: dict) -> list[str]:
    several = [row for row in payload["rows"] if row["ranks"] > 1]
    one = next((row for row in payload["rows"] if row["name"] == "all on"), None)
    if not several or one is None:
        return []
    rows = sorted({int(n) for times in payload["all_reduce"].values() for n in times})
    workloads = [name for name in FIGURES if name in payload["workloads"]]
    units = {"single": "`single`, ms a step", "mixed": "`mixed`, tokens/s"}
    heads = ["ranks"] + [text for name in workloads for text in (units[name], "efficiency")]
    heads += [f"all-reduce of {n} row{'s' if n > 1 else ''}, µs (NCCL's)" for n in rows]
    heads.append("all of a step of one row, ms")
    lines = [*_caption(payload), "", _line(heads), "|---" * len(heads) + "|"]
    for row in [one, *several]:
        cells = [str(row["ranks"])]
        for name in workloads:
            speed, base = (_speed(r, name) for r in (row, one))
            cells += [_number(_median(row, name)), f"{100 * speed / base / row['ranks']:.0f}%"]
        times, library = (payload["all_reduce"].get(f"{row['ranks']}{of}", {}) for of in ("", ", NCCL"))
        for n in map(str, rows):
            cells.append((f"{times[n]:.1f}" if n in times else "–") + (f" ({library[n]:.1f})" if n in library else ""))
        calls = 2 * payload["layers"] + 1  # two a layer, one for the embedding
        cells.append(f"{1e-3 * calls * times['1']:.3f}" if "1" in times else "–")
        lines.append(_line(cells))
    return [*lines, ""]


def _median(row: dict, name: str) -> float:
    return statistics.median(sample[FIGURES[name]] for sample in row["workloads"][name])


def _speed(row: dict, name: str) -> float:
    value = _median(row, name)
    return value if FIGURES[name].endswith("_per_s") else 1 / value


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 1 else f"{value:.3f}"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _caption(payload: dict) -> list[str]:
    where = payload["environment"]
    changes = " with changes" if where["dirty"] else ""
    works = "; ".join(f"`{name}`: {work['description']}" for name, work in payload["workloads"].items())
    return [
        f"{payload['model']} in {payload['dtype']} on {where['device']['name']}. {works}. "
        f"torch {where['versions']['torch']}; commit {where['commit'][:10]}{changes}, {where['date'][:10]}."
    ]
