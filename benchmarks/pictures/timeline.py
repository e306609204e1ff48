"""Pictures of a scheduler's trace: which requests ran in each step, with how many tokens, and the blocks in use.

python -m stage_e_batching --trace trace.jsonl
python -m benchmarks.pictures.timeline trace.jsonl timeline.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from benchmarks.pictures.picture import FAINT, GREY, Picture, new_figure, plain
from stage_a_naive.entrypoints.interrupts import run_command

PREFILL, DECODE, WAIT, PREEMPT, PADDING = "#d95f02", "#1b9e77", FAINT, "#b2182b", "#f4a6b8"
LEGEND = {"loc": "outside lower center", "ncols": 5, "frameon": False, "fontsize": 9}


def read_trace(path: str | PathLike[str]) -> list[dict]:
    """Read the steps of a trace (JSON lines) that ran at least one sequence.

    Raises:
        ValueError: the trace has no such step.
    """
    records = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
    found = [record for record in records if record["sequences"]]
    if not found:
        raise ValueError(f"{path} holds no step that ran anything")
    return found


def draw_panels(runs: Mapping[str, Sequence[dict]], title: str = "") -> Picture:
    """Draw a panel of lanes per run, on one axis of steps: the work of every request in every step."""
    figure = new_figure(8.4, 2.6 * len(runs) + 0.4 * bool(title))
    panels, handles = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0], []
    for axes, (name, records) in zip(panels, runs.items(), strict=True):
        handles = max(handles, draw_lanes(axes, records), key=len)
        axes.set_title(name, fontsize=11, loc="left")
        plain(axes, "x")
    panels[-1].set_xlabel("step")
    figure.legend(handles=handles, **LEGEND)
    figure.suptitle(title, fontsize=12)
    return Picture(figure, "what each request does in every step: " + "; ".join(runs))


def draw(records: Sequence[dict], title: str = "") -> Picture:
    """Draw the records of a trace: lanes, tokens per step, blocks in use."""
    figure = new_figure(8.4, 7)
    lanes, tokens, pool = figure.subplots(3, 1, sharex=True, height_ratios=[4, 1.5, 1])
    figure.legend(handles=draw_lanes(lanes, records), **LEGEND)
    lanes.set_title(title, fontsize=11, loc="left")
    decodes = [record["num_decodes"] for record in records]
    prefills = [record["num_tokens"] - record["num_decodes"] for record in records]
    steps = [x + 0.5 for x in range(len(records))]
    tokens.bar(steps, decodes, 1, color=DECODE, linewidth=0)
    tokens.bar(steps, prefills, 1, bottom=decodes, color=PREFILL, linewidth=0)
    tokens.set_ylabel("tokens per step")
    pool.step(range(len(records)), [record["used_blocks"] for record in records], where="post", color=GREY)
    pool.axhline(records[0]["num_blocks"], color=PREEMPT, linestyle=":", linewidth=1)
    pool.set(ylim=0, ylabel="blocks in use", xlabel="step")
    return Picture(figure, "which request ran in which step, tokens per step, blocks in use")


def draw_lanes(axes: Axes, records: Sequence[dict]) -> list[Patch | Line2D]:
    """Draw one lane per request, its work in every step; returns the legend's entries.

    Records of static batches must come from `with_padding`.
    """
    ids = {request for record in records for request in record["waiting"]}
    ids |= {entry["id"] for record in records for entry in record["sequences"]}
    lane_of = {request: lane for lane, request in enumerate(sorted(ids))}
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for x, record in enumerate(records):
        running = [entry["id"] for entry in record["sequences"]]
        count = record["num_decodes"]
        for colour, requests in (
            (WAIT, record["waiting"]),
            (DECODE, running[:count]),
            (PREFILL, running[count:]),
            (PADDING, record.get("padding", ())),
        ):
            for request in requests:
                spans = bars.setdefault((lane_of[request], colour), [])
                start = spans.pop()[0] if spans and sum(spans[-1]) == x else x  # one bar for steps without a gap
                spans.append((start, x + 1 - start))
        for preemption in record["preempted"]:
            axes.plot(x + 0.5, lane_of[preemption["id"]], "x", color=PREEMPT, zorder=3)
    for (lane, colour), spans in bars.items():
        axes.broken_barh(spans, (lane - 0.4, 0.8), color=colour, linewidth=0)
    axes.set(ylabel="request", ylim=(len(lane_of) - 0.4, -0.6))
    names = {WAIT: "waits", PREFILL: "prefill", DECODE: "decode"}
    if any(colour == PADDING for _, colour in bars):
        names[PADDING] = "done, keeps its batch slot"
    handles = [Patch(color=colour, label=name) for colour, name in names.items()]
    if any(record["preempted"] for record in records):
        handles.append(Line2D([], [], color=PREEMPT, marker="x", linestyle="", label="preempted"))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return handles


def with_padding(records: list[dict]) -> list[dict]:
    """Mark, in the records of static batches, ended requests that keep their batch slot (`padding`)."""
    batch: set[int] = set()
    for record in records:
        batch = set(record["admitted"]) or batch
        record["padding"] = sorted(batch - {entry["id"] for entry in record["sequences"]})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pictures.timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", help="what `--trace FILE` wrote")
    parser.add_argument("picture", help="the file to draw, e.g. timeline.png")
    arguments = parser.parse_args()
    draw(read_trace(arguments.trace)).save(arguments.picture)
    print(f"written: {arguments.picture}")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
