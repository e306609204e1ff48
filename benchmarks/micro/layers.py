"""A decode step by the kinds of layers that stage F can run, over the rows of the batch (GPU).

A sample is a CUDA graph of one whole step, from the embedding to the logits, so what is timed is the device, not
Python; the weights of all layers are many times the L2 cache. Here it was measured up to how many rows each kind is the
fastest: `most_rows` of the megakernel and `SKINNY_GEMM_MAX_TOKENS`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.micro import caption, device_name, timed
from benchmarks.micro.decode_step import floor_seconds, launch_of, make_model, step_arguments, step_by_layers
from benchmarks.pictures.picture import BLUE, GREEN, ORANGE, PINK, Picture, draw_lines, finish, new_panel
from benchmarks.text import grid, medians, sections
from benchmarks.timing import graph_seconds
from stage_c_fused_mlp.fused_mlp import MOST_ROWS, load_operators
from stage_d_paged.attention import pick_backend
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.model import DecoderModel
from stage_f_graph_tp.megakernel import Megakernel
from stage_f_graph_tp.megakernel.kernel import MAX_ROWS

NEEDS_GPU = True
MODELS = ("qwen2.5-0.5b", "qwen3-0.6b")
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
CONTEXT, BLOCK_SIZE = 640, 64
LONGEST = 4096  # what the graphs are captured for
REPLAYS, REPEATS = 10, 9
KINDS = {  # by their names in the files of results
    "stage D": "stage D",
    "operator": "with stage C's operator",
    "nine": "element-wise fusion",
    "five": "skinny GEMM",
    "one": "persistent megakernel",
}
COLUMNS = KINDS | {"floor": "floor"}
DRAWN = ("stage D", "nine", "five", "one", "floor")


@torch.inference_mode()
def measure(models: tuple[str, ...] = MODELS) -> dict:
    """Every kind of layer at every number of rows."""
    from stage_f_graph_tp.kernels.fused_layers import fuse_layers  # here: Triton is needed on a GPU alone

    load_operators("cuda")
    found = []
    for name in models:
        for kind in KINDS:
            model = make_model(name, pick_backend("triton", torch.device("cuda"), torch.bfloat16, 128))
            if kind == "operator":
                for layer in model.layers:
                    layer.most_fused_rows = MOST_ROWS["cuda"]
            if kind in ("nine", "five"):
                fuse_layers(model, skinny_max_tokens=0 if kind == "nine" else max(ROWS))
            for rows in (rows for rows in ROWS if kind != "one" or rows <= MAX_ROWS):
                samples = graph_seconds([step_of(model, kind, rows)], REPEATS, REPLAYS)
                found.append(timed(samples, model=name, kind=kind, rows=rows))
    return {"rows": found}


def step_of(model: DecoderModel, kind: str, rows: int) -> Callable[[], object]:
    """A decode step of `rows` requests."""
    arguments, config = step_arguments(model.config, rows, CONTEXT, BLOCK_SIZE), model.config
    if kind == "one":
        return launch_of(Megakernel(model), arguments)
    pool = arguments[-1]
    cache = KVCache(
        config.num_layers, pool.shape[2], BLOCK_SIZE, config.num_kv_heads, config.head_dim, pool.dtype, pool.device
    )
    cache.tensor.copy_(pool)
    return step_by_layers(model, arguments, cache, LONGEST)


def table(results: list[dict]) -> dict[str, list[str]]:
    """One line per model and number of rows, the fastest kind in bold."""
    result, copy = results[0], results[0]["ceilings"]["copy_bytes_per_s"]
    models = dict.fromkeys(row["model"] for row in result["rows"])
    tables = {f"**{name}**, µs per step": model_table(result, name) for name in models}
    samples = f"medians of {REPEATS} samples of {REPLAYS} replays"
    below = caption(result, f"copies {copy / 1e12:.2f} TB/s, bfloat16, context {CONTEXT}; {samples}")
    return {"layer-kernels": [*sections(tables), below]}


def micros(result: dict, model: str) -> dict[tuple[int, str], float]:
    """(rows, kind) -> µs per step; the floor is a kind too."""
    found = medians([row for row in result["rows"] if row["model"] == model], "rows", "kind")
    copy = result["ceilings"]["copy_bytes_per_s"]
    found |= {(rows, "floor"): floor_seconds(model, rows, CONTEXT, copy) for rows, _ in found}
    return {key: 1e6 * seconds for key, seconds in found.items()}


def model_table(result: dict, model: str) -> list[str]:
    """µs per step by number of rows; a column per kind of layers, the fastest in bold."""
    found = micros(result, model)
    cells = {key: f"{time:.0f}" for key, time in found.items()}
    for rows in {rows for rows, _ in found}:
        fastest = min((key for key in found if key[0] == rows and key[1] != "floor"), key=found.get)
        cells[fastest] = f"**{cells[fastest]}**"
    return grid("rows", cells, COLUMNS)


def draw(results: list[dict]) -> dict[str, Picture]:
    """The time of a step over the rows, a line per kind of layers of the lesson, and the floor."""
    result, name = results[0], results[0]["rows"][0]["model"]
    found, device = micros(result, name), device_name(result)
    figure, axes = new_panel(10, 4, f"rows (one token per request); {name} on {device}", "µs per decode step")
    figure.suptitle("The fewer rows, the fewer launches a step should have", fontsize=12)
    colours = (ORANGE, GREEN, BLUE, PINK, "black")
    draw_lines(
        axes,
        [
            (COLUMNS[kind], {rows: time for (rows, own), time in found.items() if own == kind}, colour, look)
            for kind, colour, look in zip(DRAWN, colours, ("s-", "^-", "o-", "D-", "--"), strict=True)
        ],
    )
    axes.set_ylim(0)
    axes.legend(frameon=False, ncols=5, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    text = "the time of a decode step over its rows, by the kind of its layers"
    return {"stage_f_graph_tp/kernels/layers.png": finish(figure, text)}
