"""What one decode step reads in 16 and in 8 bits, by model and by what fills it; counted, nothing is timed.

From the shapes of the models alone: matrices with their scales, the LM head, keys and values. A decode step at short
contexts with few requests is nearly all weights; with many requests and long contexts it is nearly all KV cache.
"""

from __future__ import annotations

from benchmarks.text import markdown
from beyond.quantization.floor import QuantizedBytes
from beyond.quantization.options import QuantizationOptions
from stage_a_naive.presets import preset_config

README, MARKERS = "beyond/quantization", ("quantized-bytes",)
MODELS = ("qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b", "qwen2.5-7b")
BATCHES = {"1 × 640": (1, 640), "32 × 4096": (32, 4096)}  # requests × context
KINDS: dict[str, dict[str, object]] = {
    "bfloat16": {},
    "weights": {"quantization": "int8"},
    "weights and head": {"quantization": "int8", "quantize_lm_head": True},
    "KV cache": {"kv_cache_dtype": "int8"},
    "all": {"quantization": "int8", "quantize_lm_head": True, "kv_cache_dtype": "int8"},
}


def measure() -> dict:
    """Bytes of a step of every model, for both batches, in every combination."""
    rows = []
    for model in MODELS:
        for batch, (requests, context) in BATCHES.items():
            for kind, options in KINDS.items():
                cost = QuantizedBytes(preset_config(model), 2, QuantizationOptions(**options))
                kv_bytes = requests * context * cost.kv_bytes_per_token
                rows.append({"model": model, "batch": batch, "kind": kind, "weight_bytes": cost.weight_bytes,
                             "kv_bytes": kv_bytes})  # fmt: skip
    return {"rows": rows}


def table(results: list[dict]) -> dict[str, list[str]]:
    """One line per model and batch: gigabytes in bfloat16, and what share of them each combination reads."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for row in results[0]["rows"]:
        found.setdefault((row["model"], row["batch"]), {})[row["kind"]] = row["weight_bytes"] + row["kv_bytes"]
    kinds = [kind for kind in KINDS if kind not in ("bfloat16", "weights")]
    body = [
        [model, batch, f"{by_kind['bfloat16'] / 1e9:.2f} GB",
         *(f"{by_kind[kind] / by_kind['bfloat16']:.0%}" for kind in kinds)]
        for (model, batch), by_kind in found.items()
    ]  # fmt: skip
    head = ["model", "requests × context", "bfloat16", *(f"int8: {kind}" for kind in kinds)]
    return {"quantized-bytes": [*markdown(head, body), "", "Counted by `python -m benchmarks.micro quantized_bytes`."]}
