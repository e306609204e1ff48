"""Stage C's MLP block by each kernel variant, next to what the memory can do (GPU).

For a few tokens bandwidth is the limit: the block's weights must be read once, and nothing else is large. A sample
is a CUDA graph of one call per layer, each with weights of its own and fed by the call before, as in a model: the
weights of all layers are many times the L2 cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.micro import caption, device_name, timed
from benchmarks.pictures.picture import BLUE, GREEN, ORANGE, Picture, draw_lines, finish, new_panel, new_panels
from benchmarks.text import grid, medians, number
from benchmarks.timing import call_seconds, graph_seconds, measure_ceilings
from stage_a_naive.presets import preset_config
from stage_c_fused_mlp.fused_mlp import fused_swiglu_mlp, load_operators

README, MARKERS, NEEDS_GPU = "stage_c_fused_mlp", ("kernel-table",), True
EPS, REPEATS, REPLAYS = 1e-6, 20, 10
MODELS = ("qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b")
ROWS, SHOWN_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64), (1, 4, 16, 64)  # measured, and in the table
VARIANTS = {"naive": "naive", "library": "library (unfused)", "warp": "warp", "fused": "fused"}  # and their names
NAIVE_ROWS = (1, 16)  # it needs milliseconds, and one row says what there is to say


def sizes(model: str) -> tuple[int, int, int, int]:
    """(hidden, intermediate, layers, bytes of a layer's gate, up and down in bfloat16)."""
    config = preset_config(model)
    hidden, inter = config.hidden_size, config.intermediate_size
    return hidden, inter, config.num_hidden_layers, 2 * 3 * hidden * inter


def measure(models: tuple[str, ...] = MODELS) -> dict:
    """Every shape, number of rows and variant, in bfloat16."""
    load_operators("cuda")
    rows = []
    for model in models:
        hidden, inter, num_layers, _ = sizes(model)
        generator = torch.Generator("cuda").manual_seed(0)
        layers = [random_layer(hidden, inter, torch.bfloat16, generator) for _ in range(num_layers)]
        for count in ROWS:
            for variant in VARIANTS:
                if variant != "naive" or count in NAIVE_ROWS:
                    rows.append(timed(time_block(layers, count, variant), model=model, rows=count, variant=variant))
        del layers
    return {"rows": rows}


def random_layer(hidden: int, inter: int, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """rms_weight, w_gate_up, w_down; scaled so that activations keep their size through the layers."""

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator, device=generator.device) * scale).to(dtype)

    gate_up = normal(2 * inter, hidden, scale=hidden**-0.5)
    return [1 + normal(hidden, scale=0.1), gate_up, normal(hidden, inter, scale=inter**-0.5)]


def time_block(layers: list[list[Tensor]], rows: int, variant: str) -> list[float]:
    """Seconds per layer."""
    hidden = torch.randn(rows, len(layers[0][0]), device="cuda").to(torch.bfloat16)

    def forward() -> Tensor:
        x = hidden
        for norm, gate_up, down in layers:
            x = fused_swiglu_mlp(x, norm, gate_up, down, x, EPS, variant)
        return x

    repeats, replays = (3, 1) if variant == "naive" else (REPEATS, REPLAYS)
    return [seconds / len(layers) for seconds in graph_seconds([forward], repeats, replays)]


def table(results: list[dict]) -> dict[str, list[str]]:
    """Time per layer of the first model by number of rows and kernel variant."""
    result, model = results[0], results[0]["rows"][0]["model"]
    hidden, inter, _, num_bytes = sizes(model)
    copy = result["ceilings"]["copy_bytes_per_s"]
    floor = num_bytes / copy
    cells = {
        (rows, variant): f"{seconds * 1e6:.1f}, {number(seconds / floor)} ×"
        for (own, rows, variant), seconds in medians(result["rows"], "model", "rows", "variant").items()
        if own == model and rows in SHOWN_ROWS
    }
    size = f"hidden {hidden}, intermediate {inter}; {num_bytes / 1e6:.1f} MB per layer, floor {floor * 1e6:.1f} µs"
    note = (
        f"µs per layer and × the floor, at the copy bandwidth measured in the same run ({copy / 1e12:.2f} TB/s); "
        f"bfloat16, one call per layer in a CUDA graph, weights of all layers in turn; median of {REPEATS} samples"
    )
    lines = grid("rows", cells, {key: f"{name}: µs, × floor" for key, name in VARIANTS.items()})
    return {"kernel-table": [f"**{model}**: {size}", "", *lines, "", caption(result, note)]}


def draw(results: list[dict]) -> dict[str, bytes]:
    """A panel for each of two models: time against rows, with the floor; the naive kernel is far above the picture."""
    result, shown = results[0], (MODELS[0], MODELS[-1])
    times = medians(result["rows"], "model", "variant", "rows")
    floors = {model: sizes(model)[-1] / result["ceilings"]["copy_bytes_per_s"] * 1e6 for model in shown}
    faster = [n for n in ROWS if all(times[m, "fused", n] < times[m, "library", n] for m in shown)]
    figure, panels = new_panels(
        9.5, 4.4, *({"title": f"{model}, floor {floors[model]:.1f} µs"} for model in shown),
        title=f"Up to {max(faster)} rows the fused kernel is faster than the unfused chain "
              f"({device_name(result)}, bfloat16)",
    )  # fmt: skip
    for axes, (model, floor) in zip(panels, floors.items(), strict=True):
        draw_lines(axes, [
            (VARIANTS[name],
             {rows: 1e6 * time for (*of, rows), time in times.items() if of == [model, name]}, colour, look)
            for name, colour, look in (("library", ORANGE, "s-"), ("warp", GREEN, "^-"), ("fused", BLUE, "o-"))
        ])  # fmt: skip
        axes.axhline(floor, color="black", linestyle="--", label="floor: weights read once")
        axes.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
        axes.set(ylim=(0, 5 * floor), xlabel="rows", ylabel="µs per layer")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return {"kernels.png": finish(figure, "time of the MLP block against rows, by kernel variant", dpi=100).png}


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
