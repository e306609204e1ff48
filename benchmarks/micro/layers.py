"""A decode step by the kinds of layers that stage F can run, over the rows of the batch (GPU).

A sample is a CUDA graph of one whole step, from the embedding to the logits, so what is timed is the device, not
Python; the weights of all layers are many times the L2 cache. Here it was measured up to how many rows each kind is the
fastest: `MEGAKERNEL_ROWS` and `SKINNY_GEMM_MAX_TOKENS`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks.micro import caption
from benchmarks.micro.decode_step import floor_seconds, launch_of, make_model, step_arguments
from benchmarks.pictures.picture import BLUE, GREEN, ORANGE, PINK, finish, new_panel
from benchmarks.text import markdown
from benchmarks.timing import graph_seconds
from stage_c_fused_mlp.fused_mlp import MOST_ROWS, load_operators
from stage_d_paged.attention import AttentionMetadata, pick_backend
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.model import DecoderModel
from stage_f_graph_tp.megakernel import Megakernel
from stage_f_graph_tp.megakernel.kernel import MAX_ROWS

README, MARKERS, NEEDS_GPU = "stage_f_graph_tp/kernels", ("layer-kernels", "layer-kernels-short"), True
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
SHORT_KINDS, SHORT_ROWS = ("stage D", "nine", "five", "one"), (1, 8, 32, 64, 96)  # in the lesson
COLUMNS = KINDS | {"floor": "floor"}


@torch.inference_mode()
def measure(models: str = ",".join(MODELS)) -> dict:
    """Every kind of layer at every number of rows."""
    from stage_f_graph_tp.kernels.fused_layers import fuse_layers  # here: Triton is needed on a GPU alone

    load_operators("cuda")
    found = []
    for name in models.split(","):
        for kind in KINDS:
            model = make_model(name, pick_backend("triton", torch.device("cuda"), torch.bfloat16, 128))
            if kind == "operator":
                for layer in model.layers:
                    layer.most_fused_rows = MOST_ROWS["cuda"]
            if kind in ("nine", "five"):
                fuse_layers(model, skinny_max_tokens=0 if kind == "nine" else max(ROWS))
            for rows in (rows for rows in ROWS if kind != "one" or rows <= MAX_ROWS):
                samples = graph_seconds([(one_launch if kind == "one" else step_of)(model, rows)], REPEATS, REPLAYS)
                found.append({"model": name, "kind": kind, "rows": rows, "samples": samples})
                print(f"{name:14} {kind:9} {rows:4} rows: {min(samples) * 1e6:7.1f} µs", flush=True)
    return {"rows": found}


def step_of(model: DecoderModel, rows: int) -> Callable[[], torch.Tensor]:
    """A decode step of `rows` requests on any layers."""
    ids, positions, slots, tables, lengths, pool = step_arguments(model.config, rows, CONTEXT, BLOCK_SIZE)
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    metadata = AttentionMetadata(starts, lengths, slots, tables, 1, LONGEST)
    config, blocks = model.config, pool.shape[2]
    cache = KVCache(
        config.num_layers, blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim, pool.dtype, pool.device
    )
    cache.tensor.copy_(pool)
    return lambda: model.compute_logits(model(ids, positions, cache, metadata))


def one_launch(model: DecoderModel, rows: int) -> Callable[[], None]:
    """The same step as one kernel."""
    return launch_of(Megakernel(model), step_arguments(model.config, rows, CONTEXT, BLOCK_SIZE))


def table(results: list[dict]) -> dict[str, list[str]]:
    """One line per number of rows, the fastest kind in bold: for the lesson the first model's, and everything."""
    result, lines = results[0], []
    copy = result["ceilings"]["copy_bytes_per_s"]
    for name in models_of(result):
        lines += [f"**{name}**, µs per step", "", *model_table(result, name, tuple(COLUMNS), ROWS), ""]
    note = (
        f"copies {copy / 1e12:.2f} TB/s, bfloat16, context {CONTEXT}; medians of {REPEATS} samples of {REPLAYS} replays"
    )
    first = models_of(result)[0]
    short = [f"![The time of a decode step of {first} by the number of rows, for each kind of layers](layers.png)", ""]
    short += model_table(result, first, SHORT_KINDS, SHORT_ROWS)
    below = ["", caption(result, note)]
    return {"layer-kernels": [*lines[:-1], *below], "layer-kernels-short": [*short, *below]}


def models_of(result: dict) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in result["rows"]))


def medians(result: dict, model: str) -> dict[int, dict[str, float]]:
    """Number of rows -> kind -> seconds per step."""
    found: dict[int, dict[str, float]] = {}
    for row in (row for row in result["rows"] if row["model"] == model):
        found.setdefault(row["rows"], {})[row["kind"]] = statistics.median(row["samples"])
    return found


def model_table(result: dict, model: str, columns: tuple[str, ...], shown: tuple[int, ...]) -> list[str]:
    """µs per step by number of rows; a column per kind of layers, the fastest in bold, and one for the floor."""
    body = []
    for rows, by_kind in medians(result, model).items():
        if rows not in shown:
            continue
        fastest = min((kind for kind in by_kind if kind in columns), key=by_kind.get)
        floor = floor_seconds(model, rows, CONTEXT, result["ceilings"]["copy_bytes_per_s"])
        cells = {name: f"{seconds * 1e6:.0f}" for name, seconds in (by_kind | {"floor": floor}).items()}
        cells[fastest] = f"**{cells[fastest]}**"
        body.append([rows, *(cells.get(column, "–") for column in columns)])
    return markdown(["rows", *(COLUMNS[column] for column in columns)], body)


def draw(results: list[dict]) -> dict[str, bytes]:
    """The time of a step over the rows, a line per kind of layers of the lesson, and the floor."""
    result = results[0]
    name = models_of(result)[0]
    found = medians(result, name)
    copy = result["ceilings"]["copy_bytes_per_s"]
    device = result["environment"]["device"]["name"]
    x_label = f"rows (one token per request); {name} on {device}"
    figure, axes = new_panel(10, 4, x_label, "µs per decode step")
    figure.suptitle("The fewer rows, the fewer launches a step should have", fontsize=12)
    for kind, colour, marker in zip(SHORT_KINDS, (ORANGE, GREEN, BLUE, PINK), "s^oD", strict=True):
        rows = [count for count, by_kind in found.items() if kind in by_kind]
        axes.plot(rows, [1e6 * found[count][kind] for count in rows], marker=marker, color=colour, label=KINDS[kind])
    floors = [1e6 * floor_seconds(name, count, CONTEXT, copy) for count in found]
    axes.plot(list(found), floors, "--", color="black", label="floor")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(found), list(map(str, found)))
    axes.set_ylim(0)
    axes.legend(frameon=False, ncols=5, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    return {"layers.png": finish(figure, "the time of a decode step over its rows, by the kind of its layers").png}
