"""A drawn figure as a value, the plots that studies declare, and the panels and bars of other figures.

A file is an SVG whose text is text and whose colours follow the reader's (light or dark); a notebook shows a PNG.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from xml.sax.saxutils import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.render import Chosen, Record, write

# Of Okabe and Ito ("Color Universal Design", 2008): people with any kind of colour vision can tell them apart.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
SKY, PINK, YELLOW = "#56B4E9", "#CC79A7", "#F0E442"
STAGES = {"A": ORANGE, "B": SKY, "C": GREEN, "D": YELLOW, "E": BLUE, "F": RED}  # the same in all pictures
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY)  # for things without a fixed colour
FAINT = "#99999955"  # idle or waiting
ON_DARK = "#fefefe"  # text on something coloured: the same in light and dark
# Black and white are the reader's: in a file they are names, which have other values where the reader's page is dark.
# Before each name is its colour: a program that does not know names (for slides, or a PDF) takes that.
INK = """<style>
svg { --ink: #1f2328; --ground: #ffffff; fill: #1f2328; fill: var(--ink) } text { fill: #1f2328; fill: var(--ink) }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --ground: #0d1117 } }
</style>
<rect width="100%" height="100%" style="fill: #ffffff; fill: var(--ground)"/>"""
TEXT = {"svg.fonttype": "none", "svg.hashsalt": "six engines"}  # letters, no outlines; the same bytes each time
FAMILIES = re.compile(r"'DejaVu Sans', [^;\"]*")


@dataclass(frozen=True)
class Picture:
    """A figure with a text alternative, or the bytes of a PNG file."""

    drawn: Figure | bytes
    text: str

    @property
    def png(self) -> bytes:
        return self.drawn if isinstance(self.drawn, bytes) else self._saved("png")

    @property
    def svg(self) -> bytes:
        with matplotlib.rc_context(TEXT):
            text = self._saved("svg", transparent=True).decode()
        text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        for colour, name in (("#000000", "var(--ink)"), ("#ffffff", "var(--ground)")):
            text = re.sub(rf"([\w-]+): {colour}", rf"\1: {colour}; \1: {name}", text)
        text = FAMILIES.sub("'DejaVu Sans', Verdana, sans-serif", text)
        return re.sub(r"(<svg[^>]*>)", rf"\1\n<title>{escape(self.text)}</title>\n{INK}", text, count=1).encode()

    def _saved(self, kind: str, **how: object) -> bytes:
        buffer = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {"Software": None}  # nothing that changes from day to day
        self.drawn.savefig(buffer, format=kind, metadata=metadata, **how)
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return f"[picture: {self.text}]"

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(self.svg if Path(path).suffix == ".svg" else self.png)


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, size in inches. It is in no global list, so it need not be closed."""
    return Figure(figsize=(width, height), layout="constrained")


def plain(axes: Axes, grid: str = "y") -> None:
    """Remove the frame at the top and right, and draw faint lines along an axis, both axes ("both") or none ("")."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)


def new_panels(
    width: float, height: float, *panels: Mapping[str, object], title: str = "", grid: str = "y", **layout: object
) -> tuple[Figure, list[Axes]]:
    """Make a figure with plain panels side by side.

    Args:
        panels: for each panel the arguments of `Axes.set`: its labels and limits.
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
    """Make a figure with a single plain panel and its labels."""
    figure, [axes] = new_panels(width, height, {"xlabel": x, "ylabel": y}, title=title, grid=grid)
    return figure, axes


Line = tuple[str, Mapping[float, float], str, str]  # label, y by x, colour, marker and line as `Axes.plot` has them


def draw_lines(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw lines through points; both axes begin at 0."""
    for label, points, colour, look in lines:
        axes.plot(list(points), list(points.values()), look, color=colour, label=label)
    axes.set_xlim(0)
    axes.set_ylim(0)


Part = tuple[str | None, Sequence[float], object]  # label, a value for each bar, colour or colours


def draw_bars(
    axes: Axes, names: Sequence[str], parts: Sequence[Part], texts: Sequence[str], room: float = 1.15, **look: object
) -> None:
    """Draw horizontal bars, the first on top: the parts of each bar in sequence, then a text.

    Args:
        room: length of the axis, as a multiple of the longest bar.
        look: keyword arguments of `Axes.barh` for all parts.
    """
    ends = [0.0] * len(names)
    for label, values, colour in parts:
        axes.barh(names, values, left=ends, color=colour, label=label, **look)
        ends = [a + b for a, b in zip(ends, values, strict=True)]
    for y, (end, text) in enumerate(zip(ends, texts, strict=True)):
        axes.annotate(text, (end, y), xytext=(5, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, room * max(ends))


@dataclass(frozen=True, kw_only=True)
class Plot(Chosen):
    """A picture as data: a section of a study's `PICTURES`, named after its file. Several of one name are panels.

    Args:
        kind: lines, bars (from the left) or columns. The parts of a bar are its records, one after another.
        title: states the finding, a format over the file; `text`: the text alternative.
        at, value: expressions for a record's place on the first axis (of a bar: its name) and for its length or height.
        label: of a line or part; records that are alike in it are one line. `order` says which, in an expression.
        written: the text at the end of a bar, a format over the last of its records.
        colours, looks: of the lines or parts; a bar without parts may have its own `colour`, an expression.
        limit: an expression over the file, drawn as a line with the name `limit_label`.
        top: expression of the longest value that is shown.
        files: which results files, in an expression.
    """

    kind: str = "lines"
    title: str = ""
    text: str = ""
    x: str = ""
    y: str = ""
    at: str
    value: str
    label: str = ""
    order: str = "[]"
    written: str = ""
    colour: str = ""
    colours: Sequence[str] = PALETTE
    looks: Sequence[str] = ("o-", "s-", "^-", "D-", "v-")
    limit: str = ""
    limit_label: str = ""
    top: str = ""
    files: str = "results[:1]"
    height: float = 3.8

    def draw(self, axes: Axes, result: dict) -> None:
        rows, names = self.records(result), self.names | {"result": result}
        labels = list(eval(self.order, names)) or list(dict.fromkeys(write(self.label, row) for row in rows))
        lines = {label: [row for row in rows if write(self.label, row) == label] for label in labels}
        axes.set(xlabel=self.said(self.x, result), ylabel=self.said(self.y, result))
        plain(axes, "x" if self.kind == "bars" else "y")
        colours = dict(zip(labels, (COLOURS.get(colour, colour) for colour in self.colours), strict=False))
        if self.kind == "lines":
            points = [{eval(self.at, row): eval(self.value, row) for row in own} for own in lines.values()]
            draw_lines(axes, list(zip(lines, points, colours.values(), self.looks, strict=False)))
        else:
            self.draw_bars(axes, lines, colours)
        if self.limit:
            limit = eval(self.limit, names)
            label = write(self.limit_label, names | {"limit": limit})
            (axes.axvline if self.kind == "bars" else axes.axhline)(limit, color="black", linestyle="--", label=label)
        if self.top:
            axes.set_ylim(0, eval(self.top, names))

    def draw_bars(self, axes: Axes, lines: Mapping[str, list[Record]], colours: Mapping[str, str]) -> None:
        bars: dict[str, list[Record]] = {}
        for row in (row for own in lines.values() for row in own):
            bars.setdefault(write(self.at, row), []).append(row)
        sums = {bar: sum(eval(self.value, row) for row in own) for bar, own in bars.items()}
        texts = [write(self.written, own[-1] | {"value": sums[bar]}) for bar, own in bars.items()]
        if self.kind == "columns":
            drawn = axes.bar(list(bars), list(sums.values()), color=[self.colour_of(own[0]) for own in bars.values()])
            axes.bar_label(drawn, texts, padding=2)
            axes.set_ylim(0, 1.12 * max(sums.values()))
            return
        parts = []
        for label, own in lines.items():
            by_bar = {write(self.at, row): row for row in own}
            colour = colours[label] if len(lines) > 1 else [self.colour_of(by_bar[bar]) for bar in bars]
            parts.append((label or None, [eval(self.value, by_bar[bar]) for bar in bars], colour))
        draw_bars(axes, list(bars), parts, texts, room=1.25, height=0.62)

    def colour_of(self, row: Record) -> str:
        return eval(self.colour, COLOURS | row) if self.colour else BLUE


COLOURS = {name: value for name, value in globals().items() if isinstance(value, str) and value.startswith("#")}


def pictures(study: ModuleType, results: list[dict]) -> dict[str, Picture]:
    """Return the pictures that a study declares or draws, by file."""
    found = study.draw(results) if results and hasattr(study, "draw") else {}
    for path, panels in Plot.read(study, "PICTURES").items():
        own = eval(panels[0].files, {"results": panels[0].of_part(results)})
        if own:
            found[path] = draw_panels(panels, own[0])
    return found


def draw_panels(panels: Sequence[Plot], result: dict) -> Picture:
    """Draw one picture: panels side by side below a title, with a legend if lines or parts have names."""
    figure = new_figure(4.3 * len(panels) if len(panels) > 1 else 8, panels[0].height)
    for plot, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        plot.draw(axes, result)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        columns = len(labels) if sum(map(len, labels)) < 70 else 3 if len(labels) > 4 else 2
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    title = panels[0].said(panels[0].title, result)
    figure.suptitle(title, fontsize=12)
    return Picture(figure, panels[0].text or title)
