"""The MLP block in several ways, timed on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.micro.mlp import random_layer
from benchmarks.pictures.picture import BLUE, GREEN, ORANGE, Picture, draw_lines, new_panel
from benchmarks.timing import call_seconds, measure_ceilings


def draw_block(
    ways: dict[str, Callable[..., Tensor]],
    hidden: int,
    inter: int,
    rows: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Picture:
    """Time `way(x, rms_weight, w_gate_up, w_down, residual, eps)` for every way and number of rows, and draw it.

    The floor is the time of reading the weights once at the speed of a copy, measured here too.
    """
    layer = random_layer(hidden, inter, dtype, torch.Generator(device).manual_seed(0))
    inputs = [torch.randn(count, hidden, device=device, dtype=dtype) for count in rows]
    lines = []
    for (name, way), colour, look in zip(ways.items(), (ORANGE, BLUE, GREEN), ("o-", "s-", "^-"), strict=False):
        samples = {len(x): call_seconds(partial(way, x, *layer, x, 1e-6), device, repeats=5) for x in inputs}
        lines.append((name, {count: 1e3 * statistics.median(s) for count, s in samples.items()}, colour, look))
    floor = sum(weight.nbytes for weight in layer) / measure_ceilings(device, torch.float32)["copy_bytes_per_s"]
    title = f"measured on this machine ({device.type})"
    figure, axes = new_panel(8, 3.8, "rows (tokens in the step)", "ms per layer", title)
    draw_lines(axes, lines)
    label = f"floor, the weights read once: {1e3 * floor:.2g} ms"
    axes.axhline(1e3 * floor, color="black", linestyle="--", label=label)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return Picture(figure, "the time of the MLP block over its rows, next to the time of reading its weights")
