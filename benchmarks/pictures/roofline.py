"""The roofline: how fast each stage computes in decode and in prefill, and what the device allows; from the results."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.floor import Ceilings, ModelCost
from benchmarks.groups import Group
from benchmarks.pictures.picture import finish, new_figure, plain
from benchmarks.pictures.rates import colour_of
from benchmarks.workloads import make_workload
from stage_a_naive.loading import DTYPES, resolve

ENGINES = ("A", "B", "B compiled", "C", "C compiled", "D", "E", "F")


@dataclass(frozen=True)
class Point:
    """One engine at one piece of work."""

    engine: str
    phase: str
    intensity: float  # operations per byte that must move
    rate: float  # operations per second


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
        Point(engine, phase, work.operations / work.num_bytes, work.operations / (count * ms / 1e3))
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
    ridge = ceilings.matmul_operations_per_s / ceilings.copy_bytes_per_s
    figure = new_figure(9, 4.8)
    axes = figure.subplots()
    left, right = 0.3, 30 * max(point.intensity for point in found)
    axes.plot(
        [left, ridge, right],
        [left * ceilings.copy_bytes_per_s / 1e12, *[ceilings.matmul_operations_per_s / 1e12] * 2],
        color="black",
        linewidth=1.5,
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    for phase in phases:
        column = sorted((p for p in found if p.phase == phase), key=lambda p: p.rate)
        for neighbours in close_together(column):
            for point in neighbours:
                colour = colour_of(point.engine)
                axes.plot(point.intensity, point.rate / 1e12, "o", color=colour, markeredgecolor="black", markersize=8)
            first = neighbours[0]
            axes.annotate(
                ", ".join(point.engine for point in neighbours), (first.intensity, first.rate / 1e12),
                xytext=(9, 1), textcoords="offset points", va="center", fontsize=9,
            )  # fmt: skip
        at = (column[0].intensity, column[0].rate / 1e12)
        axes.annotate(phase, at, xytext=(0, -18), textcoords="offset points", ha="center", style="italic")
    bandwidth, arithmetic = ceilings.copy_bytes_per_s, ceilings.matmul_operations_per_s
    memory = f"{bandwidth / 1e12:.3g} TB/s" if bandwidth > 1e12 else f"{bandwidth / 1e9:.3g} GB/s"
    slope = (ridge * left) ** 0.5  # where its label is: half-way up
    roofs = (
        (f"memory: {memory}", slope, slope * bandwidth, (8, -10)),
        (f"arithmetic: {arithmetic / 1e12:.3g} TFLOP/s", ridge, arithmetic, (0, 8)),
    )
    for text, x, y, offset in roofs:
        axes.annotate(text, (x, y / 1e12), xytext=offset, textcoords="offset points", fontsize=9)
    axes.set_ylim(min(point.rate for point in found) / 4e12, 3 * ceilings.matmul_operations_per_s / 1e12)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("operations per byte that must move")
    axes.set_ylabel("TFLOP/s achieved")
    worst = min((p for p in found if p.phase == "decode"), key=lambda p: p.rate)
    best = max((p for p in found if p.phase == "decode"), key=lambda p: p.rate)
    roof = best.intensity * ceilings.copy_bytes_per_s
    axes.set_title(
        f"Memory bandwidth limits decode: {worst.engine} reaches {worst.rate / roof:.1%} of it, "
        f"{best.engine} {best.rate / roof:.0%} ({group.device})",
        fontsize=11,
    )
    plain(axes, "both")
    return finish(figure, "each stage's decode and prefill under the roof of bandwidth and arithmetic", dpi=100).png
