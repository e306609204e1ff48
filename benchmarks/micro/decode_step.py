"""Stage F's persistent megakernel: time of a decode step by rows and context, and where it goes (GPU).

A sample is a CUDA graph of `STEPS` steps, so the device is timed, not Python. Weights are random, with the real shapes:
about a gigabyte or more, far more than L2 holds. To see where the time goes, steps are also timed without streaming the
weights, without waiting for other blocks, or without both; and a kernel compiled with a trace records the clock of
every multiprocessor at the end of each phase of each layer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.floor import ModelCost
from benchmarks.micro import timed
from benchmarks.render import Record, records
from benchmarks.timing import graph_seconds
from stage_a_naive.checkpoints.presets import preset_config
from stage_d_paged.attention import AttentionBackend, AttentionMetadata
from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_f_graph_tp.megakernel import Megakernel

NEEDS_GPU = True
MODELS = ("qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b")
ROWS, CONTEXTS, CONTEXT = (1, 2, 4, 8), (128, 640, 4096), 640
LONG_CONTEXTS = (8192, 30000)  # of one row
BLOCK_SIZE, STEPS, REPEATS = 256, 20, 15
WITHOUT = {"whole": 0, "no streaming": 1, "no waiting": 2, "neither": 3}  # kSkip... in csrc/stage_f/decode_step.h
PRODUCTS, PARTS = ("QKV", "output", "gate-up", "down"), ("wait", "multiply", "other warps", "add up")
LAYER = [f"{product}: {part}" for product in PRODUCTS for part in PARTS]
LAYER.insert(len(PARTS), "attention")  # the marks of csrc/stage_f/kernel.cuh, in their order
LAST = ("LM head: wait", "LM head", "token")
END_MARKS = 7  # kEndMarks in csrc/stage_f/decode_step.h


def measure(models: tuple[str, ...] = MODELS) -> dict:
    """Time the steps of these models, by rows and context, and with parts left out; trace one."""
    rows = []
    for name in models:
        kernel = Megakernel(make_model(name))
        cases = [("step", "", 0, count, context) for count in ROWS for context in CONTEXTS]
        cases += [("step", "", 0, 1, context) for context in LONG_CONTEXTS]
        cases += [("without", label, flags, 1, CONTEXT) for label, flags in WITHOUT.items()]
        for what, variant, flags, count, context in cases:
            kernel.flags = flags
            samples = time_steps(kernel, step_arguments(kernel.config, count, context))
            rows.append(timed(samples, model=name, what=what, variant=variant, rows=count, context=context))
        rows.append({"model": name, "what": "trace"} | trace_step(Megakernel(make_model(name), trace=True)))
    return {"rows": rows}


def make_model(name: str, backend: AttentionBackend | None = None) -> DecoderModel:
    """Make a model of the real shape with random weights, scaled so that activations keep their size."""
    config = ModelConfig.from_hf(preset_config(name))
    model = DecoderModel(config, backend, max(CONTEXTS + LONG_CONTEXTS) + 1, torch.bfloat16, torch.device("cuda"))
    for parameter in model.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def step_arguments(config: ModelConfig, rows: int, context: int, block_size: int = BLOCK_SIZE) -> list[Tensor]:
    """Token ids, positions, slots, block tables, context lengths and the pool: each row has separate blocks."""
    blocks = -(-context // block_size)
    shape = (2, config.num_layers, rows * blocks, block_size, config.num_kv_heads, config.head_dim)
    pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    tables = torch.randperm(rows * blocks, device="cuda").int().view(rows, blocks)
    last = torch.full((rows,), context - 1, device="cuda")
    slots = tables[:, -1].long() * block_size + (context - 1) % block_size
    ids = torch.randint(config.vocab_size, (rows,), device="cuda")
    return [ids, last, slots, tables, torch.full((rows,), context, dtype=torch.int32, device="cuda"), pool]


def launch_of(kernel: Megakernel, arguments: list[Tensor]) -> Callable[..., None]:
    """Return the greedy step with these `step_arguments` as a function; each call continues from the last tokens."""
    ids, positions, slots, tables, lengths, pool = arguments
    rows = len(ids)
    temperatures = torch.zeros(rows, device="cuda")
    noise_keys = torch.zeros(rows, dtype=torch.int32, device="cuda")
    step = partial(kernel.step, ids, torch.arange(rows, device="cuda"), positions, slots, tables, lengths)
    return partial(step, temperatures, noise_keys, pool, kernel.make_logits(rows), kernel.make_result(rows))


def step_by_layers(model: DecoderModel, arguments: list[Tensor], cache: object, longest: int) -> Callable[[], Tensor]:
    """Return the same step layer by layer, up to the logits; `cache` has the pool of the arguments, or an equal one."""
    ids, positions, slots, tables, lengths, _ = arguments
    starts = torch.arange(len(ids) + 1, dtype=torch.int32, device="cuda")
    metadata = AttentionMetadata(starts, lengths, slots, tables, 1, longest, one_new_key=True)
    return lambda: model.compute_logits(model(ids, positions, cache, metadata))


def time_steps(kernel: Megakernel, arguments: list[Tensor]) -> list[float]:
    """Return seconds per step."""
    kernel.reset()
    samples = graph_seconds([launch_of(kernel, arguments)] * STEPS, REPEATS)
    kernel.check()
    return samples


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
    """Summarise `[multiprocessors, layers]`."""
    return {
        "median": seconds.median().item(),
        "p95": seconds.flatten().quantile(0.95).item(),
        "slowest": seconds.amax(dim=0).mean().item(),
    }


def floor_seconds(model: str, rows: int, context: int, copy_bytes_per_s: float) -> float:
    """Return the seconds to read the weights once and each row's keys and values once, at the speed of a copy."""
    cost = ModelCost(preset_config(model), 2)
    return (cost.weight_bytes + rows * cost.tokens_read(context) * cost.kv_bytes_per_token) / copy_bytes_per_s


