"""Answers as their clients see them: when each request was sent, and when each of its tokens arrived."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.http_stream import Answer
from benchmarks.pictures.picture import BLUE, GREY, Picture, finish, new_figure, plain


def draw_arrivals(answers: Sequence[Answer], title: str) -> Picture:
    """A row per request: a grey line while it waits for its first token, then a mark for every event that arrives."""
    start = min(answer.sent for answer in answers)
    figure = new_figure(9, 1.3 + 0.17 * len(answers))
    axes = figure.subplots()
    for row, answer in enumerate(answers):
        first, *_ = answer.arrivals
        axes.plot([answer.sent - start, first - start], [row, row], color=GREY, linewidth=2)
        axes.plot([at - start for at in answer.arrivals], [row] * len(answer.arrivals), "|", color=BLUE, markersize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_ylabel("request")
    axes.set_title(title, fontsize=11)
    plain(axes, "x")
    return finish(figure, f"when the tokens of {len(answers)} requests arrived: {title}")
