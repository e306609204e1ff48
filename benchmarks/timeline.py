"""A picture of a scheduler's trace: who ran when, how each step's tokens were shared out, how full the pool was.

    python -m stage_e_batching --trace trace.jsonl
    python -m benchmarks.timeline trace.jsonl timeline.png
"""

from __future__ import annotations

import argparse
import json
from os import PathLike
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

PREFILL, DECODE, WAIT, PREEMPT, PADDING = "#d95f02", "#1b9e77", "#dddddd", "#b2182b", "#f4a6b8"


def draw(trace: str | PathLike[str], picture: str | PathLike[str], title: str = "") -> None:
    """Draw the records of `trace` (JSON lines) into the file `picture`.

    Raises:
        ValueError: the trace holds no step that ran anything.
    """
    lines = Path(trace).read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record["sequences"]]
    if not records:
        raise ValueError(f"{trace} holds no step that ran anything")
    figure, (lanes, tokens, pages) = plt.subplots(
        3, 1, figsize=(10, 7), sharex=True, height_ratios=[4, 1.5, 1], layout="constrained"
    )
    draw_lanes(lanes, records)
    _draw_tokens(tokens, records)
    _draw_pages(pages, records)
    if title:
        lanes.set_title(title, loc="left")
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def draw_lanes(axes: Axes, records: list[dict]) -> None:
    """One lane a request: what it did in every step.

    `padding`, in a record of a static batch: who has finished and keeps its seat.
    """
    ids = {request for record in records for request in record["waiting"]}
    ids |= {entry["id"] for record in records for entry in record["sequences"]}
    lane_of = {request: lane for lane, request in enumerate(sorted(ids))}
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for x, record in enumerate(records):
        for request in record["waiting"]:
            bars.setdefault((lane_of[request], WAIT), []).append((x, 1))
        for i, entry in enumerate(record["sequences"]):
            colour = DECODE if i < record["num_decodes"] else PREFILL
            bars.setdefault((lane_of[entry["id"]], colour), []).append((x, 1))
        for request in record.get("padding", ()):
            bars.setdefault((lane_of[request], PADDING), []).append((x, 1))
        for preemption in record["preempted"]:
            axes.plot(x + 0.5, lane_of[preemption["id"]], "x", color=PREEMPT, zorder=3)
    for (lane, colour), spans in bars.items():
        axes.broken_barh(spans, (lane - 0.4, 0.8), color=colour, linewidth=0)
    axes.set_ylabel("request")
    axes.set_ylim(len(lane_of) - 0.4, -0.6)
    names = [(WAIT, "waits"), (PREFILL, "prefill"), (DECODE, "decode")]
    if any(record.get("padding") for record in records):
        names.append((PADDING, "done, keeps its seat"))
    handles = [Patch(color=colour, label=name) for colour, name in names]
    if any(record["preempted"] for record in records):
        handles.append(Line2D([], [], color=PREEMPT, marker="x", linestyle="", label="preempted"))
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1)}
    axes.legend(handles=handles, ncols=len(handles), **place, frameon=False, fontsize=9)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_tokens(axes: Axes, records: list[dict]) -> None:
    decodes = [record["num_decodes"] for record in records]
    prefills = [record["num_tokens"] - record["num_decodes"] for record in records]
    steps = [x + 0.5 for x in range(len(records))]
    axes.bar(steps, decodes, 1, color=DECODE, linewidth=0)
    axes.bar(steps, prefills, 1, bottom=decodes, color=PREFILL, linewidth=0)
    axes.set_ylabel("tokens a step")


def _draw_pages(axes: Axes, records: list[dict]) -> None:
    axes.step(range(len(records)), [record["used_pages"] for record in records], where="post", color="#555555")
    axes.axhline(records[0]["num_pages"], color=PREEMPT, linestyle=":", linewidth=1)
    axes.set_ylim(0)
    axes.set_ylabel("pages in use")
    axes.set_xlabel("step")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.timeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", help="what `--trace FILE` wrote")
    parser.add_argument("picture", help="the file to draw, e.g. timeline.png")
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    draw(arguments.trace, arguments.picture, arguments.title)


if __name__ == "__main__":
    main()
