"""The MLP block in several ways, timed on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import median

import torch
from torch import Tensor

from benchmarks.micro import one_thread, take_turns
from benchmarks.micro.mlp import random_layer
from benchmarks.pictures.picture import BLUE, GREEN, ORANGE, Picture, draw_lines, new_panel
from benchmarks.results import of_kind
from benchmarks.timing import call_seconds, measure_ceilings


def h200_ceilings() -> tuple[float, float]:
    """Return operations and bytes per second of an H200, as the lessons print them: medians of the overview's files."""
    found = [
        file["ceilings"]
        for file in of_kind("engines")
        if file["options"]["model"] == "random:qwen2.5-0.5b" and not file["options"].get("study")
    ]
    return tuple(median(own[name] for own in found) for name in ("matmul_operations_per_s", "copy_bytes_per_s"))


@one_thread()
def draw_block(
    ways: dict[str, Callable[..., Tensor]],
    hidden: int,
    inter: int,
    rows: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Picture:
    """Time `way(x, rms_weight, w_gate_up, w_down, residual, eps)` for every way and number of rows, and draw it.

    Each time is the shortest of several, which other programs disturb least; a CPU computes on one thread. On a GPU the
    floor is drawn too, the time of reading the weights once at the speed of a copy: a CPU's caches may hold them.
    """
    layer = random_layer(hidden, inter, dtype, torch.Generator(device).manual_seed(0))
    inputs = [torch.randn(count, hidden, device=device, dtype=dtype) for count in rows]

    def seconds(case: tuple[str, int]) -> float:
        name, index = case
        x = inputs[index]
        return min(call_seconds(partial(ways[name], x, *layer, x, 1e-6), device, repeats=3))

    found = take_turns(seconds, list(product(ways, range(len(rows)))), repeats=5)
    lines = []
    for name, colour, look in zip(ways, (ORANGE, BLUE, GREEN), ("o-", "s-", "^-"), strict=False):
        times_ms = {count: 1e3 * min(found[name, index]) for index, count in enumerate(rows)}
        lines.append((name, times_ms, colour, look))
    title = f"measured on this machine ({device.type}{', one thread' * (device.type == 'cpu')})"
    figure, axes = new_panel(8, 3.8, "rows (tokens in the step)", "ms per layer", title)
    draw_lines(axes, lines)
    if device.type == "cuda":
        floor = sum(weight.nbytes for weight in layer) / measure_ceilings(device, torch.float32)["copy_bytes_per_s"]
        label = f"floor, the weights read once: {1e3 * floor:.2g} ms"
        axes.axhline(1e3 * floor, color="black", linestyle="--", label=label)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    drawn = [f"{name}: {', '.join(f'{ms:.3g}' for ms in times_ms.values())}" for name, times_ms, *_ in lines]
    of_rows = f"ms for {', '.join(map(str, rows))} rows"
    return Picture(figure, f"the time of the MLP block over its rows; {of_rows}; {'; '.join(drawn)}")
