"""Stage F's persistent megakernel: time of a decode step by rows and context, and where it goes (GPU).

A sample is a CUDA graph of `STEPS` steps: what is timed is the device, not Python. Weights are random and of the real
shapes, about a gigabyte or more, far more than L2 holds. To see where the time goes, steps are also timed without the
streaming of weights, without waiting for other blocks, or without both. `decode_trace` has the clocks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.floor import ModelCost
from benchmarks.micro import caption
from benchmarks.text import markdown, medians
from benchmarks.timing import graph_seconds
from stage_a_naive.presets import preset_config
from stage_d_paged.attention import AttentionBackend
from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_f_graph_tp.megakernel import Megakernel

README, MARKERS, NEEDS_GPU = "stage_f_graph_tp/megakernel", ("decode-kernel", "decode-kernel-all"), True
MODELS = ("qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b")
ROWS = (1, 2, 4, 8)
CONTEXTS = (128, 640, 4096)
BLOCK_SIZE, STEPS, REPEATS = 256, 20, 15
WITHOUT = {"whole": 0, "no streaming": 1, "no waiting": 2, "neither": 3}  # kSkip... in csrc/stage_f/decode_step.h


def measure(models: tuple[str, ...] = MODELS) -> dict:
    """Time the steps of these models, by rows and context, and with parts left out."""
    rows = []
    for name in models:
        kernel = Megakernel(make_model(name))

        def add(what: str, variant: str, count: int, context: int, kernel=kernel, name=name) -> float:
            samples = time_steps(kernel, step_arguments(kernel.config, count, context))
            rows.append({"model": name, "what": what, "variant": variant, "rows": count, "context": context,
                         "samples": samples})  # fmt: skip
            print(
                f"{name:14} {what} {variant} {count} rows, context {context}: {min(samples) * 1e6:.1f} µs", flush=True
            )
            return statistics.median(samples)

        for count in ROWS:
            for context in CONTEXTS:
                add("step", "", count, context)
        for label, flags in WITHOUT.items():
            kernel.flags = flags
            add("without", label, 1, 640)
    return {"rows": rows}


def make_model(name: str, backend: AttentionBackend | None = None) -> DecoderModel:
    """Make a model of the real shape with random weights, scaled so that activations keep their size."""
    config = ModelConfig.from_hf(preset_config(name))
    model = DecoderModel(config, backend, max(CONTEXTS) + 1, torch.bfloat16, torch.device("cuda"))
    for parameter in model.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def step_arguments(config: ModelConfig, rows: int, context: int, block_size: int = BLOCK_SIZE) -> list[Tensor]:
    """Token ids, positions, slots, block tables, context lengths and the pool: each row on blocks of its own."""
    blocks = -(-context // block_size)
    pool = torch.empty(
        2, config.num_layers, rows * blocks, block_size, config.num_kv_heads, config.head_dim,
        dtype=torch.bfloat16, device="cuda",
    ).normal_()  # fmt: skip
    tables = torch.randperm(rows * blocks, device="cuda").int().view(rows, blocks)
    last = torch.full((rows,), context - 1, device="cuda")
    slots = tables[:, -1].long() * block_size + (context - 1) % block_size
    ids = torch.randint(config.vocab_size, (rows,), device="cuda")
    return [ids, last, slots, tables, torch.full((rows,), context, dtype=torch.int32, device="cuda"), pool]


def launch_of(kernel: Megakernel, arguments: list[Tensor]) -> Callable[..., None]:
    """The greedy step with these `step_arguments`, as a function; each call goes on from the tokens of the last."""
    ids, positions, slots, tables, lengths, pool = arguments
    rows = len(ids)
    temperatures = torch.zeros(rows, device="cuda")
    noise_keys = torch.zeros(rows, dtype=torch.int32, device="cuda")
    return partial(
        kernel.step, ids, torch.arange(rows, device="cuda"), positions, slots, tables, lengths, temperatures,
        noise_keys, pool, kernel.make_logits(rows), kernel.make_result(rows),
    )  # fmt: skip


def time_steps(kernel: Megakernel, arguments: list[Tensor]) -> list[float]:
    """Seconds per step."""
    kernel.reset()
    samples = graph_seconds([launch_of(kernel, arguments)] * STEPS, REPEATS)
    kernel.check()
    return samples


def floor_seconds(model: str, rows: int, context: int, copy_bytes_per_s: float) -> float:
    """What one step must read (weights once, each row's keys and values once), at the speed of a copy."""
    cost = ModelCost(preset_config(model), 2)
    return (cost.weight_bytes + rows * context * cost.kv_bytes_per_token) / copy_bytes_per_s


def table(results: list[dict]) -> dict[str, list[str]]:
    """The lesson's account of a step of one row, and in a file of its own all numbers of rows and contexts."""
    result, copy = results[0], results[0]["ceilings"]["copy_bytes_per_s"]
    steps = medians(result["rows"], "model", "variant", "rows", "context")
    models = list(dict.fromkeys(model for model, *_ in steps))
    floors = [floor_seconds(model, 1, 640, copy) for model in models]
    by_variant = {variant: [steps[model, variant, 1, 640] for model in models] for variant in WITHOUT}
    account = [["floor: the bytes at the speed of a copy", *map(_micros, floors)]]
    account += [[variant, *map(_micros, seconds)] for variant, seconds in by_variant.items()]
    ratios = [a / b for a, b in zip(by_variant["whole"], floors, strict=True)]
    account.append(["whole, × the floor", *(f"{ratio:.2f} ×" for ratio in ratios)])
    short = markdown(["µs per step", *models], account)
    below = caption(result, f"copies {copy / 1e12:.2f} TB/s, bfloat16; medians of {REPEATS} samples of {STEPS} steps")
    every: list[str] = []
    for model in models:
        body = []
        for (name, variant, rows, context), seconds in steps.items():
            if name == model and not variant:
                floor = floor_seconds(model, rows, context, copy)
                body.append([rows, context, _micros(seconds), _micros(floor), f"{seconds / floor:.2f} ×"])
        heads = ["rows", "context", "µs per step", "floor, µs", "× the floor"]
        every += [f"**{model}**", "", *markdown(heads, body), ""]
    return {"decode-kernel": [*short, "", below], "decode-kernel-all": [*every, below]}


def _micros(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"
