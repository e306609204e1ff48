"""The table of stage F's one-launch decode step: time by rows and context, and where it goes.

    python -m benchmarks.decode_kernel --output decode_kernel.json      # on an NVIDIA GPU
    python -m benchmarks.decode_kernel --report decode_kernel.json      # anywhere: the tables of stage F's README

A sample is a CUDA graph of `STEPS` steps: what is timed is the device, not Python. Weights are random, of the real
shapes, and nearly a gigabyte: no cache can flatter. Three measurements say where the time goes:

* leaving out the streaming of weights, the waiting for one another, or both. What does not get faster when a part is
  left out was hidden behind the rest;
* the clock of every multiprocessor at the end of each phase of each layer;
* tuning values one at a time, next to the defaults.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.ceilings import measure_ceilings
from benchmarks.environment import ROOT, environment
from benchmarks.markers import fill_file
from stage_a_naive.presets import preset_config
from stage_d_paged.attention import AttentionBackend
from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_f_graph_tp.fused_decode import FusedDecode, Tuning

README = ROOT / "stage_f_graph_tp" / "README.md"

MODELS = ("qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b")
ROWS = (1, 2, 4, 8)
CONTEXTS = (128, 640, 4096)
PAGE = 256
STEPS = 20
REPEATS = 15
PHASES = ("wait: hidden", "QKV", "attention", "wait: heads", "output", "wait: hidden 2", "gate-up", "wait: MLP", "down")
TABLE_HEAD = "| rows | context | µs a step | floor | of the floor's speed |"
WITHOUT = {"whole": 0, "no streaming": 1, "no waiting": 2, "neither": 3}  # kSkip... in csrc/decode_step.h
TUNINGS = (
    {"replicas": 2}, {"replicas": 4}, {"max_splits": 16}, {"max_splits": 64}, {"slot_bytes": 15000},
    {"slot_bytes": 26000},
)  # fmt: skip


def make_model(name: str, backend: AttentionBackend | None = None) -> DecoderModel:
    """The real shape with random weights, scaled so that activations keep their size."""
    config = ModelConfig.from_hf(preset_config(name))
    model = DecoderModel(config, backend, max(CONTEXTS) + 1, torch.bfloat16, torch.device("cuda"))
    for parameter in model.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def step_arguments(config: ModelConfig, rows: int, context: int, page: int = PAGE) -> list[Tensor]:
    """Token ids, positions, slots, block tables, context lengths and the pool: each row on pages of its own."""
    pages = -(-context // page)
    pool = torch.empty(
        2, config.num_layers, rows * pages, page, config.num_kv_heads, config.head_dim,
        dtype=torch.bfloat16, device="cuda",
    ).normal_()  # fmt: skip
    tables = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
    last = torch.full((rows,), context - 1, device="cuda")
    slots = tables[:, -1].long() * page + (context - 1) % page
    ids = torch.randint(config.vocab_size, (rows,), device="cuda")
    return [ids, last, slots, tables, torch.full((rows,), context, dtype=torch.int32, device="cuda"), pool]


def time_steps(fused: FusedDecode, arguments: list[Tensor]) -> list[float]:
    """Seconds a step, one number a sample."""
    logits = fused.make_logits(len(arguments[0]))
    fused.reset()
    fused.step(*arguments, logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            fused.step(*arguments, logits)
    samples = []
    for _ in range(REPEATS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / STEPS)
    fused.check()
    return samples[2:]


def trace_phases(fused: FusedDecode, arguments: list[Tensor], seconds: float) -> dict[str, float]:
    """Seconds of each phase of a layer, of the head and of the start, mean over multiprocessors and inner layers.

    A clock counts cycles of its multiprocessor; the whole step's cycles are set equal to its measured seconds.
    """
    layers = fused.config.num_layers
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    trace = torch.zeros(multiprocessors, 9 * layers + 3, dtype=torch.int64, device="cuda")
    logits = fused.make_logits(len(arguments[0]))
    for _ in range(3):
        fused.step(*arguments, logits, trace)
    fused.check()
    clocks = trace[trace[:, -1] > 0].double()
    second = seconds / (clocks[:, -1] - clocks[:, 0]).mean()
    spans = clocks.diff(dim=1)
    inner = spans[:, : 9 * layers].view(-1, layers, 9)[:, 1:].mean((0, 1)) * second
    phases = dict(zip(PHASES, inner.tolist(), strict=True))
    return phases | {"a layer": inner.sum().item(), "LM head": (spans[:, -2:].sum(1).mean() * second).item()}


def step_bytes(config: ModelConfig, rows: int, context: int) -> int:
    """What one step must read: weights once, each row's keys and values once. Two bytes a number."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + config.num_heads * config.head_dim + 3 * config.intermediate_size)
    kv = 2 * config.num_kv_heads * config.head_dim * rows * context
    return 2 * (config.num_layers * (layer + kv) + config.vocab_size * config.hidden_size)


