"""One model's measurement, growing into a results file: probe the device, time every engine, write.

The file is written anew after every process, so an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from benchmarks.engines import REFERENCE, Engine
from benchmarks.figures import summarise
from benchmarks.floor import Ceilings, ModelCost, floors, percent_of_floor
from benchmarks.launch import engine_job, run_job
from benchmarks.parity import Refusals
from benchmarks.results import SCHEMA
from benchmarks.workloads import make_workload
from stage_a_naive.loading import resolve

BYTES_PER_NUMBER = {"float32": 4, "float16": 2, "bfloat16": 2}


class Measurement:
    """One model's measurement, growing into a results file."""

    def __init__(self, args: argparse.Namespace, model: str, engines: list[Engine], path: Path) -> None:
        self.args, self.model, self.engines, self.path = args, model, engines, path
        self.started = time.monotonic()
        self.samples: dict[tuple[str, str], list[dict]] = {}  # (engine, workload) -> a dict of figures a round
        self.peaks: dict[tuple[str, str], dict] = {}
        self.reasons: dict[tuple[str, str], dict] = {}  # why there are no samples: {"not_run" | "error": text}
        self.builds: dict[str, list[float]] = {}  # engine -> seconds, one a process
        self.model_lens: dict[str, int] = {}  # engine -> max_model_len, of those that are sized by it
        self.payload: dict = {
            "kind": "engines",
            "schema": SCHEMA,
            "size": args.size,
            "model": model,
            "repeats": args.repeats,
            "limits": {"round_seconds": args.round_seconds, "max_seconds": args.max_seconds, "timeout": args.timeout},
        }

    @property
    def has_failed(self) -> bool:
        """Whether an engine failed or answered differently; one that was not run has not failed."""
        return any("error" in reason for reason in self.reasons.values())

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.0f} s] {text}", flush=True)

    def probe(self) -> int:
        """Learn what the machine is and what it can do at best; compute the floors. Returns the number of GPUs."""
        found = run_job({"kind": "probe", "device": self.args.device, "dtype": self.args.dtype}, self.args.timeout)
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
        return environment["device"].get("count", 0)

    def refuse(self, refusals: Refusals, parity_model: str) -> None:
        """Keep the engines out that did not pass the parity gate."""
        for name, reason in refusals.items():
            self.reasons |= {(name, workload): dict(reason) for workload in self.args.workloads}
        equal = [engine.name for engine in self.engines if engine.name not in refusals]
        self.payload["parity"] = {"model": parity_model, "reference": REFERENCE, "equal": equal}

    def time_all(self) -> None:
        """Every repeat of every engine, writing what there is after each process."""
        args = self.args
        what = {"model": self.model, "size": args.size, "device": args.device, "dtype": args.dtype}
        limits = {"round_seconds": args.round_seconds, "max_seconds": args.max_seconds}
        self.write()
        number, last = 0, args.repeats * len(self.engines)
        for repeat in range(args.repeats):
            for engine in in_alternating_order(self.engines, repeat):
                number += 1
                names = [name for name in args.workloads if (engine.name, name) not in self.reasons]
                if not names:
                    continue
                self.say(f"process {number} of {last}: {engine.name}")
                job = engine_job("timing", engine, workloads=names, **what, **limits)
                self.take(engine, repeat, names, run_job(job, args.timeout))
                self.write()

    def take(self, engine: Engine, repeat: int, names: list[str], found: dict) -> None:
        """Add one process's results to the rows."""
        self.builds.setdefault(engine.name, []).extend([found["build_seconds"]] if "build_seconds" in found else [])
        if engine.sized and "max_model_len" in found:
            self.model_lens[engine.name] = engine.options.get("max_model_len", found["max_model_len"])
        for name in names:
            key, measured = (engine.name, name), found.get("workloads", {}).get(name)
            if measured is None:
                measured = {"error": found.get("error", "the process did not get to this workload")}
            if "samples" not in measured:
                self.reasons[key] = measured
                self.say(f"    {name}: {next(iter(measured.values()))}")
                continue
            self.samples.setdefault(key, []).extend({"repeat": repeat, **sample} for sample in measured["samples"])
            peak = self.peaks.setdefault(key, measured["peak_memory"])
            peak["bytes"] = max(peak["bytes"], measured["peak_memory"]["bytes"])
            first = {k: round(v, 3) for k, v in list(measured["samples"][-1].items())[:3]}
            self.say(f"    {name}: {first}")

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
            "max_model_len": self.model_lens.get(engine.name),
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
