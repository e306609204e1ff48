"""The MLP block on a CPU: stage C's operator compared with PyTorch's MLP, by rows. The choice of `auto` follows it.

Both ways take turns in one run, on one thread. The thread's CPU time is measured, which other programs hardly disturb.
Every call reads another layer's weights, as in a model, so that they do not stay in the cache. The smallest samples are
compared.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.micro import one_thread, take_turns, timed
from benchmarks.micro.mlp import EPS, random_layer
from stage_a_naive.checkpoints.presets import preset_config
from stage_c_fused_mlp.fused_mlp import MOST_ROWS, fused_swiglu_mlp, load_operators  # noqa: F401 (in a table)

MODELS = ("qwen2-tiny", "qwen2.5-0.5b", "qwen3-0.6b")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROWS = (1, 2, 4, 8, 16, 32, 64)
REPEATS, MOST_BYTES, MOST_LAYERS = 15, 200e6, 12


def by_pytorch(x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute the block as transformers does: the norm in float32, three matrix products, the residual."""
    inter = down.shape[1]
    wide = x.float()
    normalised = norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    gate, up = F.linear(normalised, gate_up[:inter]), F.linear(normalised, gate_up[inter:])
    return x + F.linear(F.silu(gate) * up, down)


def by_operator(x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return fused_swiglu_mlp(x, norm, gate_up, down, x, EPS, "fused")


WAYS = {"pytorch": by_pytorch, "operator": by_operator}


@one_thread()
@torch.inference_mode()
def measure(models: tuple[str, ...] = MODELS, repeats: int = REPEATS) -> dict:
    """Measure the CPU time per call by model, dtype, rows and way."""
    load_operators()
    found = []
    for model in models:
        config = preset_config(model)
        for name, dtype in DTYPES.items():
            layers = random_layers(config.hidden_size, config.intermediate_size, dtype)
            for rows in ROWS:
                for way, samples in time_ways(layers, rows, repeats).items():
                    found.append(timed(samples, model=model, dtype=name, rows=rows, way=way))
    return {"rows": found}


def random_layers(hidden: int, inter: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """Make rms_weight, w_gate_up and w_down of several layers."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, min(MOST_LAYERS, int(MOST_BYTES / (3 * hidden * inter * dtype.itemsize))))
    return [random_layer(hidden, inter, dtype, generator) for _ in range(count)]


def time_ways(layers: list[list[Tensor]], rows: int, repeats: int) -> dict[str, list[float]]:
    """Time both ways in turns; their results must agree."""
    x = torch.randn(rows, len(layers[0][0]), generator=torch.Generator().manual_seed(1)).to(layers[0][0].dtype)
    torch.testing.assert_close(by_pytorch(x, *layers[0]), by_operator(x, *layers[0]), rtol=0.05, atol=0.05)

    def seconds(way: str) -> float:
        start = time.thread_time()
        for layer in layers:
            WAYS[way](x, *layer)
        return (time.thread_time() - start) / len(layers)

    return take_turns(seconds, WAYS, repeats, warm_ups=0)
