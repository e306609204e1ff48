"""One model's measurement, growing into a results file: probe the device, compare answers, time every engine, write.

The file is written anew after every process, so an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.engines import REFERENCE, Engine
from benchmarks.floor import Ceilings, ModelCost, floors
from benchmarks.results import write
from benchmarks.worker import run_jobs
from benchmarks.workloads import make_workload
from stage_a_naive.loading import resolve

BYTES_PER_NUMBER = {"float32": 4, "float16": 2, "bfloat16": 2}
CPU_BATCH = 16  # requests that run together at CPU size: fewer than `mixed` has, so that some wait, as on a small GPU
SHORTEST_MODEL_LEN = 4096  # the engines' default


class Measurement:
    """One model's measurement. `payload()` is the results file so far."""

    def __init__(self, args: argparse.Namespace, engines: Sequence[Engine], path: Path) -> None:
        self.args, self.model, self.path = args, args.model, path
        self.engines = [self._limited(engine) for engine in engines]
        self.config = resolve(self.model).config
        self.workloads = {name: make_workload(name, args.size) for name in args.workloads}
        longest = max(workload.longest for workload in self.workloads.values()) + 1
        self.max_model_len = min(self.config.max_position_embeddings, max(SHORTEST_MODEL_LEN, longest))
        self.started = time.monotonic()
        self.found: dict[str, object] = {}  # what is known of the machine
        self.equal: list[str] = []  # engines that passed the parity gate
        self.rows: dict[tuple[str, str], dict] = {}

    def _limited(self, engine: Engine) -> Engine:
        if self.args.size != "cpu" or not engine.sized:
            return engine
        return replace(engine, options={"max_num_seqs": CPU_BATCH, **engine.options})

    @property
    def has_failed(self) -> bool:
        """Whether an engine failed or answered differently; one that was not run has not failed."""
        return any("error" in row for row in self.rows.values())

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)

    def jobs(self, kind: str, different: Sequence[dict], **same: object) -> list[dict]:
        """Run jobs of `worker.py` on this device, side by side."""
        same |= {"kind": kind, "device": self.args.device, "dtype": self.args.dtype}
        return run_jobs([same | job for job in different], self.args.timeout)

    def refuse(self, engine: Engine, outcome: str, reason: str) -> None:
        """Keep an engine out. `outcome`: `not_run`, or `error` where it is the engine's fault."""
        self.say(f"{engine.name}: {outcome.replace('_', ' ')}: {reason}")
        for name in self.workloads:
            self._row(engine, name)[outcome] = reason

    def time_all(self) -> None:
        """Every repeat of every engine, as many at a time as `--gpus` names, writing what there is after them."""
        runs = [
            (repeat, engine)
            for repeat in range(self.args.repeats)
            for engine in self.engines[:: -1 if repeat % 2 else 1]
            if engine.name in self.equal
        ]
        start, width = time.monotonic(), len(self.args.gpus)
        for number in range(0, len(runs), width):
            together = runs[number : number + width]
            process = f"process {number + 1} of {len(runs)}"
            if number:
                seconds_left = (time.monotonic() - start) / number * (len(runs) - number)
                process += f", about {seconds_left / 60:.0f} min left"
            for repeat, engine in together:
                self.say(f"{engine.name}, repeat {repeat + 1} of {self.args.repeats}: {process}")
            self._time(together)
            write(self.payload(), self.path)

    def _time(self, runs: Sequence[tuple[int, Engine]]) -> None:
        """A process for each (repeat, engine), side by side on different GPUs."""
        args = self.args
        todo = [(repeat, engine, names) for repeat, engine in runs if (names := self._unrefused(engine))]
        jobs = [
            {"engine": asdict(engine), "workloads": names, "count": repeat == 0, "gpu": gpu}
            for (repeat, engine, names), gpu in zip(todo, args.gpus, strict=False)
        ]
        found = self.jobs(
            "timing", jobs, model=self.model, size=args.size, max_model_len=self.max_model_len,
            round_seconds=args.round_seconds, max_seconds=args.max_seconds,
        )  # fmt: skip
        for run, result in zip(todo, found, strict=True):
            self._keep(*run, result)

    def _unrefused(self, engine: Engine) -> list[str]:
        """The workloads that have not failed or been left out with this engine."""
        return [name for name in self.workloads if self._row(engine, name).keys().isdisjoint({"not_run", "error"})]

    def _keep(self, repeat: int, engine: Engine, names: Sequence[str], found: dict) -> None:
        """Add what a process found to the engine's rows."""
        for name in names:
            row, measured = self._row(engine, name), dict(found.get("workloads", {}).get(name) or {})
            if not measured:
                measured = {"error": found.get("error", "the process did not get to this workload")}
            samples = [{"repeat": repeat, **sample} for sample in measured.pop("samples", [])]
            for key, value in measured.items():  # the first visit and the launches are those of the first repeat
                row.setdefault(key, value)
            row.setdefault("samples", []).extend(samples)
            row.setdefault("startup_seconds", []).extend(filter(None, [found.get("startup_seconds")]))
            last = {key: round(value, 3) for key, value in list(samples[-1].items())[1:4]} if samples else measured
            self.say(f"    {engine.name}, {name}: {', '.join(f'{key} {value}' for key, value in last.items())}")

    def _row(self, engine: Engine, workload: str) -> dict:
        empty = {
            "engine": engine.name,
            "package": engine.package,
            "options": dict(engine.options),
            "workload": workload,
        }
        return self.rows.setdefault((engine.name, workload), empty)

    def payload(self) -> dict:
        """The results file so far; a row without an outcome yet is left out."""
        args, found = self.args, self.found
        cost = ModelCost(self.config, BYTES_PER_NUMBER[found["dtype"]])
        ceilings = Ceilings(**found["ceilings"])
        outcomes = {"samples", "not_run", "error"}
        order = [self.rows.get((engine.name, name), {}) for name in self.workloads for engine in self.engines]
        return {
            "kind": "engines",
            "environment": found["environment"],
            "options": {
                "size": args.size, "model": self.model, "dtype": found["dtype"], "study": args.study,
                "repeats": args.repeats, "round_seconds": args.round_seconds, "max_seconds": args.max_seconds,
                "max_model_len": self.max_model_len,
            },
            "ceilings": found["ceilings"], "launch_seconds": found["launch_seconds"],
            "workloads": {
                name: {"hash": w.hash, "description": w.description, "floor": floors(w, cost, ceilings)}
                for name, w in self.workloads.items()
            },
            "parity": {"model": args.parity_model, "reference": REFERENCE.name, "equal": self.equal},
            "rows": [row for row in order if not outcomes.isdisjoint(row)],
        }  # fmt: skip


