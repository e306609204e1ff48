"""Drawings of recorded kernels: how many a step needs, of which kind, and the gaps between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from benchmarks.pictures.picture import BLUE, FAINT, GREY, PALETTE, Picture, draw_bars, finish, new_panel
from benchmarks.recording import Recording
from benchmarks.text import number

# The first kind whose words occur in a kernel's name; names are PyTorch's operators, or kernels of libraries and ours.
KINDS = (
    ("matrix products", ("mm", "gemm", "gemv", "matmul", "linear", "cutlass", "nvjet", "decode_step", "swiglu_mlp")),
    ("attention", ("scaled_dot_product", "flash", "fmha", "attend", "attention", "paged")),
    ("copies and joins", ("cat", "copy", "index", "memcpy", "memset", "scatter", "gather", "store", "clone", "fill")),
    ("sums, means, maxima", ("sum", "mean", "reduce", "argmax", "max", "norm", "softmax", "rsqrt")),
    ("element by element", ("",)),
)


def kind_of(name: str) -> str:
    """What sort of work a kernel does, by its name."""
    lowered = name.lower()
    return next(kind for kind, words in KINDS if any(word in lowered for word in words))


def draw_kinds(recordings: list[Recording]) -> Picture:
    """How many kernels one decode step runs, by kind, for each recording."""
    counts = {r.name: Counter(kind_of(span.name) for span in r.spans) for r in recordings}
    stacks = {r.name: {kind: counts[r.name][kind] / r.steps for kind, _ in KINDS} for r in recordings}
    totals = [f"{len(r.spans) / r.steps:.0f}" for r in recordings]
    return draw_stacks(stacks, totals, "kernels (on a CPU: operators that compute) in one decode step", GREY)


def draw_gaps(recordings: list[Recording], device: str, what: str = "decode step", title: str = "") -> Picture:
    """The kernels of a few steps on one time axis: a mark is work, grey is waiting."""
    longest = max(r.whole for r in recordings)
    scale, unit = (1e3, "ms") if longest > 2000 else (1, "µs")
    counted = f"{recordings[0].steps} {what}{'s' * (recordings[0].steps > 1)}"
    label = f"{unit}; {counted} on {device}, under the profiler, which slows the CPU down"
    figure, axes = new_panel(8.4, 0.9 * len(recordings) + 1.1, label, title=title, grid="")
    for lane, r in enumerate(recordings):
        axes.broken_barh([(0, r.whole / scale)], (lane - 0.33, 0.66), facecolor=FAINT, linewidth=0)
        spans: list[list[float]] = []  # what is nearer than can be seen is one mark
        for span in r.spans:
            if spans and span.start - sum(spans[-1]) < longest / 4000:
                spans[-1][1] = max(spans[-1][1], span.start + span.length - spans[-1][0])
            else:
                spans.append([span.start, span.length])
        spans = [[start / scale, length / scale] for start, length in spans]
        axes.broken_barh(spans, (lane - 0.33, 0.66), facecolor=BLUE, linewidth=0)
        text = (
            f"{r.name}: {len(r.spans) / r.steps:.0f} per {what}, {r.whole / r.steps / scale:.3g} {unit} per {what}, "
            f"at work {r.busy / r.whole:.0%} of the time"
        )
        axes.annotate(text, (0, lane - 0.36), va="bottom", fontsize=9)
    axes.set(ylim=(len(recordings) - 0.5, -0.65), xlim=(0, longest / scale), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.tick_params(colors=GREY, labelcolor="black")
    return finish(figure, f"when kernels run during each {what}, and the gaps between them")


def draw_parts(steps: Mapping[str, Mapping[str, float]], axis: str, title: str) -> Picture:
    """A bar per step on one time axis, {name: {part: µs}}; the last part is idle time."""
    stacks = {name: {part: micros / 1e3 for part, micros in found.items()} for name, found in steps.items()}
    totals = [(sum(found.values()), list(found.values())[-1]) for found in stacks.values()]
    return draw_stacks(stacks, [f"{number(t)} ms, {idle / t:.0%} idle" for t, idle in totals], axis, FAINT, title)


def draw_stacks(
    stacks: Mapping[str, Mapping[str, float]], texts: list[str], axis: str, last: str, title: str = ""
) -> Picture:
    """A bar per name, its parts one after another; `last` is the colour of the last part."""
    [parts] = {tuple(found) for found in stacks.values()}  # the same in each, in one order
    figure, axes = new_panel(8.4, 0.5 * len(stacks) + 1.8, axis, grid="x")
    colours = (*PALETTE[: len(parts) - 1], last)
    bars = [(p, [found[p] for found in stacks.values()], c) for p, c in zip(parts, colours, strict=True)]
    draw_bars(axes, list(stacks), bars, texts, room=1.25, edgecolor="#888888", linewidth=0.4, height=0.6)
    axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    figure.suptitle(title, fontsize=12)
    return finish(figure, f"the parts of {', '.join(stacks)}, one after another: {', '.join(parts)}")
