"""Stage B's ideas, one at a time switched off: measured here, or as recorded on a GPU."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from benchmarks.decode_ablation import measure
from benchmarks.pictures.picture import BLUE, GREY, ORANGE, RED, Picture, finish, new_figure, plain
from benchmarks.results import RESULTS_DIRECTORY, load_results


def measure_ablation(model: str, variants: Sequence[str], rounds: int = 3, seconds: float = 0.15) -> dict:
    """`benchmarks.decode_ablation` in small: these variants, in this process, on this device."""
    options = argparse.Namespace(
        model=model, device="auto", dtype="auto", variants=list(variants), prompt_tokens=64, output_tokens=17,
        rounds=rounds, seconds=seconds,
    )  # fmt: skip
    with redirect_stdout(StringIO()):  # its progress lines
        return measure(options)


def recorded_ablation(directory: Path = RESULTS_DIRECTORY) -> dict | None:
    """The committed ablation of a GPU; None where there is none."""
    found = [load_results(path) for path in sorted(directory.glob("decode-ablation-*.json"))]
    return next((payload for payload in found if payload["device"] == "cuda"), None)


def draw_ablation(payload: dict) -> Picture:
    """A bar a variant: the median time of a decode step; the whisker spans the rounds."""
    rows = [row for row in payload["rows"] if row["name"] != "B without warm-up"]
    rows.sort(key=lambda row: (row["options"] is not None, "compiled" in row["name"]))
    names = [row["name"] for row in rows]
    medians = [statistics.median(row["decode_step_ms"]) for row in rows]
    low = [m - min(row["decode_step_ms"]) for m, row in zip(medians, rows, strict=True)]
    high = [max(row["decode_step_ms"]) - m for m, row in zip(medians, rows, strict=True)]
    colours = [_colour(row) for row in rows]
    figure = new_figure(9, 0.38 * len(rows) + 1.3)
    axes = figure.subplots()
    axes.barh(names, medians, xerr=[low, high], color=colours, capsize=3, height=0.65, error_kw={"elinewidth": 1})
    for y, (median, more) in enumerate(zip(medians, high, strict=True)):
        axes.annotate(f"{median:.2f}", (median + more, y), xytext=(5, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(m + h for m, h in zip(medians, high, strict=True)))
    axes.set_xlabel("ms a decode step, less is better")
    axes.set_title(f"{payload['model']} on {payload['environment']['device']['name']}, {payload['dtype']}", fontsize=11)
    plain(axes, "x")
    return finish(figure, "the time of a decode step with each idea of stage B switched off in turn")


def _colour(row: dict) -> str:
    if row["options"] is None:
        return RED
    if row["name"] in ("B", "B compiled"):
        return BLUE
    return ORANGE if "compiled" in row["name"] else GREY