def account(result: dict) -> list[Record]:
    """Break down the step of one row: its floor, the whole step, the step without some parts, and whole ÷ floor."""
    found, copy = [row for row in records(result) if row["what"] == "without"], result["ceilings"]["copy_bytes_per_s"]
    whole = [row for row in found if row["variant"] == "whole"]
    floors = {row["model"]: floor_seconds(row["model"], 1, CONTEXT, copy) for row in whole}
    lines = [("floor: the bytes at the speed of a copy", m, f"{1e6 * floor:.0f}") for m, floor in floors.items()]
    lines += [(row["variant"], row["model"], f"{row['us']:.0f}") for row in found]
    lines += [("whole, × the floor", r["model"], f"{r['seconds'] / floors[r['model']]:.2f} ×") for r in whole]
    return [dict(zip(("line", "model", "cell"), own, strict=True)) for own in lines]


def phases(result: dict) -> list[Record]:
    """Return every phase's spread over the multiprocessors, floors, and the share of a step between its marks."""
    found, copy = [], result["ceilings"]["copy_bytes_per_s"]
    for row in (row for row in result["rows"] if row["what"] == "trace"):
        cost, kinds = ModelCost(preset_config(row["model"]), 2), ("median", "p95", "slowest")
        layers, head = cost.matmul_parameters
        cells = {name: " / ".join(f"{1e6 * of[kind]:.2f}" for kind in kinds) for name, of in row["phases"].items()}
        cells["floor of a layer's weights"] = f"{2e6 * layers / cost.config.num_hidden_layers / copy:.2f}"
        cells["floor of the LM head's weights"] = f"{2e6 * head / copy:.2f}"
        cells["between the marks"] = f"{row['explained']:.1%} of {1e6 * row['seconds']:.0f}"
        found += [{"model": row["model"], "line": line, "cell": cell} for line, cell in cells.items()]
    return found
