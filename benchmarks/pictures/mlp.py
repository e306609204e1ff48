"""Stage C in pictures: variants of a kernel against what the memory can do, the operator against its formula."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one MLP block by the number of rows, for several ways to compute it."""

    device: str
    rows: list[int]
    seconds: dict[str, list[float]]
    weight_bytes: int


def measure_block(
    ways: dict[str, Callable[..., Tensor]],
    hidden: int,
    inter: int,
    rows: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    repeats: int = 5,
) -> BlockTimes:
    """Time `way(x, rms_weight, w_gate_up, w_down, residual, eps)` for every way and number of rows; medians."""
    layer = random_layer(hidden, inter, dtype, torch.Generator(device).manual_seed(0))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for count in rows:
        x = torch.randn(count, hidden, device=device, dtype=dtype)
        for name, way in ways.items():
            call = partial(way, x, *layer, x, 1e-6)
            found[name].append(statistics.median(call_seconds(call, device, repeats)))
    return BlockTimes(device.type, list(rows), found, sum(weight.nbytes for weight in layer))


def measure_copy(device: torch.device) -> float:
    """Bytes per second, read and written together, of a large copy on the device."""
    return measure_ceilings(device, torch.float32).copy_bytes_per_s


def draw_block(times: BlockTimes, copy_bytes_per_s: float) -> Picture:
    """Time over rows, with the floor: the weights read once at the speed of a copy."""
    figure, axes = new_panel(8, 3.8, "rows (tokens in the step)", f"ms per block, {times.device}")
    for (name, seconds), colour, marker in zip(times.seconds.items(), (ORANGE, BLUE, GREEN), "os^", strict=False):
        axes.plot(times.rows, [1e3 * s for s in seconds], f"{marker}-", color=colour, label=name)
    floor = 1e3 * times.weight_bytes / copy_bytes_per_s
    axes.axhline(floor, color="black", linestyle="--", label=f"weights read once: {floor:.2g} ms")
    axes.set_xscale("log", base=2)
    axes.set_xticks(times.rows, [str(n) for n in times.rows])
    axes.set_ylim(0)
    axes.legend(frameon=False)
    return finish(figure, "the time of the MLP block over the number of rows, next to the time of reading its weights")
