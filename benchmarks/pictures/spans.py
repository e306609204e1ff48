"""Drawings of recorded kernels: how many a step needs, of which kind, and the gaps between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from benchmarks.pictures.picture import BLUE, GREY, PALETTE, Picture, draw_bars, finish, new_panel
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
    x_label = "kernels (on a CPU: operators that compute) in one decode step"
    figure, axes = new_panel(9, 0.9 + 0.8 * len(recordings) + 0.6, x_label, grid="x")
    counts = [Counter(kind_of(span.name) for span in r.spans) for r in recordings]
    parts = [
        (kind, [count[kind] / r.steps for count, r in zip(counts, recordings, strict=True)], colour)
        for (kind, _), colour in zip(KINDS, (*PALETTE[:4], GREY), strict=True)
    ]
    totals = [f"{len(r.spans) / r.steps:.0f}" for r in recordings]
    draw_bars(axes, [r.name for r in recordings], parts, totals, room=1.1, height=0.55)
    axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    return finish(figure, "the number of kernels in a decode step, by kind of work")


def draw_gaps(recordings: list[Recording], device: str, what: str = "decode step", title: str = "") -> Picture:
    """The kernels of a few steps on one time axis: a mark is work, grey is waiting."""
    longest = max(r.whole for r in recordings)
    scale, unit = (1e3, "ms") if longest > 2000 else (1, "µs")
    counted = f"{recordings[0].steps} {what}{'s' * (recordings[0].steps > 1)}"
    label = f"{unit}; {counted} on {device}, under the profiler, which slows the CPU down"
    figure, axes = new_panel(10, 0.9 * len(recordings) + 1.1, label, title=title, grid="")
    for lane, r in enumerate(recordings):
        axes.broken_barh([(0, r.whole / scale)], (lane - 0.33, 0.66), facecolor="#eeeeee", linewidth=0)
        spans = [(s.start / scale, s.length / scale) for s in r.spans]
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
    """A bar per step on one time axis: its parts one after another, the idle time at the end.

    Args:
        steps: name -> part -> µs; the same parts in the same order for each, the last one idle time.
        axis: what the axis shows.
    """
    [parts] = {tuple(found) for found in steps.values()}
    figure, axes = new_panel(10, 0.5 * len(steps) + 1.8, axis, grid="x")
    colours = (*PALETTE[: len(parts) - 1], "#EEEEEE")
    bars = [(p, [found[p] / 1e3 for found in steps.values()], c) for p, c in zip(parts, colours, strict=True)]
    totals = {name: sum(found.values()) for name, found in steps.items()}
    texts = [f"{number(totals[n] / 1e3)} ms, {found[parts[-1]] / totals[n]:.0%} idle" for n, found in steps.items()]
    draw_bars(axes, list(steps), bars, texts, room=1.25, edgecolor="#888888", linewidth=0.4, height=0.6)
    axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    figure.suptitle(title, fontsize=12)
    return finish(figure, "the parts of a decode step, one after another")
