"""Static and continuous batching side by side, and what a long prompt does to the others' pace."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.pictures.picture import BLUE, ORANGE, Picture, new_panel
from benchmarks.pictures.timeline import draw_panels


def draw_batches(runs: Mapping[str, list[dict]]) -> Picture:
    """A panel per run, on one axis of steps: what every request did in every step, and how many rows were idle."""
    named = {}
    for name, records in runs.items():
        rows = sum(len(record["sequences"]) + len(record.get("padding", ())) for record in records)
        live = sum(len(record["sequences"]) for record in records)
        named[f"{name}: {len(records)} steps, {1 - live / rows:.0%} of rows idle"] = records
    return draw_panels(named)


def draw_token_gaps(runs: Mapping[str, list[dict]], request: int) -> Picture:
    """The time between two tokens of one request, while a long prompt comes in."""
    ms = f"ms between two tokens\nof request {request}"
    figure, axes = new_panel(8.4, 3.4, f"ms since the first token of request {request}", ms)
    for (name, records), colour, look in zip(runs.items(), (ORANGE, BLUE), ("s-", "o-"), strict=False):
        ends = [
            1e3 * record["end"]
            for record in records
            if any(entry["id"] == request and entry["samples"] for entry in record["sequences"])
        ]
        gaps = [b - a for a, b in zip(ends, ends[1:], strict=False)]
        when, label = [end - ends[0] for end in ends[1:]], f"{name}: longest {max(gaps):.0f} ms"
        axes.plot(when, gaps, look, color=colour, linewidth=1, markersize=4, label=label)
    axes.set_ylim(0)
    axes.legend(frameon=False)
    return Picture(figure, "the time between two tokens of one request while another one's long prompt is prefilled")
