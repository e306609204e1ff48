"""The pictures of a table of engines: output tokens per second of every stage, and all stages under the roofline.

A bar's length is its value, the hardware's limit is a line, and the values are in a column that no line crosses.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from benchmarks.floor import ModelCost
from benchmarks.groups import Group
from benchmarks.pictures.picture import GREY, STAGES, Picture, finish, new_figure, new_panel, plain
from benchmarks.tables import BEFORE, LOAD, STEP, Column, front_rows
from benchmarks.text import number, times
from benchmarks.workloads import make_workload
from stage_a_naive.checkpoints.loading import DTYPES, resolve

PEER_COLOUR = GREY  # engines of other projects
PANELS = ((STEP, "one request", "for one request"), (LOAD, "many requests of all lengths", "under load"))


def colour_of(engine: str) -> str:
    """A stage's colour by its letter, whatever its options."""
    return STAGES.get(engine.partition(" ")[0].partition(",")[0].partition("[")[0], PEER_COLOUR)


def plot_rates(group: Group) -> Picture | None:
    """Output tokens per second of every stage, with the factor against the stage before; None without figures."""
    measured = [(panel, found) for panel in PANELS if (found := rates(group, panel[0]))]
    if not measured:
        return None
    engines = [engine for engine in front_rows(group) if any(engine in found for _, found in measured)]
    figure = new_figure(4.8 * len(measured) + 0.8, 0.34 * len(engines) + 1.8)
    panels, findings = figure.subplots(1, len(measured), squeeze=False, sharey=True)[0], []
    for axes, ((column, title, words), found) in zip(panels, measured, strict=True):
        draw_engines(axes, group, engines, column, found)
        axes.set_title(title, fontsize=11, loc="left", pad=18)
        first, *_, last = [engine for engine in found if colour_of(engine) != PEER_COLOUR] * 2
        findings.append(f"{last} makes {times(found[last] / found[first])} the tokens of {first} {words}")
    panels[0].invert_yaxis()
    figure.suptitle(f"{group.model} on {group.device}: \n{', '.join(findings)}", fontsize=12)
    return finish(figure, "output tokens per second of every engine", dpi=110)


def rates(group: Group, column: Column) -> dict[str, float]:
    """Engine -> output tokens per second, where it was measured; of one request those of decoding alone."""
    values = {engine: column.median(group, engine) for engine in front_rows(group)}
    return {engine: 1e3 / value if column is STEP else value for engine, value in values.items() if value}


def draw_engines(axes: Axes, group: Group, engines: list[str], column: Column, found: dict[str, float]) -> None:
    """A bar per engine; its value and its factor in columns at the right."""
    names = [f"{engine} †" if engine in group.elsewhere else engine for engine in engines]
    values = [found.get(engine, 0) for engine in engines]
    axes.barh(names, values, color=list(map(colour_of, engines)), edgecolor="black", linewidth=0.5, height=0.7)
    for place, engine in enumerate(engines):
        factor = column.gain(group, engine) if engine in BEFORE and engine in found else ""
        for x, text in ((1.16, number(found.get(engine))), (1.30, factor)):
            axes.annotate(text, (x, place), xycoords=("axes fraction", "data"), va="center", ha="right", fontsize=9)
    floor = column.floor(group)
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


def draw_roofline(group: Group) -> Picture | None:
    """Each stage's rate in decode and in prefill under the roof of the device; None where one was not measured."""
    cost = ModelCost(resolve(group.model).config, DTYPES[group.dtype].itemsize)
    whole = next(call for call in make_workload("single", group.size).rounds[0] if call.tag == "all")
    prompts = make_workload("ttft", group.size).rounds[0]
    prompt = min((call for call in prompts if call.prompt_tokens >= 1000), key=lambda call: call.prompt_tokens)
    phases = {}  # name -> operations per byte that must move, {engine: operations per second, in trillions}
    for phase, work, workload, name, count in (
        ("decode", cost.decode(whole), "single", "tpot_ms", whole.output_tokens),
        (f"prefill of {prompt.prompt_tokens:,} tokens", cost.prefill(prompt), "ttft", f"ttft_{prompt.tag}_ms", 1),
    ):
        times_ms = {engine: group.median(engine, workload, name) for engine in BEFORE | {"A": ""}}
        reached = {engine: work.operations / (count * ms) / 1e9 for engine, ms in times_ms.items() if ms}
        if not reached:
            return None
        phases[phase] = work.operations / work.num_bytes, dict(sorted(reached.items(), key=lambda item: item[1]))
    ceilings = group.own[-1]["ceilings"]
    bandwidth, arithmetic = ceilings["copy_bytes_per_s"] / 1e12, ceilings["matmul_operations_per_s"] / 1e12
    ridge, left, right = arithmetic / bandwidth, 0.3, 30 * max(intensity for intensity, _ in phases.values())
    intensity, decode = phases["decode"]
    worst, *_, best = decode
    figure, axes = new_panel(
        9,
        4.8,
        "operations per byte that must move",
        "TFLOP/s achieved",
        f"Memory bandwidth limits decode: {worst} reaches {decode[worst] / (intensity * bandwidth):.1%} of it, "
        f"{best} {decode[best] / (intensity * bandwidth):.0%} ({group.device})",
        grid="both",
    )
    axes.plot([left, ridge, right], [left * bandwidth, arithmetic, arithmetic], color="black", linewidth=1.5)
    lowest = min(rate for _, reached in phases.values() for rate in reached.values())
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(lowest / 4, 3 * arithmetic))

    def write(text: str, x: float, y: float, offset: tuple[int, int], **look: object) -> None:
        axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", **look)

    for phase, (intensity, reached) in phases.items():
        labels: dict[float, list[str]] = {}  # rate -> engines; dots that would overlap share one label
        for engine, rate in reached.items():
            axes.plot(intensity, rate, "o", color=colour_of(engine), markeredgecolor="black", markersize=8)
            beside = next((other for other in labels if rate < 1.35 * other), rate)
            labels.setdefault(beside, []).append(engine)
        for rate, engines in labels.items():
            write(", ".join(engines), intensity, rate, (9, 1), va="center", fontsize=9)
        write(phase, intensity, min(labels), (0, -18), ha="center", style="italic")
    memory = f"{bandwidth:.3g} TB/s" if bandwidth > 1 else f"{1e3 * bandwidth:.3g} GB/s"
    slope = (ridge * left) ** 0.5  # where its label is: half-way up
    write(f"memory: {memory}", slope, slope * bandwidth, (8, -10), fontsize=9)
    write(f"arithmetic: {arithmetic:.3g} TFLOP/s", ridge, arithmetic, (0, 8), fontsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    return finish(figure, "each stage's decode and prefill under the roof of bandwidth and arithmetic", dpi=100)
