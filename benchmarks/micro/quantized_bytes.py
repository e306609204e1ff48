"""What one decode step reads in 16 and in 8 bits, and how many sequences fit; counted, nothing is timed.

*Read* follows from the shapes of the models: matrices with their scales, the LM head, keys and values. For *fit* the
engine loads each model on a device that has shapes and no memory (PyTorch's `meta`), so the bytes of weights and of KV
cache are those of its own tensors. The pool is the engine's share of the memory less the weights, in whole blocks. On a
GPU the engine also measures what the activations of the largest step take, so somewhat fewer sequences fit there.
"""

from __future__ import annotations

import torch

from benchmarks.text import markdown
from beyond.options import Options
from beyond.quantization.floor import QuantizedBytes
from beyond.quantization.parts import load_quantized_runtime
from stage_a_naive.checkpoints.loading import resolve
from stage_a_naive.checkpoints.presets import preset_config
from stage_a_naive.floor import ModelBytes
from stage_d_paged.kv_cache import blocks_that_fit
from stage_d_paged.runtime import Runtime, empty_model

MODELS = ("qwen2.5-0.5b", "qwen2.5-7b")
BATCHES = {"1 × 640": (1, 640), "32 × 4096": (32, 4096)}  # requests × context
KINDS: dict[str, dict[str, object]] = {
    "bfloat16": {},
    "weights": {"quantization": "int8"},
    "weights and head": {"quantization": "int8", "quantize_lm_head": True},
    "KV cache": {"kv_cache_dtype": "int8"},
    "all": {"quantization": "int8", "quantize_lm_head": True, "kv_cache_dtype": "int8"},
}
SHOWN = ("weights and head", "KV cache", "all")  # beside bfloat16
MEMORIES = {"16 GB": 16 * 10**9, "141 GB": 141 * 10**9}  # of a small GPU, and of an H200
SEQUENCE = 4096  # tokens of the sequences that should fit
BLOCK_SIZE = 64  # what the Triton backend prefers


def measure() -> dict:
    """Bytes of a step of every model, for both batches, in every combination; sequences that fit beside the weights."""
    rows, fits = [], []
    for model in MODELS:
        for kind, options in KINDS.items():
            cost = QuantizedBytes(ModelBytes(preset_config(model), 2), Options(**options))
            for batch, (requests, context) in BATCHES.items():
                kv_bytes = requests * context * cost.kv_bytes_per_token
                rows.append(
                    {
                        "model": model,
                        "batch": batch,
                        "kind": kind,
                        "weight_bytes": cost.weight_bytes,
                        "kv_bytes": kv_bytes,
                    }
                )
            runtime = load_shapes(f"random:{model}", options)
            sequences = {name: sequences_that_fit(runtime, size) for name, size in MEMORIES.items()}
            fits.append(
                {
                    "model": model,
                    "kind": kind,
                    "weight_bytes": weight_bytes(runtime),
                    "kv_bytes_per_token": runtime.bytes_per_token,
                    "sequences": sequences,
                }
            )
    return {"rows": rows, "fits": fits}


def load_shapes(model: str, options: dict[str, object]) -> Runtime:
    """The engine's model and pool of a GPU, without memory."""
    chosen = Options(**options, attention_backend="reference", kvcache_block_size=BLOCK_SIZE)

    def build(config: object, backend: object, max_model_len: int, tensors: object, *rest: object) -> object:
        return empty_model(config, backend, max_model_len, *rest)  # `build_model` without the weights

    return load_quantized_runtime(resolve(model), chosen, torch.device("meta"), torch.bfloat16, build=build)


def weight_bytes(runtime: Runtime) -> int:
    """Memory of all weights with their scales; a tied embedding once."""
    return sum(parameter.nbytes for parameter in runtime.model.parameters())


def sequences_that_fit(runtime: Runtime, memory: int) -> int:
    """How many sequences get blocks at the same time in what the weights leave of the engine's share of the memory."""
    share = Options.gpu_memory_utilization
    budget = int(memory * share) - weight_bytes(runtime)
    try:
        blocks = blocks_that_fit(budget, runtime.make_pool(1).num_bytes, memory, share)
    except MemoryError:
        return 0
    return blocks // -(-SEQUENCE // runtime.block_size)


def table(results: list[dict]) -> dict[str, list[str]]:
    """Gigabytes in bfloat16 by model and batch, and what share of them each combination reads; sequences that fit."""
    result, read, body = results[0], {}, []
    for row in result["rows"]:
        read.setdefault((row["model"], row["batch"]), {})[row["kind"]] = row["weight_bytes"] + row["kv_bytes"]
    for (model, batch), by_kind in read.items():
        if model in MODELS:
            whole = by_kind["bfloat16"]
            body.append([model, batch, f"{whole / 1e9:.2f} GB", *(f"{by_kind[kind] / whole:.0%}" for kind in SHOWN)])
    fits = [
        [
            f"{row['model']}, {row['kind']}",
            f"{row['weight_bytes'] / 1e9:.2f} GB",
            f"{row['kv_bytes_per_token']:,} B",
            *(f"{row['sequences'][name]:,}" for name in MEMORIES),
        ]
        for row in result["fits"]
        if row["model"] in MODELS and row["kind"] in ("bfloat16", *SHOWN)
    ]
    heads = ["model", "requests × context", "bfloat16", *(f"int8: {kind}" for kind in SHOWN)]
    fits_heads = ["model, int8 of", "weights", "KV per token", *(f"sequences in {name}" for name in MEMORIES)]
    counted = ["", "Counted by `python -m benchmarks.micro quantized_bytes`."]
    return {
        "quantized-bytes": [*markdown(heads, body), *counted],
        "quantized-fits": [*markdown(fits_heads, fits), *counted],
    }
