"""Free drawing: a figure without axes, and boxes with a text."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.pictures.picture import ON_DARK, new_figure

ON_LIGHT = "#111111"


def new_canvas(width: float, height: float, **limits: object) -> tuple[Figure, Axes]:
    """A figure to draw on freely: without axes, with the limits that `Axes.set` is given."""
    figure = new_figure(width, height)
    axes = figure.subplots()
    axes.set(**limits)
    axes.axis("off")
    return figure, axes


def draw_box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str = "",
    size: float | None = None,
    **look: object,
) -> None:
    """A rectangle with a text in its middle; `look` is what `Rectangle` is given."""
    axes.add_patch(Rectangle((x, y), width, height, **look))
    red, green, blue = to_rgb(look.get("facecolor", "white"))
    darkness = look.get("alpha", 1) * (1 - 0.3 * red - 0.59 * green - 0.11 * blue)
    ink = "black" if look.get("facecolor", "white") == "white" else ON_DARK if darkness > 0.6 else ON_LIGHT
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=ink)
