"""The runner: the same work through every engine, honestly.

    python -m benchmarks.run --size cpu
    python -m benchmarks.run --size gpu --model random:qwen2.5-0.5b --engines A "B compiled" F --workloads single mixed

What makes it honest: a fresh process per engine and repeat; the order of the engines reversed in every second repeat, so
that a machine that warms up or is disturbed favours nobody; tokens compared before anything is timed (an engine that
answers differently is refused); every sample kept; the hardware's floor printed beside the figure; and whatever did not
run named with the reason.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.engines import ENGINES, REFERENCE, Engine, select, unmet_need
from benchmarks.figures import summarise
from benchmarks.floor import Ceilings, ModelCost, floors, percent_of_floor
from benchmarks.launch import run_job
from benchmarks.results import RESULTS_DIRECTORY, SCHEMA
from benchmarks.workloads import SIZES, make_workload, workload_names
from stage_a_naive.loading import ModelError, resolve

MODELS = {"cpu": ["tutor"], "gpu": ["random:qwen2.5-0.5b", "random:qwen3-0.6b"], "tiny": ["tutor"]}
BYTES_PER_NUMBER = {"float32": 4, "float16": 2, "bfloat16": 2}


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
    "cpu": (1.0, 30.0, 300.0),
    "gpu": (5.0, 90.0, 400.0),
    "tiny": (0.0, 30.0, 120.0),
}


class Run:
    """One model's measurement, growing into a results file."""

    def __init__(self, args: argparse.Namespace, model: str, engines: list[Engine], path: Path) -> None:
        self.args, self.model, self.engines, self.path = args, model, engines, path
        self.started = time.monotonic()
        self.samples: dict[tuple[str, str], list[dict]] = {}  # (engine, workload) -> a dict of figures a round
        self.peaks: dict[tuple[str, str], dict] = {}
        self.reasons: dict[tuple[str, str], dict] = {}  # why there are no samples: {"not_run" | "error": text}
        self.builds: dict[str, list[float]] = {}
        self.payload: dict = {
            "kind": "engines",
            "schema": SCHEMA,
            "size": args.size,
            "model": model,
            "repeats": args.repeats,
            "limits": {"round_seconds": args.round_seconds, "max_seconds": args.max_seconds, "timeout": args.timeout},
        }

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.0f} s] {text}", flush=True)

    def job(self, kind: str, engine: Engine | None = None, **more: object) -> dict:
        job = {"kind": kind, "device": self.args.device, "dtype": self.args.dtype, "model": self.model, **more}
        return job if engine is None else {**job, "engine": {**asdict(engine), "options": dict(engine.options)}}

    def probe(self) -> None:
        """Learn what the machine is and what it can do at best; compute the floors from it."""
        found = run_job(self.job("probe"), self.args.timeout)
        if "error" in found:
            raise SystemExit(f"the device cannot be measured: {found['error']}")
        self.payload |= {key: found[key] for key in ("environment", "dtype", "ceilings")}
        ceilings = Ceilings(**found["ceilings"])
        cost = ModelCost(resolve(self.model).config, BYTES_PER_NUMBER[found["dtype"]])
        self.payload["step_bytes"] = {"weights": cost.weight_bytes, "kv_per_token": cost.kv_bytes_per_token}
        self.payload["workloads"] = {}
        for name in self.args.workloads:
            workload = make_workload(name, self.args.size)
            calls = workload.rounds[0]
            self.payload["workloads"][name] = {
                "hash": workload.hash,
                "description": workload.description,
                "prompt_tokens": sum(call.prompt_tokens for call in calls),
                "output_tokens": sum(call.output_tokens for call in calls),
                "floor": floors(workload, cost, ceilings),
            }
        environment = found["environment"]
        self.say(
            f"{environment['device']['name']}: copies {ceilings.copy_bytes_per_s / 1e9:.0f} GB/s, "
            f"multiplies {ceilings.matmul_operations_per_s / 1e12:.2f} TFLOP/s in {found['dtype']}"
        )
        if environment["commit"] is None:
            self.say("warning: no commit is known, so the report will refuse this file; set BENCH_COMMIT")

    def parity_gate(self) -> None:
        """Compare every engine's greedy answers with the reference's, and refuse those that differ."""
        model = self.args.parity_model
        gate: dict = {"model": model, "reference": REFERENCE, "equal": []}
        self.payload["parity"] = gate
        [reference] = [engine for engine in ENGINES if engine.name == REFERENCE]
        expected = run_job(self.job("parity", reference, model=model), self.args.timeout)
        if "error" in expected:
            raise SystemExit(f"the reference engine {REFERENCE} does not answer: {expected['error']}")
        num_gpus = self.payload["environment"]["device"].get("count", 0)
        for engine in self.engines:
            need = unmet_need(engine, num_gpus)
            if need is not None:
                self.refuse(engine, "not_run", need)
                continue
            found = expected
            if engine != reference:
                found = run_job(self.job("parity", engine, model=model), self.args.timeout)
            if "error" in found:
                self.refuse(engine, "error", f"no answers: {found['error']}")
            elif found["answers"] != expected["answers"]:
                self.refuse(engine, "error", "parity gate: " + difference(expected["answers"], found["answers"]))
            else:
                gate["equal"].append(engine.name)
                self.say(f"parity: {engine.name} answers as {REFERENCE} does")

    def refuse(self, engine: Engine, outcome: str, reason: str) -> None:
        for workload in self.args.workloads:
            self.reasons[engine.name, workload] = {outcome: reason}
        self.say(f"{engine.name}: {outcome.replace('_', ' ')}: {reason}")

    def time_all(self) -> None:
        """Every repeat of every engine, writing what there is after each process."""
        for repeat in range(self.args.repeats):
            for engine in in_alternating_order(self.engines, repeat):
                names = [name for name in self.args.workloads if (engine.name, name) not in self.reasons]
                if not names:
                    continue
                limits = {"round_seconds": self.args.round_seconds, "max_seconds": self.args.max_seconds}
                job = self.job("timing", engine, size=self.args.size, workloads=names, **limits)
                self.take(engine, repeat, names, run_job(job, self.args.timeout))
                self.write()

    def take(self, engine: Engine, repeat: int, names: list[str], found: dict) -> None:
        """Add one process's results to the rows."""
        self.builds.setdefault(engine.name, []).extend([found["build_seconds"]] if "build_seconds" in found else [])
        for name in names:
            key, measured = (engine.name, name), found.get("workloads", {}).get(name)
            if measured is None:
                measured = {"error": found.get("error", "the process did not get to this workload")}
            if "samples" not in measured:
                self.reasons[key] = measured
                self.say(f"repeat {repeat + 1}  {engine.name}  {name}: {next(iter(measured.values()))}")
                continue
            self.samples.setdefault(key, []).extend({"repeat": repeat, **sample} for sample in measured["samples"])
            peak = self.peaks.setdefault(key, measured["peak_memory"])
            peak["bytes"] = max(peak["bytes"], measured["peak_memory"]["bytes"])
            first = {k: round(v, 3) for k, v in list(measured["samples"][-1].items())[:3]}
            self.say(f"repeat {repeat + 1}  {engine.name}  {name}: {first}")

    def row(self, engine: Engine, name: str) -> dict:
        """One line of the results: an engine on a workload."""
        key = (engine.name, name)
        row = {"engine": engine.name, "package": engine.package, "options": dict(engine.options), "workload": name}
        if key in self.reasons:
            row |= self.reasons[key]
        if key not in self.samples:
            return row
        floor = self.payload["workloads"][name]["floor"]
        figures = summarise([{k: v for k, v in sample.items() if k != "repeat"} for sample in self.samples[key]])
        for figure, summary in figures.items():
            if figure in floor:
                summary["percent_of_floor"] = percent_of_floor(figure, summary["median"], floor[figure])
        return row | {
            "figures": figures,
            "samples": self.samples[key],
            "peak_memory": self.peaks[key],
            "build_seconds": self.builds[engine.name],
        }

    def write(self) -> None:
        rows = [self.row(engine, name) for name in self.args.workloads for engine in self.engines]
        done = [row for row in rows if len(row) > 4]  # a row without an outcome yet is still to come
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**self.payload, "rows": done}, indent=1, ensure_ascii=False)
        self.path.write_text(text + "\n", encoding="utf-8")


