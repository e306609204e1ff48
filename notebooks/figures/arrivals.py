"""What the clients of a server see: when each token arrives."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.pictures.picture import BLUE, GREY, Picture, new_panel
from benchmarks.serve import Answer


def draw_arrivals(answers: Sequence[Answer], title: str) -> Picture:
    """A row per request: a grey line while it waits for its first token, then a mark for every event that arrives."""
    start = min(answer.sent for answer in answers)
    figure, axes = new_panel(9, 1.3 + 0.17 * len(answers), "seconds", "request", title, grid="x")
    for row, answer in enumerate(answers):
        first, *_ = answer.arrivals
        axes.plot([answer.sent - start, first - start], [row, row], color=GREY, linewidth=2)
        axes.plot([at - start for at in answer.arrivals], [row] * len(answer.arrivals), "|", color=BLUE, markersize=7)
    axes.invert_yaxis()
    return Picture(figure, f"when the tokens of {len(answers)} requests arrived: {title}")
