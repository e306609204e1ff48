"""A whole decode step with 8-bit weights and an 8-bit KV cache, next to bfloat16, by rows of the batch (GPU).

A sample is a CUDA graph of one step, from the embedding to the logits: what is timed is the device, not Python. The
bfloat16 step is stage F's, the persistent megakernel where it runs. The floor moves with the bytes: what one step must
read of weights, scales, keys and values, at the speed of a copy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks.micro import caption
from benchmarks.micro.decode_step import launch_of, step_arguments
from benchmarks.text import markdown
from benchmarks.timing import graph_seconds
from beyond.quantization.kv_cache import QuantizedKVCache
from beyond.quantization.layers import QuantizedMatrix
from beyond.quantization.options import QuantizationOptions
from beyond.quantization.runtime import load_quantized_runtime
from stage_a_naive.loading import resolve
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.runtime import Runtime
from stage_f_graph_tp.megakernel import MEGAKERNEL_ROWS, choose_decode_step

README, MARKERS, NEEDS_GPU = "beyond/quantization", ("quantized-step", "quantized-step-all"), True
MODELS = ("qwen2.5-0.5b", "qwen2.5-7b")
ROWS = (1, 8, 32, 128)
CONTEXT, LONGEST, BLOCK_SIZE = 640, 4096, 64
REPLAYS, REPEATS = 10, 9
KINDS: dict[str, dict[str, object]] = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int8 / 128": {"quantization": "int8", "quantization_group_size": 128},
    "int8 + head": {"quantization": "int8", "quantize_lm_head": True},
    "int8 + head + KV": {"quantization": "int8", "quantize_lm_head": True, "kv_cache_dtype": "int8"},
    "fp8 + head + KV": {"quantization": "fp8", "quantize_lm_head": True, "kv_cache_dtype": "fp8"},
}

SHOWN = ("bfloat16", "int8", "int8 + head", "int8 + head + KV")  # in the lessons
SHOWN_ROWS = (1, 32)  # in the first


@torch.inference_mode()
def measure(models: str = ",".join(MODELS), kinds: str = ",".join(SHOWN)) -> dict:
    """Every model in every format at every number of rows."""
    found = []
    for name in models.split(","):
        for kind in kinds.split(","):
            options = QuantizationOptions(**KINDS[kind], max_model_len=LONGEST)
            source = resolve(f"random:{name}")
            runtime = load_quantized_runtime(source, options, torch.device("cuda"), torch.bfloat16)
            for rows in ROWS:
                samples = graph_seconds([step_of(runtime, rows)], REPEATS, REPLAYS)
                found.append({"model": name, "kind": kind, "rows": rows, "weight_bytes": weight_bytes(runtime),
                              "kv_bytes": runtime.bytes_per_token * CONTEXT * rows, "samples": samples})  # fmt: skip
                print(f"{name:14} {kind:20} {rows:4} rows: {min(samples) * 1e6:8.1f} µs", flush=True)
            del runtime
            torch.cuda.empty_cache()
    return {"rows": found}


def weight_bytes(runtime: Runtime) -> int:
    """What one step reads of the weights; of an embedding that is not the LM head, nothing to speak of."""
    model = runtime.model
    unread = set() if model.lm_head is model.embed_tokens else set(map(id, model.embed_tokens.parameters()))
    return sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values() if id(p) not in unread)


def step_of(runtime: Runtime, rows: int) -> Callable[[], torch.Tensor]:
    """A decode step of `rows` requests, as the engine runs it."""
    model, config = runtime.model, runtime.model.config
    ids, positions, slots, tables, lengths, pool = step_arguments(config, rows, CONTEXT, BLOCK_SIZE)
    eight_bits = any(isinstance(module, QuantizedMatrix) for module in model.modules())
    if not eight_bits and rows <= MEGAKERNEL_ROWS and (kernel := choose_decode_step(runtime)) is not None:
        return launch_of(kernel, [ids, positions, slots, tables, lengths, pool])
    cache = runtime.make_pool(pool.shape[2])
    if isinstance(cache, QuantizedKVCache):
        cache.tensor.copy_(pool.clamp(-1, 1) * 100)
        cache.scales.fill_(0.01)
    else:
        cache.tensor.copy_(pool)
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    metadata = AttentionMetadata(starts, lengths, slots, tables, 1, LONGEST)
    return lambda: model.compute_logits(model(ids, positions, cache, metadata))


def table(results: list[dict]) -> dict[str, list[str]]:
    """Milliseconds in each format, and how many times the floor of its bytes that is; a few rows, and all."""
    result, everything = results[0], []
    copy = result["ceilings"]["copy_bytes_per_s"]
    found: dict[str, dict[int, dict[str, str]]] = {}
    for row in result["rows"]:
        seconds = statistics.median(row["samples"])
        floor = (row["weight_bytes"] + row["kv_bytes"]) / copy
        cells = found.setdefault(row["model"], {}).setdefault(row["rows"], {})
        cells[row["kind"]] = f"{seconds * 1e3:.3f} ({seconds / floor:.2f} ×)"
    body = [
        [f"{model}, {rows}", *(cells.get(kind, "–") for kind in SHOWN)]
        for model, by_rows in found.items() for rows, cells in by_rows.items() if rows in SHOWN_ROWS
    ]  # fmt: skip
    for model, by_rows in found.items():
        lines = [[rows, *(cells.get(kind, "–") for kind in SHOWN)] for rows, cells in by_rows.items()]
        everything += [f"**{model}**, ms per step (× its floor)", "", *markdown(["requests", *SHOWN], lines), ""]
    note = f"copies {copy / 1e12:.2f} TB/s, context {CONTEXT}; medians of {REPEATS} samples of {REPLAYS} replays"
    return {
        "quantized-step": [*markdown(["requests; ms (× its floor)", *SHOWN], body), "", caption(result, note)],
        "quantized-step-all": [*everything, caption(result, note)],
    }