def in_alternating_order(engines: list[Engine], repeat: int) -> list[Engine]:
    """A B C, then C B A, then A B C, …"""
    return engines[::-1] if repeat % 2 else list(engines)


def difference(expected: list[list[int]], found: list[list[int]]) -> str:
    """Where two lists of answers part, for the error message."""
    for question, (want, got) in enumerate(zip(expected, found, strict=True)):
        if want != got:
            at = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got)))
            return f"answer {question} parts from {REFERENCE}'s at token {at}: {want[at:at + 5]} became {got[at:at + 5]}"
    return "the answers are equal"


def results_path(output: str | None, size: str, model: str, several: bool) -> Path:
    """Where a model's results go; the name of a new file is never that of an old one only if --output says so."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", model.removeprefix("random:")).strip("-")
    if output is None:
        return RESULTS_DIRECTORY / f"{size}-{name}.json"
    if several and "{model}" not in output:
        raise ValueError("several models need {model} in --output, or each would overwrite the one before")
    return Path(output.replace("{model}", name))


def main(argv: list[str] | None = None) -> int:
    """Measure; returns 1 where an engine failed or answered differently, 2 where the arguments are wrong."""
    args = build_parser().parse_args(argv)
    for name, default in zip(("round_seconds", "max_seconds", "timeout"), LIMITS[args.size], strict=True):
        setattr(args, name, default if getattr(args, name) is None else getattr(args, name))
    models = args.model or MODELS[args.size]
    try:
        engines = select(args.engines, args.engine_options)
        runs = [
            Run(args, model, engines, results_path(args.output, args.size, model, len(models) > 1))
            for model in models if resolve(model)
        ]
    except (ValueError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = False
    for run in runs:
        run.say(f"{run.model}, size {args.size}: {', '.join(engine.name for engine in engines)}")
        run.probe()
        run.parity_gate()
        run.write()
        run.time_all()
        run.write()
        run.say(f"written: {run.path}")
        failed |= any("error" in reason for reason in run.reasons.values())
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
