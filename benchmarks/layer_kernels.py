"""A decode step by the kinds of layers that stage F can run, over the rows of the batch.

    python -m benchmarks.layer_kernels --output layers.json     # on an NVIDIA GPU
    python -m benchmarks.layer_kernels --report layers.json     # anywhere: the table of stage F's README

A sample is a CUDA graph of one whole step, from the embedding to the logits, so what is timed is the device, not
Python; the weights of all layers are many times the L2 cache. Here it was measured up to how many rows each kind is the
fastest: `FUSED_DECODE_ROWS` (one launch) and `SKINNY_GEMM_MAX_TOKENS` (five launches).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.ceilings import measure_ceilings
from benchmarks.decode_kernel import README, make_model, step_arguments, step_bytes
from benchmarks.environment import environment
from benchmarks.markers import fill_file
from stage_c_fused_mlp.fused_mlp import MOST_ROWS_FUSED, load_operators
from stage_d_paged.attention import AttentionMetadata, pick_backend
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.model import DecoderModel
from stage_f_graph_tp.fused_decode import MAX_ROWS, FusedDecode

MODELS = ("qwen2.5-0.5b", "qwen3-0.6b")
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
CONTEXT = 640
PAGE = 64
LONGEST = 4096  # what the graphs are recorded for
REPLAYS, REPEATS = 10, 9
KINDS = {
    "stage D": "stage D",
    "operator": "with stage C's operator",
    "nine": "nine launches",
    "five": "five launches",
    "one": "one launch a step",
}


def time_graph(step: Callable[[], object]) -> list[float]:
    """Seconds a call of `step`, recorded as a CUDA graph; one number a sample."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    samples = []
    for _ in range(REPEATS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / REPLAYS)
    return samples[2:]


def step_of(model: DecoderModel, rows: int) -> Callable[[], torch.Tensor]:
    """A decode step of `rows` requests on any layers."""
    ids, positions, slots, tables, lengths, pool = step_arguments(model.config, rows, CONTEXT, PAGE)
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    metadata = AttentionMetadata(starts, lengths, slots, tables, 1, LONGEST)
    config = model.config
    blocks = pool.shape[2]
    cache = KVCache(config.num_layers, blocks, PAGE, config.num_kv_heads, config.head_dim, pool.dtype, pool.device)
    cache.tensor.copy_(pool)
    return lambda: model.compute_logits(model(ids, positions, cache, metadata))


def one_launch(model: DecoderModel, rows: int) -> Callable[[], None]:
    """The same step as one kernel."""
    fused = FusedDecode(model)
    arguments = step_arguments(model.config, rows, CONTEXT, PAGE)
    logits = fused.make_logits(rows)
    return lambda: fused.step(*arguments, logits)


@torch.inference_mode()
def measure(name: str, copy_bytes_per_s: float) -> list[dict]:
    """Every kind of layer at every number of rows."""
    from stage_f_graph_tp.kernels.fused_layers import fuse_layers  # here: Triton is needed on a GPU alone

    load_operators().require_cuda()
    found = []
    for kind in KINDS:
        model = make_model(name, pick_backend("triton", torch.device("cuda"), torch.bfloat16, 128))
        if kind == "operator":
            for layer in model.layers:
                layer.most_fused_rows = MOST_ROWS_FUSED
        if kind in ("nine", "five"):
            fuse_layers(model, skinny_max_tokens=0 if kind == "nine" else max(ROWS))
        for rows in (rows for rows in ROWS if kind != "one" or rows <= MAX_ROWS):
            samples = time_graph((one_launch if kind == "one" else step_of)(model, rows))
            floor = step_bytes(model.config, rows, CONTEXT) / copy_bytes_per_s
            found.append({"model": name, "kind": kind, "rows": rows, "seconds": statistics.median(samples),
                          "floor": floor, "samples": samples})  # fmt: skip
            print(f"{name:14} {kind:9} {rows:4} rows: {found[-1]['seconds'] * 1e6:7.1f} us", flush=True)
    return found


def report(results: dict) -> str:
    """The table, in Markdown; the fastest of a row is in bold."""
    lines = []
    for name in dict.fromkeys(step["model"] for step in results["steps"]):
        steps = [step for step in results["steps"] if step["model"] == name]
        lines += [f"**{name}**, µs a step", "", f"| rows | {' | '.join(KINDS.values())} | floor |"]
        lines.append("|---" * (len(KINDS) + 2) + "|")
        for rows in dict.fromkeys(step["rows"] for step in steps):
            row = {step["kind"]: step["seconds"] for step in steps if step["rows"] == rows}
            fastest = min(row, key=row.get)
            cells = [f"{row[kind] * 1e6:.0f}" if kind in row else "–" for kind in KINDS]
            cells[list(KINDS).index(fastest)] = f"**{row[fastest] * 1e6:.0f}**"
            floor = next(step["floor"] for step in steps if step["rows"] == rows)
            lines.append(f"| {rows} | {' | '.join(cells)} | {floor * 1e6:.0f} |")
        lines.append("")
    lines.append(
        f"{results['device']['name']}, copies {results['copy_bytes_per_s'] / 1e12:.2f} TB/s, bfloat16, context "
        f"{CONTEXT}, commit {results['commit'][:7]}; medians of {REPEATS} samples of {REPLAYS} replays."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layer_kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="measure, and write the results here")
    parser.add_argument("--report", type=Path, help="write the table of this file into stage F's README")
    args = parser.parse_args()
    if args.output is None and args.report is None:
        parser.error("give --output to measure or --report to write the README")
    if args.output is not None:
        ceilings = measure_ceilings(torch.device("cuda"), torch.bfloat16)
        results = {"kind": "layer_kernels"} | environment() | {"copy_bytes_per_s": ceilings.copy_bytes_per_s}
        results["steps"] = [step for name in MODELS for step in measure(name, ceilings.copy_bytes_per_s)]
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    if args.report is not None:
        fill_file(README, {"layer-kernels": report(json.loads(args.report.read_text()))})


if __name__ == "__main__":
    main()
