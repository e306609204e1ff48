"""Where a step of stage F's persistent megakernel goes, by the clock of every multiprocessor (GPU).

A kernel that is compiled with a trace writes down the clock of every multiprocessor at the end of each phase of each
layer. One row at a context of 640 tokens, timed as in `decode_step`.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch
from torch import Tensor

from benchmarks.floor import ModelCost
from benchmarks.micro import caption
from benchmarks.micro.decode_step import MODELS, REPEATS, STEPS, launch_of, make_model, step_arguments
from benchmarks.text import markdown
from benchmarks.timing import graph_seconds
from stage_a_naive.presets import preset_config
from stage_f_graph_tp.megakernel import Megakernel

README, MARKERS, NEEDS_GPU = "stage_f_graph_tp/megakernel", ("decode-trace", "decode-trace-all"), True
CONTEXT = 640
PRODUCTS, PARTS = ("QKV", "output", "gate-up", "down"), ("wait", "multiply", "other warps", "add up")
LAYER = [f"{product}: {part}" for product in PRODUCTS for part in PARTS]
LAYER.insert(len(PARTS), "attention")  # the marks of csrc/stage_f/kernel.cuh, in their order
LAST = ("LM head: wait", "LM head", "token")
END_MARKS = 7  # kEndMarks in csrc/stage_f/decode_step.h


def measure(models: tuple[str, ...] = MODELS) -> dict:
    """Trace a step of each model."""
    rows = []
    for name in models:
        rows.append({"model": name} | trace_step(Megakernel(make_model(name), trace=True)))
        print(
            f"{name:14} {rows[-1]['seconds'] * 1e6:.1f} µs, {rows[-1]['explained']:.1%} of them explained", flush=True
        )
    return {"rows": rows}


def trace_step(kernel: Megakernel) -> dict:
    """Measure where the time of a step of one row goes.

    Returns:
        `phases`: of each phase (of a layer: of the inner ones) `median` and `p95` of all multiprocessors and layers,
        and `slowest`: the slowest multiprocessor of each layer, on average; seconds. `seconds`: of a step, by the clock
        outside. `explained`: the share of it that lies between the first and the last mark.
    """
    layers, width = kernel.config.num_layers, len(LAYER)
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    trace = torch.zeros(blocks, width * layers + END_MARKS, dtype=torch.int64, device="cuda")
    launch = partial(launch_of(kernel, step_arguments(kernel.config, 1, CONTEXT)), trace=trace)
    seconds = statistics.median(graph_seconds([launch] * STEPS, REPEATS))
    kernel.check()
    marks = trace[trace[:, 0] > 0].cpu()
    clocks = marks[:, 1:-1]  # between nanoseconds at the start and at the end
    tick = ((marks[:, -1] - marks[:, 0]).double() / (clocks[:, -1] - clocks[:, 0])).median() * 1e-9
    spans = clocks.diff(dim=1) * tick
    inner = spans[:, 1 : 1 + width * layers].view(-1, layers, width)[:, 1:]  # the first layer waits for its weights
    phases = {"prologue": _spread(spans[:, :1])}
    phases |= {name: _spread(inner[:, :, i]) for i, name in enumerate(LAYER)}
    phases["a layer"] = _spread(inner.sum(dim=2))
    phases |= {name: _spread(spans[:, -len(LAST) + i, None]) for i, name in enumerate(LAST)}
    return {"phases": phases, "seconds": seconds, "explained": (spans.sum(dim=1).mean() / seconds).item()}


def _spread(seconds: Tensor) -> dict[str, float]:
    """Of `[multiprocessors, layers]`."""
    return {"median": seconds.median().item(), "p95": seconds.flatten().quantile(0.95).item(),
            "slowest": seconds.amax(dim=0).mean().item()}  # fmt: skip


def table(results: list[dict]) -> dict[str, list[str]]:
    """The lesson's medians by phase, and in a file of its own the spread over multiprocessors."""
    result, copy = results[0], results[0]["ceilings"]["copy_bytes_per_s"]
    models = [row["model"] for row in result["rows"]]
    phases = {name: [row["phases"][name]["median"] for row in result["rows"]] for name in (*LAYER, "a layer")}
    costs = [ModelCost(preset_config(model), 2) for model in models]
    phases["floor of a layer's weights"] = [
        2 * cost.matmul_parameters[0] / cost.config.num_hidden_layers / copy for cost in costs
    ]
    phases["LM head"] = [row["phases"]["LM head"]["median"] for row in result["rows"]]
    phases["floor of the LM head's weights"] = [2 * cost.matmul_parameters[1] / copy for cost in costs]
    body = [[name, *(f"{1e6 * value:.2f}" for value in seconds)] for name, seconds in phases.items()]
    below = caption(result, f"one row, context {CONTEXT}, bfloat16; medians of {REPEATS} samples of {STEPS} steps")
    every: list[str] = []
    for row in result["rows"]:
        kinds = ("median", "p95", "slowest")
        spreads = [[name, *(f"{1e6 * of[kind]:.2f}" for kind in kinds)] for name, of in row["phases"].items()]
        share = f"First to last mark: {row['explained']:.1%} of the {row['seconds'] * 1e6:.0f} µs from step to step."
        every += [f"**{row['model']}**", "", *markdown(["µs", *kinds], spreads), "", share, ""]
    return {
        "decode-trace": [*markdown(["µs, by phase of a layer", *models], body), "", below],
        "decode-trace-all": [*every, below],
    }
