"""A decode step by the kinds of layers that stage F can run, over the rows of the batch (GPU).

A sample is a CUDA graph of one whole step, from the embedding to the logits, so what is timed is the device, not
Python; the weights of all layers are many times the L2 cache. Here it was measured up to how many rows each kind is the
fastest: `MEGAKERNEL_ROWS` (one launch) and `SKINNY_GEMM_MAX_TOKENS` (five launches).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks.micro import caption
from benchmarks.micro.decode_step import floor_seconds, make_model, step_arguments
from benchmarks.text import markdown
from benchmarks.timing import graph_seconds
from stage_c_fused_mlp.fused_mlp import MOST_ROWS, load_operators
from stage_d_paged.attention import AttentionMetadata, pick_backend
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.model import DecoderModel
from stage_f_graph_tp.megakernel import Megakernel
from stage_f_graph_tp.megakernel.kernel import MAX_ROWS

README, MARKERS, NEEDS_GPU = "stage_f_graph_tp/kernels", ("layer-kernels",), True
MODELS = ("qwen2.5-0.5b", "qwen3-0.6b")
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
CONTEXT, BLOCK_SIZE = 640, 64
LONGEST = 4096  # what the graphs are captured for
REPLAYS, REPEATS = 10, 9
KINDS = {
    "stage D": "stage D",
    "operator": "with stage C's operator",
    "nine": "nine launches",
    "five": "five launches",
    "one": "persistent megakernel",
}


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
    kernel = Megakernel(model)
    arguments = step_arguments(model.config, rows, CONTEXT, BLOCK_SIZE)
    logits = kernel.make_logits(rows)
    return lambda: kernel.step(*arguments, logits)


def table(results: list[dict]) -> dict[str, list[str]]:
    """One line per number of rows; the fastest kind in bold."""
    result, lines = results[0], []
    copy = result["ceilings"]["copy_bytes_per_s"]
    for name in dict.fromkeys(row["model"] for row in result["rows"]):
        found: dict[int, dict[str, float]] = {}
        for row in (row for row in result["rows"] if row["model"] == name):
            found.setdefault(row["rows"], {})[row["kind"]] = statistics.median(row["samples"])
        body = []
        for rows, by_kind in found.items():
            fastest = min(by_kind, key=by_kind.get)
            shown = {kind: f"{seconds * 1e6:.0f}" for kind, seconds in by_kind.items()}
            shown[fastest] = f"**{shown[fastest]}**"
            floor = floor_seconds(name, rows, CONTEXT, copy)
            body.append([rows, *(shown.get(kind, "–") for kind in KINDS), f"{floor * 1e6:.0f}"])
        lines += [f"**{name}**, µs per step", "", *markdown(["rows", *KINDS.values(), "floor"], body), ""]
    note = (
        f"copies {copy / 1e12:.2f} TB/s, bfloat16, context {CONTEXT}; medians of {REPEATS} samples of {REPLAYS} replays"
    )
    return {"layer-kernels": [*lines, caption(result, note)]}
