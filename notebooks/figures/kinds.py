"""How many kernels of each kind a decode step runs."""

from __future__ import annotations

from collections import Counter

from benchmarks.pictures.picture import GREY, PALETTE, Picture, draw_bars, new_panel
from benchmarks.trace import Recording

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
    counts = [Counter(kind_of(span.name) for span in r.spans) for r in recordings]
    figure, axes = new_panel(
        8.4, 0.5 * len(recordings) + 1.8, "kernels (on a CPU: operators that compute) in one decode step"
    )
    colours = dict(zip((kind for kind, _ in KINDS), (*PALETTE[: len(KINDS) - 1], GREY), strict=True))
    steps = [r.steps for r in recordings]
    bars = [(k, [own[k] / n for own, n in zip(counts, steps, strict=True)], colour) for k, colour in colours.items()]
    totals = [f"{len(r.spans) / r.steps:.0f}" for r in recordings]
    draw_bars(axes, [r.name for r in recordings], bars, totals, edgecolor="#888888", linewidth=0.4, height=0.6)
    figure.legend(loc="outside upper center", frameon=False, ncols=3, fontsize=9)
    counted = [
        f"{r.name}: {', '.join(f'{own[kind] / r.steps:.0f} {kind}' for kind in colours if own[kind])}"
        for r, own in zip(recordings, counts, strict=True)
    ]
    return Picture(figure, f"kernels in one decode step, by kind; {'; '.join(counted)}")
