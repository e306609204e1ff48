"""The runner: give every engine the same work, and time it.

    python -m benchmarks.run
    python -m benchmarks.run --engines A mine=my_module:LLM --workloads single mixed
    python -m benchmarks.run --size gpu --model random:qwen2.5-0.5b --engines A "B compiled" F --output a.json

`benchmarks/README.md` explains the rules of a fair comparison. Results go to `benchmarks/local/`, which git ignores.
`--publish NAME` also writes `benchmarks/results/NAME.json`, at the end of a complete measurement from a clean commit.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path

import torch

from benchmarks.engines import REFERENCE, STUDIES, Engine, installed_engines, select
from benchmarks.floor import ModelCost, floors
from benchmarks.groups import group_results
from benchmarks.results import LEAST_REPEATS, LOCAL, RESULTS, command, commit_of_tree, table_of, write
from benchmarks.sources import code_of
from benchmarks.tables import overview, own_results
from benchmarks.worker import run_job
from benchmarks.workloads import SIZES, make_workload, workload_names
from stage_a_naive.checkpoints.loading import DTYPES, resolve
from stage_a_naive.entrypoints.interrupts import run_command

MODELS = {"cpu": "tutor", "gpu": "random:qwen2.5-0.5b", "tiny": "tutor"}
ROUND_SECONDS = {"cpu": 1.0, "gpu": 3.0, "tiny": 0.0}  # no further round of a workload begins after this long
CPU_BATCH = 16  # requests that run together at CPU size: fewer than `mixed` has, so that some wait, as on a small GPU
QUICK_WORKLOADS = ("single", "mixed")  # of the front page
SHORTEST_MODEL_LEN = 4096  # the engines' default


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    workloads, several = workload_names(), {"nargs": "+", "metavar": "NAME"}
    engines = "NAME, NAME[option=value,...] or NAME=module:Class, or rows of a study (default: all)"
    parser.add_argument("--size", choices=SIZES, default="cpu", help="of the workloads (default: %(default)s)")
    parser.add_argument("--model", help="as a stage takes it (default: depends on the size)")
    parser.add_argument("--engines", default=[], help=engines, **several)
    parser.add_argument("--study", choices=STUDIES, help="the engines of a study, whose table is its own")
    some = f"of {', '.join(workloads)} (default: all but those that sample as chats do)"
    parser.add_argument("--workloads", choices=workloads, help=some, **several)
    quick = "transformers and stages A to F on two workloads, one process each: five minutes on two cores"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--repeats", type=int, help="fresh processes per engine (default: 3, or 1 with --quick)")
    parser.add_argument("--device", default="auto", help="auto | cpu | cuda (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto | float32 | float16 | bfloat16 (default: %(default)s)")
    parser.add_argument("--parity-model", default="tutor", help="whose answers are compared first")
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=60.0,
        help="a round that would take longer is not run (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, help="the results file (default: in benchmarks/local/)")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="also write the main figures, as Markdown")
    parser.add_argument("--publish", metavar="NAME", help="also write benchmarks/results/NAME.json")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure; returns 1 if an engine failed or answered differently, 2 if the arguments are wrong."""
    args, status = build_parser().parse_args(argv), 0
    try:
        measurement = Measurement(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        measurement.look()
        measurement.time_all()
    except KeyboardInterrupt:
        print("interrupted; this is what was measured", file=sys.stderr)
        status = 130
    if measurement.found:
        show(measurement)
    if args.publish and not status:
        path = RESULTS / f"{args.publish}.json"
        write(measurement.payload(), path)
        print(f"published: {path}")
    return status or int(measurement.has_failed)


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """What was not asked for, by whether a quick answer was."""
    usual = [name for name in workload_names() if not name.startswith("chat")]
    args.workloads = args.workloads or (list(QUICK_WORKLOADS) if args.quick else usual)
    args.repeats = args.repeats if args.repeats is not None else 1 if args.quick else 3
    if args.quick and not (args.engines or args.study):
        args.engines = [name for name in ("transformers", *"ABCDEF") if name in installed_engines()]
    return args


def show(measurement: Measurement) -> None:
    """Print the table of measurements, and the path of the file with every sample."""
    [group] = group_results([measurement.payload() | {"file": measurement.path.name}])
    print(f"\n{group.model}, size {group.size}, {group.dtype}, {group.device} (1 × the floor: the hardware's limit)\n")
    lines = overview(group)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))
    print(*(line for line in lines if not line.startswith("|")), sep="\n")
    print(f"\nevery sample: {measurement.path}")
    if measurement.args.summary and group.engines:
        measurement.args.summary.write_text("\n".join(own_results(group)) + "\n", encoding="utf-8")
        print(f"the main figures: {measurement.args.summary}")