def measure(model_name: str, copy_bytes_per_s: float) -> dict:
    """Everything about one model."""
    fused = FusedDecode(make_model(model_name))
    config, steps = fused.config, []
    for rows in ROWS:
        for context in CONTEXTS:
            samples = time_steps(fused, step_arguments(config, rows, context))
            floor = step_bytes(config, rows, context) / copy_bytes_per_s
            steps.append({"rows": rows, "context": context, "seconds": statistics.median(samples), "floor": floor,
                          "samples": samples})  # fmt: skip
            print(f"{model_name:14} {rows} rows, context {context:5}: {steps[-1]['seconds'] * 1e6:7.1f} us", flush=True)
    arguments = step_arguments(config, 1, 640)
    without, tunings = {}, []
    whole = statistics.median(time_steps(fused, arguments))
    phases = trace_phases(fused, arguments, whole)
    for name, flags in WITHOUT.items():
        fused.tuning = replace(Tuning(), flags=flags)
        without[name] = time_steps(fused, arguments)
    for change in TUNINGS:
        fused.tuning = replace(Tuning(), **change)
        tunings.append({"change": change, "samples": time_steps(fused, arguments)})
    return {"model": model_name, "steps": steps, "phases": phases, "without": without, "tunings": tunings}


def report(results: dict) -> str:
    """The tables, in Markdown."""
    lines = []
    for model in results["models"]:
        lines += [f"**{model['model']}**", "", TABLE_HEAD, "|---|---|---|---|---|"]
        for step in model["steps"]:
            figures = f"{step['seconds'] * 1e6:.0f} | {step['floor'] * 1e6:.0f} | {step['floor'] / step['seconds']:.0%}"
            lines.append(f"| {step['rows']} | {step['context']} | {figures} |")
        lines += ["", "| phase (one row, context 640) | µs |", "|---|---|"]
        lines += [f"| {phase} | {seconds * 1e6:.2f} |" for phase, seconds in model["phases"].items()]
        lines += ["", "| a step with | µs |", "|---|---|"]
        variants = list(model["without"].items())
        variants += [(str(tuning["change"]), tuning["samples"]) for tuning in model["tunings"]]
        lines += [f"| {name} | {statistics.median(samples) * 1e6:.0f} |" for name, samples in variants]
        lines.append("")
    device, commit = results["device"]["name"], results["commit"][:7]
    lines.append(f"{device}, copies {results['copy_bytes_per_s'] / 1e12:.2f} TB/s, bfloat16, commit {commit}; medians.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode_kernel", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="measure, and write the results here")
    parser.add_argument("--report", type=Path, help="write the tables of this file into stage F's README")
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    args = parser.parse_args()
    if args.output is None and args.report is None:
        parser.error("give --output to measure or --report to write the README")
    if args.output is not None:
        ceilings = measure_ceilings(torch.device("cuda"), torch.bfloat16)
        results = {"kind": "decode_kernel"} | environment()
        results |= {"copy_bytes_per_s": ceilings.copy_bytes_per_s, "tuning": vars(Tuning())}
        results["models"] = [measure(name, ceilings.copy_bytes_per_s) for name in args.models]
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    if args.report is not None:
        fill_file(README, {"decode-kernel": report(json.loads(args.report.read_text()))})


if __name__ == "__main__":
    main()
