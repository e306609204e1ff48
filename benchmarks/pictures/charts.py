"""The two charts that most figures are: a single panel, and bars of parts with a text behind each."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.pictures.picture import new_figure, plain


def new_panel(
    width: float, height: float, x: str = "", y: str = "", title: str = "", grid: str = "y"
) -> tuple[Figure, Axes]:
    """A figure with a single plain panel and its labels."""
    figure = new_figure(width, height)
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=11)
    plain(axes, grid)
    return figure, axes


Part = tuple[str | None, Sequence[float], object]  # label, a value for each bar, colour or colours


def draw_bars(
    axes: Axes, names: Sequence[str], parts: Sequence[Part], texts: Sequence[str], room: float = 1.15, **look: object
) -> None:
    """Bars from the left, the first on top: the parts of each one after another, and a text behind it.

    Args:
        room: how long the axis is, in longest bars.
        look: keyword arguments for all parts, as `Axes.barh` has them.
    """
    ends = [0.0] * len(names)
    for label, values, colour in parts:
        axes.barh(names, values, left=ends, color=colour, label=label, **look)
        ends = [a + b for a, b in zip(ends, values, strict=True)]
    for y, (end, text) in enumerate(zip(ends, texts, strict=True)):
        axes.annotate(text, (end, y), xytext=(5, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, room * max(ends))