class Measurement:
    """A measurement from the command line: describe the device, compare the engines' answers, time every engine.

    Raises:
        ValueError: an engine, model or device does not exist, or the report would refuse the publication.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.started, self.model = with_defaults(args), time.monotonic(), args.model or MODELS[args.size]
        if args.repeats < 1 or args.max_seconds <= 0:
            raise ValueError(f"--repeats {args.repeats}, --max-seconds {args.max_seconds:g}: at least 1, and above 0")
        commit, dirty = commit_of_tree() if args.publish else (None, None)
        is_part = args.publish and table_of(args.publish) != args.publish  # the report counts the repeats of all parts
        few = args.repeats < LEAST_REPEATS and not is_part
        if args.publish and (commit is None or dirty or few or args.size == "tiny"):
            raise ValueError(
                f"--publish needs a clean commit (this one: {commit}, changed: {dirty}), {LEAST_REPEATS} repeats "
                "(or a name that ends in -1, -2, … for each part), and size cpu or gpu; without it results go to "
                f"{LOCAL}"
            )
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self.model.removeprefix("random:")).strip("-")
        self.path = args.output or LOCAL / f"{'-'.join(filter(None, [args.size, slug, args.study]))}.json"
        limit = {"max_num_seqs": CPU_BATCH} if args.size == "cpu" else {}
        engines = select(args.engines, args.study)
        self.engines = [replace(e, options={**limit, **e.options}) if e.sized else e for e in engines]
        self.workloads = {name: make_workload(name, args.size) for name in args.workloads}
        self.config = resolve(self.model).config
        self.code = code_of(*(engine.factory for engine in self.engines))
        longest = max(workload.longest for workload in self.workloads.values()) + 1
        self.max_model_len = min(self.config.max_position_embeddings, max(SHORTEST_MODEL_LEN, longest))
        self.found: dict[str, object] = {}  # facts about the machine
        self.equal: list[str] = []  # engines that passed the parity gate
        self.rows: dict[tuple[str, str], dict] = {
            (e.name, name): {"engine": e.name, "package": e.package, "options": dict(e.options), "workload": name}
            for name in args.workloads
            for e in self.engines
        }

    @property
    def has_failed(self) -> bool:
        """Tell whether an engine failed or answered differently. An engine that was not run has not failed."""
        return any("error" in row for row in self.rows.values())

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)

    def job(self, kind: str, heard: Callable[[dict], None] = lambda found: None, **more: object) -> dict:
        """Run a job of `worker.py` on this device; `heard` receives its results so far."""
        timeout = 100 + 5 * self.args.max_seconds
        return run_job({"kind": kind, "device": self.args.device, "dtype": self.args.dtype} | more, timeout, heard)

    def look(self) -> None:
        """Describe the machine and pass the parity gate: every engine must generate the reference's tokens.

        A fast wrong answer is worth nothing, and a kernel that reads past its cache is often fast. Greedy answers to a
        few questions are compared token by token, with the tutor, because its margins are wide. All engines answer in
        one process, one after another; if one ends the process, another process continues with the next.

        Raises:
            SystemExit: the device or the reference does not work, so nothing can be compared.
        """
        self.say(f"{self.model}, size {self.args.size}: all engines answer the same questions first")
        count, answers = torch.cuda.device_count(), {}
        refused = {e.name: ("not_run", need) for e in self.engines if (need := e.unmet_need(count))}
        todo = [REFERENCE, *(e for e in self.engines if e.name not in refused and e.name != REFERENCE.name)]
        while todo:
            found = self.job("look", self._answered, engines=list(map(asdict, todo)), model=self.args.parity_model)
            answers |= found.pop("answers", {})
            self.found = found | self.found
            if REFERENCE.name not in answers:
                raise SystemExit(f"the reference engine {REFERENCE.name} does not answer: {found['error']}")
            todo = [engine for engine in todo if engine.name not in answers]
            if todo:
                refused[todo.pop(0).name] = "error", f"no answers: {found['error']}"
        for name in (engine.name for engine in self.engines if engine.name not in refused):
            if different := difference(answers[REFERENCE.name], answers[name]):
                refused[name] = "error", different
            else:
                self.equal.append(name)
        for name, (outcome, reason) in refused.items():
            self.say(f"{name}: {outcome.replace('_', ' ')}: {reason}")
            for workload in self.workloads:
                self.rows[name, workload][outcome] = reason
        device, ceilings = self.found["environment"]["device"]["name"], self.found["ceilings"]
        self.say(
            f"{device}: copies {ceilings['copy_bytes_per_s'] / 1e9:.0f} GB/s, multiplies "
            f"{ceilings['matmul_operations_per_s'] / 1e12:.2f} TFLOP/s in {self.found['dtype']}; equal answers: "
            f"{', '.join(self.equal) or 'none'}"
        )

    def _answered(self, found: dict) -> None:
        """Print which engine has answered, as soon as it has."""
        if names := list(found.get("answers", {})):
            self.say(f"    {names[-1]} has answered")

    def time_all(self) -> None:
        """Run every repeat of every engine in a separate process, and write the results after each."""
        args, start = self.args, time.monotonic()
        runs = [
            (repeat, engine)
            for repeat in range(args.repeats)
            for engine in self.engines[:: -1 if repeat % 2 else 1]
            if engine.name in self.equal
        ]
        limits = {"device": args.device, "round_seconds": ROUND_SECONDS[args.size], "max_seconds": args.max_seconds}
        for number, (repeat, engine) in enumerate(runs):
            process = f"process {number + 1} of {len(runs)}"
            if number:
                seconds_left = (time.monotonic() - start) / number * (len(runs) - number)
                process += f", about {seconds_left / 60:.0f} min left"
            self.say(f"{engine.name}, repeat {repeat + 1} of {args.repeats}: {process}")
            names = [n for n in self.workloads if not {"not_run", "error"} & self.rows[engine.name, n].keys()]
            if names:
                work = {"workloads": names, "model": self.model, "size": args.size, "max_model_len": self.max_model_len}
                found = self.job("timing", engine=asdict(engine), **work, limits=limits | {"count": repeat == 0})
                self._keep(engine, repeat, names, found)
            write(self.payload(), self.path)

    def _keep(self, engine: Engine, repeat: int, names: Sequence[str], found: dict) -> None:
        """Add a process's results to the engine's rows."""
        for name in names:
            row, measured = self.rows[engine.name, name], dict(found.get("workloads", {}).get(name) or {})
            if not measured:
                measured = {"error": found.get("error", "the process did not get to this workload")}
            samples = [{"repeat": repeat, **sample} for sample in measured.pop("samples", [])]
            for key, value in measured.items():  # the first visit and the launches come from the first repeat
                row.setdefault(key, value)
            row.setdefault("samples", []).extend(samples)
            for key in ("startup_seconds", "peak_megabytes"):  # of the whole process
                row.setdefault(key, []).extend(filter(None, [found.get(key)]))
            last = {key: round(value, 3) for key, value in list(samples[-1].items())[1:4]} if samples else measured
            self.say(f"    {engine.name}, {name}: {', '.join(f'{key} {value}' for key, value in last.items())}")

    def payload(self) -> dict:
        """Return the results file so far, without rows that have no outcome yet."""
        args, found = self.args, self.found
        cost = ModelCost(self.config, DTYPES[found["dtype"]].itemsize)
        return {
            "kind": "engines",
            "environment": found["environment"]
            | {"code": self.code, "command": command(), "seconds": round(time.monotonic() - self.started)},
            "options": {
                "size": args.size,
                "model": self.model,
                "study": args.study,
                "repeats": args.repeats,
                "round_seconds": ROUND_SECONDS[args.size],
                "max_seconds": args.max_seconds,
                "dtype": found["dtype"],
                "max_model_len": self.max_model_len,
            },
            "ceilings": found["ceilings"],
            "launch_seconds": found["launch_seconds"],
            "workloads": {
                name: {"hash": w.hash, "description": w.description, "floor": floors(w, cost, found["ceilings"])}
                for name, w in self.workloads.items()
            },
            "parity": {"model": args.parity_model, "reference": REFERENCE.name, "equal": self.equal},
            "rows": [row for row in self.rows.values() if {"samples", "not_run", "error"} & row.keys()],
        }


def difference(expected: list[list[int]], found: list[list[int]]) -> str:
    """Describe the first difference of two lists of answers, for the error message; empty if they are equal."""
    for question, (want, got) in enumerate(zip(expected, found, strict=True)):
        for at, (a, b) in enumerate(zip_longest(want, got)):
            if a != b:
                where = f"parity gate: answer {question} parts from {REFERENCE.name}'s at token {at}"
                return f"{where}: {want[at : at + 5]} became {got[at : at + 5]}"
    return ""


if __name__ == "__main__":
    raise SystemExit(run_command(main))
