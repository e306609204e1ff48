"""A drawn figure as a value, and the panels, bars and boxes that most figures are made of.

Notebooks show a `Picture` and files hold it; nothing depends on which drawing backend is on.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

# Of Okabe and Ito ("Color Universal Design", 2008): people with any kind of colour vision can tell them apart.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
SKY, PINK, YELLOW = "#56B4E9", "#CC79A7", "#F0E442"
STAGES = {"A": ORANGE, "B": SKY, "C": GREEN, "D": YELLOW, "E": BLUE, "F": RED}  # the same in all pictures
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY)  # for things that have no colour of their own


@dataclass(frozen=True)
class Picture:
    """The bytes of a PNG file, and a sentence that says what is on it, for those who cannot see it."""

    png: bytes
    text: str

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return f"[picture: {self.text}]"

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(self.png)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches. It belongs to no global list, so nobody has to close it."""
    return Figure(figsize=(width, height), layout="constrained")


def finish(figure: Figure, text: str, dpi: int = 80) -> Picture:
    """Draw the figure into a picture."""
    buffer = io.BytesIO()
    # No version or date in the file, so that the same figures give the same bytes.
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return Picture(buffer.getvalue(), text)


def plain(axes: Axes, grid: str = "y") -> None:
    """No frame at the top and right, and faint lines along an axis, both of them ("both") or none ("")."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)


def new_panels(
    width: float, height: float, *panels: Mapping[str, object], title: str = "", grid: str = "y", **layout: object
) -> tuple[Figure, list[Axes]]:
    """A figure with plain panels side by side.

    Args:
        panels: what `Axes.set` is given, for each panel: its labels and limits.
        title: of the whole figure.
        layout: keyword arguments of `Figure.subplots`.
    """
    figure = new_figure(width, height)
    found = list(figure.subplots(1, len(panels), squeeze=False, **layout)[0])
    for axes, own in zip(found, panels, strict=True):
        axes.set(**own)
        axes.title.set_fontsize(11)
        plain(axes, grid)
    figure.suptitle(title, fontsize=12)
    return figure, found


def new_panel(
    width: float, height: float, x: str = "", y: str = "", title: str = "", grid: str = "y"
) -> tuple[Figure, Axes]:
    """A figure with a single plain panel and its labels."""
    figure, [axes] = new_panels(width, height, {"xlabel": x, "ylabel": y, "title": title}, grid=grid)
    return figure, axes


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
    colour = "white" if darkness > 0.6 else "black"  # legible on what is behind it
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=colour)


Line = tuple[str, Mapping[float, float], str, str]  # label, y by x, colour, marker and line as `Axes.plot` has them


def draw_lines(axes: Axes, lines: Sequence[Line]) -> None:
    """Lines through points, over an axis on which each doubling is a step and each x has its number."""
    for label, points, colour, look in lines:
        axes.plot(list(points), list(points.values()), look, color=colour, label=label)
    ticks = sorted({x for _, points, *_ in lines for x in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, list(map(str, ticks)))


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
