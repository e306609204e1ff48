"""What each idea of stage F is worth, and what more GPUs are worth.

    python -m benchmarks.graph_ablation                                # measure, into benchmarks/results/
    python -m benchmarks.graph_ablation --tensor-parallel-size 2 4     # several ranks as well
    python -m benchmarks.graph_ablation --report                       # write the tables of stage F's README

All ideas on, then one at a time off, then all off, on the shared benchmark's `single` and `mixed`; next to the times,
how many kernels a decode step runs and how many orders the CPU gives for it. The engines are built in turn, in one
process, each freed before the next. That all give the same tokens is held by stage F's tests, on the trained model.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.all_reduce import all_reduce_microseconds
from benchmarks.ceilings import measure_ceilings
from benchmarks.engines import ENGINES, Engine
from benchmarks.environment import environment
from benchmarks.floor import ModelCost, floors
from benchmarks.graph_ablation_report import KIND, report, tables
from benchmarks.launches import count_launches, launch_costs
from benchmarks.measure import SHORTEST_MODEL_LEN, run_workload
from benchmarks.results import RESULTS_DIRECTORY
from benchmarks.workloads import SIZES, Workload, make_workload
from stage_a_naive.loading import pick_device, pick_dtype, resolve
from stage_f_graph_tp import LLM

MODELS = {"cpu": "tutor", "cuda": "random:qwen2.5-0.5b"}
WORKLOADS = ("single", "mixed")
ALL_REDUCE_ROWS = (1, 32, 256)

# Name -> options of stage F's LLM.
NO_FUSED = {"fused": False, "fused_mlp": "off"}
VARIANTS: dict[str, Mapping[str, object]] = {
    "all on": {},
    "no fused kernels": NO_FUSED,
    "no overlap": {"overlap": False},
    "no graphs": {"enforce_eager": True},
    "none of them": {"enforce_eager": True, "overlap": False, **NO_FUSED},
}


def measure(args: argparse.Namespace) -> dict:
    """Every variant, then every number of ranks; returns the payload of a results file."""
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    model = args.model or MODELS[device.type]
    size = args.size or ("gpu" if device.type == "cuda" else "cpu")
    workloads = [make_workload(name, size) for name in args.workloads]
    config = resolve(model).config
    ceilings = measure_ceilings(device, dtype)
    cost = ModelCost(config, dtype.itemsize)
    payload = {
        "kind": KIND, "environment": environment(), "model": model, "device": device.type, "size": size,
        "dtype": str(dtype).removeprefix("torch."), "layers": config.num_hidden_layers, "ceilings": asdict(ceilings),
        "launch_costs": launch_costs(device),
        "workloads": {
            w.name: {"hash": w.hash, "description": w.description, "floor": floors(w, cost, ceilings)}
            for w in workloads
        },
        "rows": [], "all_reduce": {},
    }  # fmt: skip
    for name in args.variants:
        payload["rows"].append(measure_row(args, model, device, workloads, name, VARIANTS[name]))
    for ranks in args.tensor_parallel_size:
        options = {"tensor_parallel_size": ranks}
        payload["rows"].append(measure_row(args, model, device, workloads, f"{ranks} ranks", options))
        for library in [False, True] if device.type == "cuda" else [False]:
            times = all_reduce_microseconds(ranks, ALL_REDUCE_ROWS, config.hidden_size, dtype, device.type, library)
            name = f"{ranks}, NCCL" if library else str(ranks)
            payload["all_reduce"][name] = {str(rows): microseconds for rows, microseconds in times.items()}
    return payload


def measure_row(
    args: argparse.Namespace,
    model: str,
    device: torch.device,
    workloads: list[Workload],
    name: str,
    options: Mapping[str, object],
) -> dict:
    """Build an engine, run the workloads, count its launches, free it."""
    [engine] = [engine for engine in ENGINES if engine.name == "F"]
    positions = resolve(model).config.max_position_embeddings
    max_model_len = min(positions, max(SHORTEST_MODEL_LEN, *(w.longest + 1 for w in workloads)))
    llm = LLM(model, device=args.device, dtype=args.dtype, max_model_len=max_model_len, **options)
    row = {"name": name, "options": dict(options), "ranks": llm.options.tensor_parallel_size,
           "build_seconds": llm.build_time, "workloads": {}}  # fmt: skip
    try:
        for workload in workloads:
            row["workloads"][workload.name] = _samples(args, llm, engine, workload, device)
        row["launches"] = count_launches(llm, list(workloads[0].warm_up_round()[0].prompts[0]))
    finally:
        llm.close()
    if llm.runner.graphs is not None:
        row["graph_bytes"] = llm.runner.graphs.num_bytes
    print(f"{name}: {json.dumps(row['workloads'])} {row['launches']}", flush=True)
    del llm
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def _samples(
    args: argparse.Namespace, llm: LLM, engine: Engine, workload: Workload, device: torch.device
) -> list[dict[str, float]]:
    result = run_workload(llm, engine, workload, device, args.seconds, args.max_seconds)
    if "samples" not in result:
        raise RuntimeError(f"{workload.name} was not run: {result['not_run']}; raise --max-seconds")
    return result["samples"]


def main(argv: list[str] | None = None) -> int:
    """Measure or report; returns 2 where the arguments or a results file are wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graph_ablation", description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="write stage F's README, measure nothing")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--tensor-parallel-size", type=int, nargs="*", default=[], metavar="N", help="ranks to add")
    parser.add_argument("--model", help="default: the tutor on a CPU, random:qwen2.5-0.5b on a GPU")
    parser.add_argument("--size", choices=SIZES, help="default: by the device")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seconds", type=float, default=4.0, help="of rounds of a workload, at least one round")
    parser.add_argument("--max-seconds", type=float, default=60.0, help="longest round that is run at all")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/graph-ablation-<device>-<model>.json")
    args = parser.parse_args(argv)
    try:
        if args.report:
            report()
            return 0
        payload = measure(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    name = payload["model"].removeprefix("random:").replace("/", "-")
    output = args.output or RESULTS_DIRECTORY / f"graph-ablation-{payload['device']}-{name}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")
    if payload["environment"]["commit"]:
        print("\n".join(line for lines in tables(payload).values() for line in lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
