"""A whole decode step with 8-bit weights and an 8-bit KV cache, next to bfloat16, by rows of the batch (GPU).

A sample is a CUDA graph of one step, from the embedding to the logits: what is timed is the device, not Python. The
bfloat16 step is stage F's, the persistent megakernel where it runs. The floor moves with the bytes: what one step must
read of weights, scales, keys and values, at the speed of a copy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks.micro import caption, timed
from benchmarks.micro.decode_step import launch_of, step_arguments, step_by_layers
from benchmarks.text import grid
from benchmarks.timing import graph_seconds
from beyond.options import Options
from beyond.quantization.kv_cache import QuantizedKVCache
from beyond.quantization.parts import load_quantized_runtime
from stage_a_naive.checkpoints.loading import resolve
from stage_d_paged.runtime import Runtime
from stage_f_graph_tp.megakernel import choose_decode_step, most_rows

NEEDS_GPU = True
ROWS = (1, 8, 32, 128)
CONTEXT, LONGEST, BLOCK_SIZE = 640, 4096, 64
REPLAYS, REPEATS = 10, 9
KINDS: dict[str, dict[str, object]] = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int8 + head": {"quantization": "int8", "quantize_lm_head": True},
    "int8 + head + KV": {"quantization": "int8", "quantize_lm_head": True, "kv_cache_dtype": "int8"},
}


@torch.inference_mode()
def measure(models: tuple[str, ...] = ("qwen2.5-0.5b", "qwen2.5-7b")) -> dict:
    """Every model in every format at every number of rows."""
    found = []
    for name in models:
        for kind, words in KINDS.items():
            options = Options(**words, max_model_len=LONGEST)
            source = resolve(f"random:{name}")
            runtime = load_quantized_runtime(source, options, torch.device("cuda"), torch.bfloat16)
            for rows in ROWS:
                sizes = {"weight_bytes": weight_bytes(runtime), "kv_bytes": runtime.bytes_per_token * CONTEXT * rows}
                step = step_of(runtime, rows, options.uses_eight_bits)
                samples = graph_seconds([step], REPEATS, REPLAYS)
                found.append(timed(samples, model=name, kind=kind, rows=rows, **sizes))
            del runtime
            torch.cuda.empty_cache()
    return {"rows": found}


def weight_bytes(runtime: Runtime) -> int:
    """What one step reads of the weights; of an embedding that is not the LM head, nothing to speak of."""
    model = runtime.model
    unread = set() if model.lm_head is model.embed_tokens else set(map(id, model.embed_tokens.parameters()))
    return sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values() if id(p) not in unread)


def step_of(runtime: Runtime, rows: int, eight_bits: bool) -> Callable[[], object]:
    """A decode step of `rows` requests, as the engine runs it."""
    arguments = step_arguments(runtime.model.config, rows, CONTEXT, BLOCK_SIZE)
    if not eight_bits and rows <= most_rows(runtime.config) and (kernel := choose_decode_step(runtime)) is not None:
        return launch_of(kernel, arguments)
    pool = arguments[-1]
    cache = runtime.make_pool(pool.shape[2])
    if isinstance(cache, QuantizedKVCache):
        cache.tensor.copy_(pool.clamp(-1, 1) * 100)
        cache.scales.fill_(0.01)
    else:
        cache.tensor.copy_(pool)
    return step_by_layers(runtime.model, arguments, cache, LONGEST)


def table(results: list[dict]) -> dict[str, list[str]]:
    """Milliseconds in each format, and how many times the floor of its bytes that is."""
    result, copy = results[0], results[0]["ceilings"]["copy_bytes_per_s"]
    cells = {}
    for row in result["rows"]:
        seconds = statistics.median(row["samples"])
        floor = (row["weight_bytes"] + row["kv_bytes"]) / copy
        cells[f"{row['model']}, {row['rows']}", row["kind"]] = f"{seconds * 1e3:.3f} ({seconds / floor:.2f} ×)"
    note = f"copies {copy / 1e12:.2f} TB/s, context {CONTEXT}; medians of {REPEATS} samples of {REPLAYS} replays"
    return {"quantized-step": [*grid("requests; ms (× its floor)", cells, [*KINDS]), "", caption(result, note)]}
