"""The roofline: how fast each stage computes in decode and in prefill, and what the device allows; from the results."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.floor import Ceilings, ModelCost
from benchmarks.groups import Group
from benchmarks.pictures.picture import finish, new_panel
from benchmarks.pictures.rates import colour_of
from benchmarks.workloads import make_workload
from stage_a_naive.loading import DTYPES, resolve

ENGINES = ("A", "B", "B compiled", "C", "C compiled", "D", "E", "F")


class Point(NamedTuple):
    """One engine at one piece of work."""

    engine: str
    phase: str
    intensity: float  # operations per byte that must move
    rate: float  # operations per second, in trillions


def points(group: Group) -> list[Point]:
    """Every stage's decode step of `single` and its prefill of a thousand tokens, as far as they were measured."""
    cost = ModelCost(resolve(group.model).config, DTYPES[group.dtype].itemsize)
    whole = next(call for call in make_workload("single", group.size).rounds[0] if call.tag == "all")
    prompts = make_workload("ttft", group.size).rounds[0]
    prompt = min((call for call in prompts if call.prompt_tokens >= 1000), key=lambda call: call.prompt_tokens)
    pieces = (
        ("decode", cost.decode(whole), "single", "tpot_ms", whole.output_tokens),
        (f"prefill of {prompt.prompt_tokens:,} tokens", cost.prefill(prompt), "ttft", f"ttft_{prompt.tag}_ms", 1),
    )
    return [
        Point(engine, phase, work.operations / work.num_bytes, work.operations / (count * ms / 1e3) / 1e12)
        for phase, work, workload, figure, count in pieces
        for engine in ENGINES
        if (ms := group.median(engine, workload, figure))
    ]


def close_together(column: list[Point]) -> list[list[Point]]:
    """Split points, slowest first, into groups whose dots would overlap and share one label."""
    groups: list[list[Point]] = []
    for point in column:
        if groups and point.rate < 1.35 * groups[-1][0].rate:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def draw_roofline(group: Group) -> bytes | None:
    """The roof of the device and every stage's points under it; None without both phases."""
    found = points(group)
    phases = list(dict.fromkeys(point.phase for point in found))
    if len(phases) < 2:
        return None
    ceilings = Ceilings(**group.own[-1]["ceilings"])
    bandwidth, arithmetic = ceilings.copy_bytes_per_s / 1e12, ceilings.matmul_operations_per_s / 1e12
    ridge, left, right = arithmetic / bandwidth, 0.3, 30 * max(point.intensity for point in found)
    decodes = sorted((p for p in found if p.phase == "decode"), key=lambda p: p.rate)
    worst, best = decodes[0], decodes[-1]
    roof = best.intensity * bandwidth
    figure, axes = new_panel(
        9, 4.8, "operations per byte that must move", "TFLOP/s achieved",
        f"Memory bandwidth limits decode: {worst.engine} reaches {worst.rate / roof:.1%} of it, "
        f"{best.engine} {best.rate / roof:.0%} ({group.device})", grid="both",
    )  # fmt: skip
    axes.plot([left, ridge, right], [left * bandwidth, arithmetic, arithmetic], color="black", linewidth=1.5)
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(min(p.rate for p in found) / 4, 3 * arithmetic))

    def write(text: str, x: float, y: float, offset: tuple[int, int], **look: object) -> None:
        axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", **look)

    for phase in phases:
        column = sorted((p for p in found if p.phase == phase), key=lambda p: p.rate)
        for point in column:
            colour = colour_of(point.engine)
            axes.plot(point.intensity, point.rate, "o", color=colour, markeredgecolor="black", markersize=8)
        for first, *others in close_together(column):
            names = ", ".join(point.engine for point in (first, *others))
            write(names, first.intensity, first.rate, (9, 1), va="center", fontsize=9)
        write(phase, column[0].intensity, column[0].rate, (0, -18), ha="center", style="italic")
    memory = f"{bandwidth:.3g} TB/s" if bandwidth > 1 else f"{1e3 * bandwidth:.3g} GB/s"
    slope = (ridge * left) ** 0.5  # where its label is: half-way up
    write(f"memory: {memory}", slope, slope * bandwidth, (8, -10), fontsize=9)
    write(f"arithmetic: {arithmetic:.3g} TFLOP/s", ridge, arithmetic, (0, 8), fontsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    return finish(figure, "each stage's decode and prefill under the roof of bandwidth and arithmetic", dpi=100).png
