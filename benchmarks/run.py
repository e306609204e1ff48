"""The runner: the same work through every engine, honestly.

    python -m benchmarks.run --size cpu
    python -m benchmarks.run --size gpu --model random:qwen2.5-0.5b --engines A "B compiled" F --workloads single mixed

What makes it honest: a fresh process per engine and repeat; the order of the engines reversed in every second repeat,
so that a machine that warms up or is disturbed favours nobody; tokens compared before anything is timed (an engine that
answers differently is refused); every sample kept; the hardware's floor printed beside the figure; and whatever did not
run named with the reason.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.engines import Engine, select
from benchmarks.measurement import Measurement
from benchmarks.parity import parity_gate
from benchmarks.results import RESULTS_DIRECTORY
from benchmarks.workloads import SIZES, workload_names
from stage_a_naive.loading import resolve

CPU_SEATS = 16

MODELS = {"cpu": ["tutor"], "gpu": ["random:qwen2.5-0.5b", "random:qwen3-0.6b"], "tiny": ["tutor"]}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--model", nargs="+", help="models, one results file each (default: depends on the size)")
    parser.add_argument("--engines", nargs="+", default=[], help="NAME or NAME[option=value,...] (default: all here)")
    parser.add_argument("--engine-options", nargs="+", default=[], metavar="NAME.OPTION=VALUE")
    parser.add_argument("--workloads", nargs="+", default=workload_names(), choices=workload_names(), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes per engine (default: %(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--parity-model", default="tutor", help="whose answers are compared first")
    parser.add_argument("--round-seconds", type=float, help="no further round of a workload after so long")
    parser.add_argument("--max-seconds", type=float, help="a workload that would take longer is not run")
    parser.add_argument("--timeout", type=float, help="a process that takes longer is stopped")
    parser.add_argument("--output", help="results file; {model} in it stands for the model's name")
    return parser


LIMITS = {  # size: seconds of --round-seconds, --max-seconds, --timeout
    "cpu": (1.0, 60.0, 400.0),
    "gpu": (5.0, 90.0, 400.0),
    "tiny": (0.0, 30.0, 120.0),
}


def results_path(output: str | None, size: str, model: str, several: bool) -> Path:
    """Where a model's results go."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", model.removeprefix("random:")).strip("-")
    if output is None:
        return RESULTS_DIRECTORY / f"{size}-{name}.json"
    if several and "{model}" not in output:
        raise ValueError("several models need {model} in --output, or each would overwrite the one before")
    return Path(output.replace("{model}", name))


def with_seats(engine: Engine, size: str) -> Engine:
    """At CPU size an engine that batches has 16 seats: what the pool of a small GPU would hold of these requests.

    Without that limit all requests of the small workloads would run at once, and who waits for whom, which is what
    batching is about, would never show.
    """
    if size != "cpu" or not engine.sized:
        return engine
    return replace(engine, options={"max_num_seqs": CPU_SEATS, **engine.options})


def main(argv: list[str] | None = None) -> int:
    """Measure; returns 1 where an engine failed or answered differently, 2 where the arguments are wrong."""
    args = build_parser().parse_args(argv)
    for name, default in zip(("round_seconds", "max_seconds", "timeout"), LIMITS[args.size], strict=True):
        setattr(args, name, default if getattr(args, name) is None else getattr(args, name))
    models = args.model or MODELS[args.size]
    try:
        if args.size == "gpu" and args.device == "auto" and not torch.cuda.is_available():
            raise ValueError("size 'gpu' needs a GPU, and PyTorch sees none; use --size cpu or --device cpu")
        engines = [with_seats(engine, args.size) for engine in select(args.engines, args.engine_options)]
        paths = [results_path(args.output, args.size, model, len(models) > 1) for model in models if resolve(model)]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        return measure_all(args, engines, dict(zip(models, paths, strict=True)))
    except KeyboardInterrupt:
        print("interrupted; what was measured is in the results file", file=sys.stderr)
        return 130


def measure_all(args: argparse.Namespace, engines: list[Engine], models: dict[str, Path]) -> int:
    """All models, each into its file; the parity gate once for all of them."""
    refusals = None
    failed = False
    for model, path in models.items():
        measurement = Measurement(args, model, engines, path)
        say = measurement.say
        say(f"{model}, size {args.size}: {', '.join(engine.name for engine in engines)}")
        num_gpus = measurement.probe()
        if refusals is None:
            where = (args.parity_model, args.device, args.dtype)
            refusals = parity_gate(engines, *where, num_gpus, args.timeout, say)
        measurement.refuse(refusals, args.parity_model)
        measurement.time_all()
        say(f"written: {path}")
        failed |= measurement.has_failed
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