def look(measurement: Measurement) -> None:
    """Look at the machine and pass the parity gate: every engine must give the very tokens that the reference gives.

    A fast wrong answer is worth nothing, and a kernel that reads past its cache is often fast. Greedy answers to a few
    questions are compared token by token, with the tutor: its margins are wide. All engines answer in one process (with
    `--gpus` in one on each), one after another; where one takes the process down, another goes on with the next.

    Raises:
        SystemExit: the device or the reference itself does not work, so nothing can be compared.
    """
    measurement.say(f"{measurement.model}, size {measurement.args.size}: all engines answer the same questions first")
    for engine in measurement.engines:
        need = engine.unmet_need(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        if need is not None:
            measurement.refuse(engine, "not_run", need)
    refused = {name for name, _ in measurement.rows}
    able = [engine for engine in measurement.engines if engine.name not in refused]
    todo = [REFERENCE, *(engine for engine in able if engine.name != REFERENCE.name)]
    answers: dict[str, list[list[int]]] = {}
    args, gpus = measurement.args, measurement.args.gpus
    while todo:
        shares = [(todo[i :: len(gpus)], gpu) for i, gpu in enumerate(gpus) if todo[i:]]
        jobs = [{"engines": list(map(asdict, share)), "gpu": gpu} for share, gpu in shares]
        todo = []
        for (share, _), found in zip(shares, measurement.jobs("look", jobs, model=args.parity_model), strict=True):
            answers |= found.pop("answers", {})
            measurement.found = found | measurement.found
            silent = [engine for engine in share if engine.name not in answers]
            if REFERENCE.name not in answers:
                raise SystemExit(f"the reference engine {REFERENCE.name} does not answer: {found['error']}")
            if silent:
                measurement.refuse(silent[0], "error", f"no answers: {found['error']}")
                todo += silent[1:]
    expected = answers[REFERENCE.name]
    for engine in (engine for engine in able if engine.name in answers):
        if answers[engine.name] == expected:
            measurement.equal.append(engine.name)
        else:
            measurement.refuse(engine, "error", f"parity gate: {difference(expected, answers[engine.name])}")
    device, ceilings = measurement.found["environment"]["device"]["name"], Ceilings(**measurement.found["ceilings"])
    measurement.say(
        f"{device}: copies {ceilings.copy_bytes_per_s / 1e9:.0f} GB/s, multiplies "
        f"{ceilings.matmul_operations_per_s / 1e12:.2f} TFLOP/s in {measurement.found['dtype']}; equal answers: "
        f"{', '.join(measurement.equal) or 'none'}"
    )


def difference(expected: list[list[int]], found: list[list[int]]) -> str:
    """Where two different lists of answers part, for the error message."""
    question = next(i for i, (want, got) in enumerate(zip(expected, found, strict=True)) if want != got)
    want, got = expected[question], found[question]
    differing = (i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b)
    at = next(differing, min(len(want), len(got)))
    parts = f"answer {question} parts from {REFERENCE.name}'s at token {at}"
    return f"{parts}: {want[at : at + 5]} became {got[at : at + 5]}"
