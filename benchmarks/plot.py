"""Pictures of the results files: bars per engine with the floor drawn, and the time of a token over the context length.

The colours are those of Okabe and Ito ("Color Universal Design", 2008), which people with any kind of colour vision can
tell apart; an engine keeps its colour in all pictures.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter

from benchmarks.environment import ROOT
from benchmarks.tables import Group, number

PLOTS_DIRECTORY = ROOT / "benchmarks" / "plots"
COLOURS = {"A": "#E69F00", "B": "#56B4E9", "C": "#009E73", "D": "#F0E442", "E": "#0072B2", "F": "#D55E00"}
PEER_COLOUR = "#999999"  # engines of other projects
FLOOR_STYLE = {"color": "black", "linestyle": "--", "linewidth": 1.5}
PANELS = (("single", "one request"), ("decode32", "a batch of equals"), ("mixed", "many requests of all lengths"))
LOG_FROM = 50  # where a largest value is so many times the smallest, the axes are logarithmic


def colour_of(engine: str) -> str:
    """A stage's colour by its letter, whatever its options."""
    stage = engine.split("[")[0].split(",")[0].split(" ")[0]
    return COLOURS.get(stage, PEER_COLOUR)


def plot_bars(group: Group, directory: Path = PLOTS_DIRECTORY) -> Path | None:
    """Output tokens per second of every engine, one panel a workload; None where nothing was measured."""
    panels = [(name, title, _rates(group, name)) for name, title in PANELS]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return None
    most = max(len(rates) for *_, rates in panels)
    is_log = any(
        (_best_rate(group, name) or 0) > LOG_FROM * min(rate["median"] for rate in rates.values())
        for name, _, rates in panels
    )
    size = (4.6 * len(panels) + 1, 0.48 * most + 2.2)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, (name, title, rates) in zip(axes[0], panels, strict=True):
        _draw_bars(axis, rates, _best_rate(group, name), is_log)
        axis.set_title(f"{name}: {title}", fontsize=12, pad=24)
    figure.suptitle(f"{group.model} on {group.device}, {group.dtype}: more is better", fontsize=13)
    return _save(figure, directory / f"{group.slug}-bars.png")


def _rates(group: Group, name: str) -> dict[str, dict[str, float]]:
    rows = {engine: group.rows.get((engine, name), {}) for engine in group.engines if "[" not in engine}
    return {engine: row["figures"]["output_tokens_per_s"] for engine, row in rows.items() if "figures" in row}


def _best_rate(group: Group, name: str) -> float | None:
    return group.workload(name)["floor"].get("output_tokens_per_s")


def _draw_bars(axis: Axes, rates: dict[str, dict[str, float]], floor: float | None, is_log: bool) -> None:
    values = [rate["median"] for rate in rates.values()]
    spread = [[r["median"] - r["min"] for r in rates.values()], [r["max"] - r["median"] for r in rates.values()]]
    axis.barh(
        list(rates), values, xerr=spread, color=[colour_of(engine) for engine in rates], edgecolor="black",
        linewidth=0.6, capsize=3, error_kw={"elinewidth": 1},
    )  # fmt: skip
    axis.invert_yaxis()
    far = max([*values, floor or 0])
    if is_log:
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlim(min(values) / 2, far * 4)
    else:
        axis.set_xlim(0, far * 1.25)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=5))
    for place, rate in enumerate(rates.values()):
        # A white box keeps the figure readable where the floor's line crosses it.
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
        axis.annotate(
            number(rate["median"]), (rate["max"], place), xytext=(5, 0), textcoords="offset points", va="center",
            fontsize=11, bbox=box, zorder=5,
        )  # fmt: skip
    if floor is not None:
        axis.axvline(floor, **FLOOR_STYLE, label=f"what the hardware allows: {number(floor)}")
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 0.99), frameon=False, fontsize=10)
    scale = ", logarithmic" if axis.get_xscale() == "log" else ""
    axis.set_xlabel(f"output tokens per second{scale}", fontsize=11)
    axis.xaxis.set_major_formatter(lambda value, _: number(value))
    axis.tick_params(labelsize=11)
    axis.spines[["top", "right"]].set_visible(False)


def plot_context(group: Group, directory: Path = PLOTS_DIRECTORY) -> Path | None:
    """The time of a decode step over the length of the context; None where it was not measured."""
    workload = group.workload("context")
    lines = {}
    for engine in group.engines:
        row = group.rows.get((engine, "context"), {})
        if "[" not in engine and "figures" in row:
            lines[engine] = {_length(name): summary["median"] for name, summary in row["figures"].items()}
    if workload is None or not lines:
        return None
    figure, axis = plt.subplots(figsize=(8.5, 5.2), layout="constrained")
    markers = "osD^vP*Xh<>"
    for place, (engine, points) in enumerate(lines.items()):
        # Rows of one stage share a colour; the marker and the dashes tell them apart.
        seen = [colour_of(e) for e in list(lines)[:place]].count(colour_of(engine))
        axis.plot(
            list(points), list(points.values()), marker=markers[place % len(markers)], color=colour_of(engine),
            linestyle=["-", "--", ":"][seen % 3], linewidth=2, markersize=7, markeredgecolor="black",
            markeredgewidth=0.5, label=engine,
        )  # fmt: skip
    floor = {_length(name): value for name, value in workload["floor"].items()}
    axis.plot(list(floor), list(floor.values()), **FLOOR_STYLE, label="floor")
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(floor), [str(length) for length in floor])
    values = [value for points in [*lines.values(), floor] for value in points.values()]
    axis.set_yscale("log" if max(values) > LOG_FROM * min(values) else "linear")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if axis.get_yscale() == "linear":
        axis.set_ylim(0, None)
    axis.set_xlabel("context length, tokens", fontsize=12)
    axis.set_ylabel("time per output token, ms", fontsize=12)
    axis.set_title(f"{group.model} on {group.device}, {group.dtype}: less is better", fontsize=13)
    axis.tick_params(labelsize=11)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=11)
    return _save(figure, directory / f"{group.slug}-context.png")


def _length(figure: str) -> int:
    return int(figure.split("_")[1])


def _save(figure: plt.Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # No version or date in the file, so that the same figures give the same bytes.
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return path
