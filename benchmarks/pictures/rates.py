"""The picture of a table of engines: output tokens per second, for one request and under load.

A bar's length is its value, the hardware's limit is a line, and the values stand in a column that no line crosses. The
colours are those of Okabe and Ito ("Color Universal Design", 2008), which people with any kind of colour vision can
tell apart; a stage keeps its colour in all pictures.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from benchmarks.front import front_rows
from benchmarks.groups import Group
from benchmarks.pictures.picture import BLUE, GREEN, GREY, ORANGE, RED, SKY, YELLOW, finish, new_figure, plain
from benchmarks.tables import BEFORE, LOAD, STEP, Column, gain
from benchmarks.text import number, times

COLOURS = {"A": ORANGE, "B": SKY, "C": GREEN, "D": YELLOW, "E": BLUE, "F": RED}
PEER_COLOUR = GREY  # engines of other projects
PANELS = ((STEP, "one request"), (LOAD, "many requests of all lengths"))


def colour_of(engine: str) -> str:
    """A stage's colour by its letter, whatever its options."""
    return COLOURS.get(engine.partition(" ")[0].partition(",")[0].partition("[")[0], PEER_COLOUR)


def plot_rates(group: Group) -> bytes | None:
    """Output tokens per second of every stage, with the factor against the stage before; None without figures."""
    panels = [(column, title, rates(group, column)) for column, title in PANELS]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return None
    engines = [engine for engine in front_rows(group) if any(engine in found for *_, found in panels)]
    figure = new_figure(4.8 * len(panels) + 0.8, 0.34 * len(engines) + 1.8)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (column, title, found) in zip(axes, panels, strict=True):
        draw_bars(axis, group, engines, column, found)
        axis.set_title(title, fontsize=11, loc="left", pad=18)
    axes[0].invert_yaxis()
    figure.suptitle(f"{group.model} on {group.device}: {finding(panels)}", fontsize=12)
    return finish(figure, "output tokens per second of every engine", dpi=110).png


def rates(group: Group, column: Column) -> dict[str, float]:
    """Engine -> output tokens per second, where it was measured; of one request those of decoding alone."""
    values = {engine: group.median(engine, column.workload, column.figure) for engine in front_rows(group)}
    found = {engine: value for engine, value in values.items() if value}
    return {engine: 1e3 / value for engine, value in found.items()} if column is STEP else found


def finding(panels: list[tuple[Column, str, dict[str, float]]]) -> str:
    """What the picture shows: the last stage against the first that was measured."""
    parts = []
    for column, _, found in panels:
        first, *_, last = [engine for engine in found if colour_of(engine) != PEER_COLOUR] * 2
        words = "for one request" if column is STEP else "under load"
        parts.append(f"{last} makes {times(found[last] / found[first])} the tokens of {first} {words}")
    return "\n" + ", ".join(parts)


def draw_bars(axes: Axes, group: Group, engines: list[str], column: Column, found: dict[str, float]) -> None:
    names = [f"{engine} †" if engine in group.elsewhere else engine for engine in engines]
    values = [found.get(engine, 0) for engine in engines]
    axes.barh(names, values, color=list(map(colour_of, engines)), edgecolor="black", linewidth=0.5, height=0.7)
    for place, engine in enumerate(engines):
        factor = gain(group, engine, column) if engine in BEFORE and engine in found else ""
        for x, text in ((1.16, number(found.get(engine))), (1.30, factor)):
            axes.annotate(text, (x, place), xycoords=("axes fraction", "data"), va="center", ha="right", fontsize=9)
    floor = group.floor(column.workload, column.figure)
    if floor is not None:
        floor = 1e3 / floor if column is STEP else floor
        axes.axvline(floor, color="black", linestyle="--", linewidth=1.3)
        where = {"xycoords": ("data", "axes fraction"), "xytext": (0, 3), "textcoords": "offset points"}
        axes.annotate(f"hardware limit: {number(floor)}", (floor, 1), ha="right", va="bottom", fontsize=9, **where)
    axes.set_xlim(0, 1.02 * max([*values, floor or 0]))
    axes.set_xlabel("output tokens/s (more is better), and × the stage before")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    plain(axes, "x")
