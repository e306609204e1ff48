"""The pictures of a table of engines: output tokens per second of every stage, and all stages under the roofline.

A bar's length is its value, and the hardware's limit is a line.
"""

from __future__ import annotations

from statistics import median

from matplotlib.axes import Axes

from benchmarks.floor import ModelCost
from benchmarks.groups import Group
from benchmarks.pictures.picture import GREY, STAGES, Picture, draw_bars, new_figure, new_panel, plain
from benchmarks.tables import BEFORE, LOAD, STEP, Column, front_rows
from benchmarks.text import number, times
from benchmarks.workloads import make_workload
from stage_a_naive.checkpoints.loading import DTYPES, resolve

PEER_COLOUR = GREY  # engines of other projects
PANELS = ((STEP, "one request", "for one request"), (LOAD, "many requests of all lengths", "under load"))


def colour_of(engine: str) -> str:
    """Return a stage's colour by its letter, whatever its options."""
    return STAGES.get(engine.partition(" ")[0].partition(",")[0].partition("[")[0], PEER_COLOUR)


def plot_rates(group: Group) -> Picture | None:
    """Draw output tokens per second of every stage, with the factor against the stage before; None without figures."""
    measured = [(panel, found) for panel in PANELS if (found := rates(group, panel[0]))]
    if not measured:
        return None
    rows = [len(found) for _, found in measured]
    figure, findings = new_figure(8.4, 0.34 * sum(rows) + 0.95 * len(rows) + 0.6), []
    panels = figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0]
    for axes, ((column, title, words), found) in zip(panels, measured, strict=True):
        draw_engines(axes, group, column, found)
        axes.set_title(f"{title}: output tokens/s, and × the stage before", fontsize=11, loc="left", pad=18)
        first, *_, last = [engine for engine in found if colour_of(engine) != PEER_COLOUR] * 2
        findings.append(f"{last} makes {times(found[last] / found[first])} the tokens of {first} {words}")
    figure.suptitle(f"{group.model} on {group.device}:\n{', '.join(findings)}", fontsize=12)
    return Picture(figure, "output tokens per second of every engine")


def rates(group: Group, column: Column) -> dict[str, float]:
    """Map each measured engine to its output tokens per second; for one request, only decoding counts."""
    values = {engine: column.median(group, engine) for engine in front_rows(group)}
    return {engine: 1e3 / value if column is STEP else value for engine, value in values.items() if value}


def draw_engines(axes: Axes, group: Group, column: Column, found: dict[str, float]) -> None:
    """Draw a bar per engine, with its value and factor, and the hardware's limit."""
    names = [f"{engine} †" if engine in group.elsewhere else engine for engine in found]
    gains = [column.gain(group, engine) if engine in BEFORE else "–" for engine in found]
    texts = [number(v) + f", {gain}" * (gain != "–") for v, gain in zip(found.values(), gains, strict=True)]
    look = {"edgecolor": GREY, "linewidth": 0.5, "height": 0.7}
    draw_bars(axes, names, [(None, list(found.values()), list(map(colour_of, found)))], texts, **look)
    floor, longest = column.floor(group), max(found.values())
    end = 1.25 * longest
    if floor is not None:
        floor = 1e3 / floor if column is STEP else floor
        text, look = f"hardware limit: {number(floor)}", {"ha": "right", "va": "bottom", "fontsize": 9}
        if floor < 2.6 * longest:
            axes.axvline(floor, color="black", linestyle="--", linewidth=1.3)
            end = max(end, 1.02 * floor)
        else:  # a limit so far away would leave the half of the picture empty
            text += " →"
        axes.annotate(text, (min(floor, end) / end, 1.01), xycoords="axes fraction", **look)
    axes.set_xlim(0, end)
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    plain(axes, "x")


def draw_roofline(group: Group) -> Picture | None:
    """Draw each stage's rate in decode and prefill under the device's roofline; None if one was not measured."""
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
    rates = ("copy_bytes_per_s", "matmul_operations_per_s")
    bandwidth, arithmetic = (median(file["ceilings"][rate] for file in group.own) / 1e12 for rate in rates)
    ridge, left, right = arithmetic / bandwidth, 0.3, 30 * max(intensity for intensity, _ in phases.values())
    intensity, decode = phases["decode"]
    worst, *_, best = decode
    figure, axes = new_panel(
        8.4,
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
    return Picture(figure, "each stage's decode and prefill under the roof of bandwidth and arithmetic")
