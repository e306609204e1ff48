"""A decode step with each kind of layers that stage F can run, by the number of rows (GPU).

A sample is a CUDA graph of one whole step, from the embedding to the logits, so the device is timed, not Python. The
weights of all layers are many times the L2 cache. This study determined up to how many rows each kind is the fastest:
`most_rows` of the megakernel and `skinny_limit`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.micro import timed
from benchmarks.micro.decode_step import floor_seconds, launch_of, make_model, step_arguments, step_by_layers
from benchmarks.render import Record, records
from benchmarks.timing import graph_seconds
from stage_c_fused_mlp.fused_mlp import MOST_ROWS, load_operators
from stage_d_paged.attention import pick_backend
from stage_d_paged.kv_cache import KVCache, PoolShape
from stage_d_paged.model import DecoderModel
from stage_f_graph_tp.megakernel import Megakernel
from stage_f_graph_tp.megakernel.kernel import MAX_ROWS

NEEDS_GPU = True
MODELS = ("qwen2.5-0.5b", "qwen3-0.6b")
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256)
CONTEXT, BLOCK_SIZE = 640, 64
LONGEST = 4096  # context that the graphs are captured for
REPLAYS, REPEATS = 10, 9
KINDS = {  # by their names in the files of results
    "stage D": "stage D",
    "operator": "with stage C's operator",
    "nine": "element-wise fusion",
    "five": "skinny GEMM",
    "one": "persistent megakernel",
}


@torch.inference_mode()
def measure(models: tuple[str, ...] = MODELS) -> dict:
    """Time every kind of layers at every number of rows."""
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
    """Make a decode step of `rows` requests."""
    arguments, config = step_arguments(model.config, rows, CONTEXT, BLOCK_SIZE), model.config
    if kind == "one":
        return launch_of(Megakernel(model), arguments)
    pool = arguments[-1]
    shape = config.num_layers, pool.shape[2], BLOCK_SIZE, config.num_kv_heads, config.head_dim
    cache = KVCache(PoolShape(*shape, pool.dtype, pool.device))
    cache.tensor.copy_(pool)
    return step_by_layers(model, arguments, cache, LONGEST)


DRAWN = {kind: name for kind, name in KINDS.items() if kind != "operator"} | {"floor": "floor"}


def with_floors(result: dict) -> list[Record]:
    """Return the kinds of layers, the fastest last, and the floor as one more kind."""
    found, copy = records(result), result["ceilings"]["copy_bytes_per_s"]
    counts = {(row["model"], row["rows"]) for row in found}
    floors = [(model, rows, 1e6 * floor_seconds(model, rows, CONTEXT, copy)) for model, rows in sorted(counts)]
    return found + [{"model": model, "rows": rows, "kind": "floor", "us": us} for model, rows, us in floors]
