"""Stage C's operator on this machine, against its formula and the floor, by rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.micro.mlp import random_layer
from benchmarks.pictures.picture import BLUE, GREEN, ORANGE, Picture, draw_lines, finish, new_panel
from benchmarks.timing import call_seconds, measure_ceilings


def draw_block(
    ways: dict[str, Callable[..., Tensor]], hidden: int, inter: int, rows: Sequence[int], device: torch.device,
    dtype: torch.dtype, repeats: int = 5,
) -> Picture:  # fmt: skip
    """Time `way(x, rms_weight, w_gate_up, w_down, residual, eps)` for every way and number of rows, and draw it.

    The floor is the time of reading the weights once at the speed of a copy, measured here too.
    """
    layer = random_layer(hidden, inter, dtype, torch.Generator(device).manual_seed(0))
    figure, axes = new_panel(8, 3.8, "rows (tokens in the step)", f"ms per block, {device.type}")
    inputs = [torch.randn(count, hidden, device=device, dtype=dtype) for count in rows]
    lines = []
    for (name, way), colour, look in zip(ways.items(), (ORANGE, BLUE, GREEN), ("o-", "s-", "^-"), strict=False):
        samples = {len(x): call_seconds(partial(way, x, *layer, x, 1e-6), device, repeats) for x in inputs}
        lines.append((name, {count: 1e3 * statistics.median(s) for count, s in samples.items()}, colour, look))
    draw_lines(axes, lines)
    copy = measure_ceilings(device, torch.float32).copy_bytes_per_s
    floor = 1e3 * sum(weight.nbytes for weight in layer) / copy
    axes.axhline(floor, color="black", linestyle="--", label=f"weights read once: {floor:.2g} ms")
    axes.set_ylim(0)
    axes.legend(frameon=False)
    return finish(figure, "the time of the MLP block over the number of rows, next to the time of reading its weights")
