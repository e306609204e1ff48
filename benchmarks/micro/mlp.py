"""Stage C's MLP block by each kernel variant, compared with the memory's limit (GPU).

For a few tokens bandwidth is the limit: the block's weights must be read once, and nothing else is large. A sample
is a CUDA graph of one call per layer. As in a model, each call has different weights and takes the previous call's
output as its input; the weights of all layers are many times the L2 cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.micro import timed
from benchmarks.text import medians
from benchmarks.timing import graph_seconds
from stage_a_naive.checkpoints.presets import preset_config
from stage_c_fused_mlp.fused_mlp import fused_swiglu_mlp, load_operators

NEEDS_GPU = True
EPS, REPEATS, REPLAYS = 1e-6, 20, 10
ROWS, SHOWN_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64), (1, 4, 16, 64)  # measured, and in the table
VARIANTS = {"naive": "naive", "library": "library (unfused)", "warp": "warp", "fused": "fused"}  # and their names
NAIVE_ROWS = (1, 16)  # it needs milliseconds, and one row says what there is to say


def sizes(model: str) -> tuple[int, int, int, int]:
    """Return hidden, intermediate, layers, and the bytes of a layer's gate, up and down in bfloat16."""
    config = preset_config(model)
    hidden, inter = config.hidden_size, config.intermediate_size
    return hidden, inter, config.num_hidden_layers, 2 * 3 * hidden * inter


def measure(model: str = "qwen2.5-0.5b") -> dict:
    """Time every variant at every number of rows, in bfloat16."""
    load_operators("cuda")
    hidden, inter, num_layers, _ = sizes(model)
    generator = torch.Generator("cuda").manual_seed(0)
    layers = [random_layer(hidden, inter, torch.bfloat16, generator) for _ in range(num_layers)]
    cases = [(rows, name) for rows in ROWS for name in VARIANTS if name != "naive" or rows in NAIVE_ROWS]
    return {"rows": [timed(time_block(layers, *case), model=model, rows=case[0], variant=case[1]) for case in cases]}


def random_layer(hidden: int, inter: int, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """Make rms_weight, w_gate_up and w_down, scaled so that activations keep their size through the layers."""

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator, device=generator.device) * scale).to(dtype)

    gate_up = normal(2 * inter, hidden, scale=hidden**-0.5)
    return [1 + normal(hidden, scale=0.1), gate_up, normal(hidden, inter, scale=inter**-0.5)]


def time_block(layers: list[list[Tensor]], rows: int, variant: str) -> list[float]:
    """Return seconds per layer."""
    hidden = torch.randn(rows, len(layers[0][0]), device="cuda").to(torch.bfloat16)

    def forward() -> Tensor:
        x = hidden
        for norm, gate_up, down in layers:
            x = fused_swiglu_mlp(x, norm, gate_up, down, x, EPS, variant)
        return x

    repeats, replays = (3, 1) if variant == "naive" else (REPEATS, REPLAYS)
    return [seconds / len(layers) for seconds in graph_seconds([forward], repeats, replays)]


def fastest_up_to(result: dict) -> int:
    """Return the most rows with which the fused kernel is faster than the library's kernels, for the first model."""
    model = result["rows"][0]["model"]
    found = medians([row for row in result["rows"] if row["model"] == model], "variant", "rows")
    return max(rows for rows in ROWS if found["fused", rows] < found["library", rows])
