"""Stage C in pictures: variants of a kernel against what the memory can do, the operator against its formula."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.micro.mlp import random_layer, sizes
from benchmarks.pictures.picture import BLUE, GREEN, GREY, ORANGE, Picture, finish, new_panel
from benchmarks.results import of_kind
from benchmarks.timing import call_seconds, measure_ceilings

ORDER = {"naive": GREY, "library": ORANGE, "warp": GREEN, "fused": BLUE}
NAMES = {
    "naive": "naive\none block per row",
    "library": "library\nPyTorch, unfused",
    "warp": "warp\none launch per half",
    "fused": "fused\none launch",
}


def recorded_kernels() -> dict:
    """The newest committed measurement of the kernels on a GPU.

    Raises:
        FileNotFoundError: there is none.
    """
    found = of_kind("mlp")
    if not found:
        raise FileNotFoundError("benchmarks/results has no measurement of `python -m benchmarks.micro mlp`")
    return found[0]


def draw_variants(result: dict, model: str = "qwen2.5-0.5b", rows: int = 1) -> Picture:
    """Bytes of weights per second, for each kernel variant, under the line of the measured copy bandwidth."""
    found = {
        r["variant"]: statistics.median(r["samples"])
        for r in result["rows"]
        if (r["model"], r["rows"]) == (model, rows)
    }
    names = [name for name in ORDER if name in found]
    rates = [sizes(model)[-1] / found[name] / 1e12 for name in names]
    copy = result["ceilings"]["copy_bytes_per_s"] / 1e12
    title = f"MLP block of {model}, {rows} row{'s' * (rows > 1)}, {result['environment']['device']['name']}"
    figure, axes = new_panel(8, 4, "", "weights read, TB/s", title)
    axes.bar([NAMES[name] for name in names], rates, color=[ORDER[name] for name in names], width=0.6)
    for x, (name, rate) in enumerate(zip(names, rates, strict=True)):
        text = f"{found[name] * 1e6:,.1f} µs\n{100 * rate / copy:.2g} %"
        axes.annotate(text, (x, rate), xytext=(0, 3), textcoords="offset points", ha="center")
    axes.axhline(copy, color="black", linestyle="--")
    text = f"a copy on the same device: {copy:.2f} TB/s"
    axes.annotate(text, (-0.4, copy), xytext=(0, 4), textcoords="offset points")
    axes.set_ylim(0, 1.25 * copy)
    return finish(figure, "each variant of the kernel reads the weights faster; the line is the copy bandwidth")


def draw_block(
    ways: dict[str, Callable[..., Tensor]], hidden: int, inter: int, rows: Sequence[int], device: torch.device,
    dtype: torch.dtype, repeats: int = 5,
) -> Picture:  # fmt: skip
    """Time `way(x, rms_weight, w_gate_up, w_down, residual, eps)` for every way and number of rows, and draw it.

    The floor is the time of reading the weights once at the speed of a copy, measured here too.
    """
    layer = random_layer(hidden, inter, dtype, torch.Generator(device).manual_seed(0))
    figure, axes = new_panel(8, 3.8, "rows (tokens in the step)", f"ms per block, {device.type}")
    for (name, way), colour, marker in zip(ways.items(), (ORANGE, BLUE, GREEN), "os^", strict=False):
        inputs = [torch.randn(count, hidden, device=device, dtype=dtype) for count in rows]
        samples = [call_seconds(partial(way, x, *layer, x, 1e-6), device, repeats) for x in inputs]
        axes.plot(rows, [1e3 * statistics.median(s) for s in samples], f"{marker}-", color=colour, label=name)
    copy = measure_ceilings(device, torch.float32).copy_bytes_per_s
    floor = 1e3 * sum(weight.nbytes for weight in layer) / copy
    axes.axhline(floor, color="black", linestyle="--", label=f"weights read once: {floor:.2g} ms")
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(n) for n in rows])
    axes.set_ylim(0)
    axes.legend(frameon=False)
    return finish(figure, "the time of the MLP block over the number of rows, next to the time of reading its weights")
