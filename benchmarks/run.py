"""The runner: the same work through every engine, honestly.

    python -m benchmarks.run
    python -m benchmarks.run --engines A mine=my_module:LLM --workloads single mixed
    python -m benchmarks.run --size gpu --model random:qwen2.5-0.5b --engines A "B compiled" F --output a.json

`benchmarks/README.md` says what makes it honest. Results go to `benchmarks/local/`, which git ignores. `--publish NAME`
also writes `benchmarks/results/NAME.json`, at the end of a complete measurement from a clean commit.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from benchmarks.engines import STUDIES, select, study_engines
from benchmarks.groups import group_results
from benchmarks.measurement import Measurement
from benchmarks.results import LEAST_REPEATS, LOCAL, RESULTS, commit_of_tree, write
from benchmarks.tables import overview
from benchmarks.workloads import SIZES, workload_names

MODELS = {"cpu": "tutor", "gpu": "random:qwen2.5-0.5b", "tiny": "tutor"}
ROUND_SECONDS = {"cpu": 1.0, "gpu": 3.0, "tiny": 0.0}  # no further round of a workload begins after this long


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
    some = f"of {', '.join(workloads)} (default: all)"
    parser.add_argument("--workloads", default=workloads, choices=workloads, help=some, **several)
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes per engine (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto | cpu | cuda (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto | float32 | float16 | bfloat16 (default: %(default)s)")
    parser.add_argument("--parity-model", default="tutor", help="whose answers are compared first")
    parser.add_argument("--max-seconds", type=float, default=60.0,
                        help="a round that would take longer is not run (default: %(default)s)")  # fmt: skip
    parser.add_argument("--output", type=Path, help="the results file (default: in benchmarks/local/)")
    parser.add_argument("--publish", metavar="NAME", help="also write benchmarks/results/NAME.json")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure; returns 1 where an engine failed or answered differently, 2 where the arguments are wrong."""
    args, status = build_parser().parse_args(argv), 0
    try:
        measurement = prepare(args)
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


def prepare(args: argparse.Namespace) -> Measurement:
    """A measurement of which nothing has been started yet.

    Raises:
        ValueError: an engine, a model or a device that is not there; or a publication that the report would refuse.
    """
    args.model, args.round_seconds = args.model or MODELS[args.size], ROUND_SECONDS[args.size]
    args.timeout = 100 + 5 * args.max_seconds  # of a process
    commit, dirty = commit_of_tree() if args.publish else (None, None)
    if args.publish and (commit is None or dirty or args.repeats < LEAST_REPEATS or args.size == "tiny"):
        raise ValueError(
            f"--publish needs a clean commit (this one: {commit}, changed: {dirty}), {LEAST_REPEATS} repeats, "
            f"and size cpu or gpu; without it results go to {LOCAL}"
        )
    engines = study_engines(args.study, args.engines) if args.study else select(args.engines)
    model = re.sub(r"[^A-Za-z0-9.]+", "-", args.model.removeprefix("random:")).strip("-")
    name = "-".join(filter(None, [args.size, model, args.study]))
    return Measurement(args, engines, args.output or LOCAL / f"{name}.json")


def show(measurement: Measurement) -> None:
    """Print the table of what was measured, and where every sample is."""
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


if __name__ == "__main__":
    raise SystemExit(main())
