"""One model's measurement, growing into a results file: look at the device, compare answers, time every engine.

The file is written anew after every process, so an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path

import torch

from benchmarks.engines import REFERENCE, Engine
from benchmarks.floor import Ceilings, ModelCost, floors
from benchmarks.results import write
from benchmarks.worker import run_job
from benchmarks.workloads import make_workload
from stage_a_naive.loading import DTYPES, resolve

CPU_BATCH = 16  # requests that run together at CPU size: fewer than `mixed` has, so that some wait, as on a small GPU
SHORTEST_MODEL_LEN = 4096  # the engines' default
OUTCOMES = ("samples", "not_run", "error")


class Measurement:
    """One model's measurement by the command line's `args`. `payload()` is the results file so far."""

    def __init__(self, args: argparse.Namespace, engines: Sequence[Engine], path: Path) -> None:
        self.args, self.path, self.started = args, path, time.monotonic()
        limit = {"max_num_seqs": CPU_BATCH} if args.size == "cpu" else {}
        self.engines = [replace(e, options={**limit, **e.options}) if e.sized else e for e in engines]
        self.workloads = {name: make_workload(name, args.size) for name in args.workloads}
        self.config = resolve(args.model).config
        longest = max(workload.longest for workload in self.workloads.values()) + 1
        self.max_model_len = min(self.config.max_position_embeddings, max(SHORTEST_MODEL_LEN, longest))
        self.found: dict[str, object] = {}  # what is known of the machine
        self.equal: list[str] = []  # engines that passed the parity gate
        self.rows: dict[tuple[str, str], dict] = {
            (e.name, name): {"engine": e.name, "package": e.package, "options": dict(e.options), "workload": name}
            for name in args.workloads for e in self.engines
        }  # fmt: skip

    @property
    def has_failed(self) -> bool:
        """Whether an engine failed or answered differently; one that was not run has not failed."""
        return any("error" in row for row in self.rows.values())

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)

    def job(self, kind: str, **more: object) -> dict:
        """Run a job of `worker.py` on this device."""
        return run_job({"kind": kind, "device": self.args.device, "dtype": self.args.dtype} | more, self.args.timeout)

    def refuse(self, engine: Engine, outcome: str, reason: str) -> None:
        """Keep an engine out. `outcome`: `not_run`, or `error` where it is the engine's fault."""
        self.say(f"{engine.name}: {outcome.replace('_', ' ')}: {reason}")
        for name in self.workloads:
            self.rows[engine.name, name][outcome] = reason

    def look(self) -> None:
        """Look at the machine and pass the parity gate: every engine must give the tokens that the reference gives.

        A fast wrong answer is worth nothing, and a kernel that reads past its cache is often fast. Greedy answers to a
        few questions are compared token by token, with the tutor: its margins are wide. All engines answer in one
        process, one after another; where one takes the process down, another process goes on with the next.

        Raises:
            SystemExit: the device or the reference itself does not work, so nothing can be compared.
        """
        self.say(f"{self.args.model}, size {self.args.size}: all engines answer the same questions first")
        able, answers = [], {}
        for engine in self.engines:
            if need := engine.unmet_need(torch.cuda.device_count()):
                self.refuse(engine, "not_run", need)
            else:
                able.append(engine)
        todo = [REFERENCE, *(engine for engine in able if engine.name != REFERENCE.name)]
        while todo:
            found = self.job("look", engines=list(map(asdict, todo)), model=self.args.parity_model)
            answers |= found.pop("answers", {})
            self.found = found | self.found
            if REFERENCE.name not in answers:
                raise SystemExit(f"the reference engine {REFERENCE.name} does not answer: {found['error']}")
            todo = [engine for engine in todo if engine.name not in answers]
            for engine in todo[:1]:
                self.refuse(engine, "error", f"no answers: {found['error']}")
            todo = todo[1:]
        for engine in (engine for engine in able if engine.name in answers):
            if different := difference(answers[REFERENCE.name], answers[engine.name]):
                self.refuse(engine, "error", different)
            else:
                self.equal.append(engine.name)
        device, ceilings = self.found["environment"]["device"]["name"], Ceilings(**self.found["ceilings"])
        self.say(
            f"{device}: copies {ceilings.copy_bytes_per_s / 1e9:.0f} GB/s, multiplies "
            f"{ceilings.matmul_operations_per_s / 1e12:.2f} TFLOP/s in {self.found['dtype']}; equal answers: "
            f"{', '.join(self.equal) or 'none'}"
        )

    def time_all(self) -> None:
        """Every repeat of every engine, writing what there is after each process."""
        args, start = self.args, time.monotonic()
        runs = [
            (repeat, engine)
            for repeat in range(args.repeats)
            for engine in self.engines[:: -1 if repeat % 2 else 1]
            if engine.name in self.equal
        ]
        limits = {"device": args.device, "round_seconds": args.round_seconds, "max_seconds": args.max_seconds}
        for number, (repeat, engine) in enumerate(runs):
            process = f"process {number + 1} of {len(runs)}"
            if number:
                seconds_left = (time.monotonic() - start) / number * (len(runs) - number)
                process += f", about {seconds_left / 60:.0f} min left"
            self.say(f"{engine.name}, repeat {repeat + 1} of {args.repeats}: {process}")
            rows = {name: self.rows[engine.name, name] for name in self.workloads}
            if names := [name for name, row in rows.items() if not {"not_run", "error"} & set(row)]:
                found = self.job(
                    "timing", engine=asdict(engine), workloads=names, model=args.model, size=args.size,
                    max_model_len=self.max_model_len, limits=limits | {"count": repeat == 0},
                )  # fmt: skip
                self._keep(engine, repeat, names, found)
            write(self.payload(), self.path)

    def _keep(self, engine: Engine, repeat: int, names: Sequence[str], found: dict) -> None:
        """Add what a process found to the engine's rows."""
        for name in names:
            row, measured = self.rows[engine.name, name], dict(found.get("workloads", {}).get(name) or {})
            if not measured:
                measured = {"error": found.get("error", "the process did not get to this workload")}
            samples = [{"repeat": repeat, **sample} for sample in measured.pop("samples", [])]
            for key, value in measured.items():  # the first visit and the launches are those of the first repeat
                row.setdefault(key, value)
            row.setdefault("samples", []).extend(samples)
            row.setdefault("startup_seconds", []).extend(filter(None, [found.get("startup_seconds")]))
            last = {key: round(value, 3) for key, value in list(samples[-1].items())[1:4]} if samples else measured
            self.say(f"    {row['engine']}, {name}: {', '.join(f'{key} {value}' for key, value in last.items())}")

    def payload(self) -> dict:
        """The results file so far; a row without an outcome yet is left out."""
        args, found = self.args, self.found
        cost, ceilings = ModelCost(self.config, DTYPES[found["dtype"]].itemsize), Ceilings(**found["ceilings"])
        options = ("size", "model", "study", "repeats", "round_seconds", "max_seconds")
        return {
            "kind": "engines",
            "environment": found["environment"],
            "options": {name: getattr(args, name) for name in options}
            | {"dtype": found["dtype"], "max_model_len": self.max_model_len},
            "ceilings": found["ceilings"], "launch_seconds": found["launch_seconds"],
            "workloads": {
                name: {"hash": w.hash, "description": w.description, "floor": floors(w, cost, ceilings)}
                for name, w in self.workloads.items()
            },
            "parity": {"model": args.parity_model, "reference": REFERENCE.name, "equal": self.equal},
            "rows": [row for row in self.rows.values() if any(outcome in row for outcome in OUTCOMES)],
        }  # fmt: skip


def difference(expected: list[list[int]], found: list[list[int]]) -> str:
    """Where two lists of answers part, for the error message; empty where they do not."""
    for question, (want, got) in enumerate(zip(expected, found, strict=True)):
        for at, (a, b) in enumerate(zip_longest(want, got)):
            if a != b:
                where = f"parity gate: answer {question} parts from {REFERENCE.name}'s at token {at}"
                return f"{where}: {want[at : at + 5]} became {got[at : at + 5]}"
    return ""
