"""A drawn figure as a value: notebooks show it, files hold it, and nothing depends on which drawing backend is on."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

DPI = 80
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
SKY, PINK, YELLOW = "#56B4E9", "#CC79A7", "#F0E442"  # with those above, the palette of Okabe and Ito
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY)  # for things that have no colour of their own


class Picture:
    """A PNG with a sentence that says what is on it, for those who cannot see it.

    Args:
        png: the file's bytes.
        text: the sentence.
    """

    def __init__(self, png: bytes, text: str) -> None:
        self.png = png
        self.text = text

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return f"[picture: {self.text}]"

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(self.png)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches. It belongs to no global list, so nobody has to close it."""
    return Figure(figsize=(width, height), layout="constrained")


def finish(figure: Figure, text: str, dpi: int = DPI) -> Picture:
    """Draw the figure into a picture."""
    buffer = io.BytesIO()
    # No version or date in the file, so that the same figures give the same bytes.
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return Picture(buffer.getvalue(), text)


def plain(axes: Axes, grid: str = "y") -> None:
    """No frame at the top and right, and faint lines along one axis."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)
