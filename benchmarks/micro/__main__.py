"""`python -m benchmarks.micro NAME`: see the package's docstring."""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from pathlib import Path

import torch

from benchmarks import micro
from benchmarks.engines import read_option
from benchmarks.render import tables
from benchmarks.results import LOCAL, RESULTS, command, commit_of_tree, environment, write
from benchmarks.sources import code_of
from benchmarks.timing import measure_ceilings
from stage_a_naive.entrypoints.interrupts import run_command


def main(argv: list[str] | None = None) -> int:
    """Measure one study; returns 2 if the arguments are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro",
        description=micro.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="of a study; without one they are listed")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="of the study; several values with commas")
    parser.add_argument("--output", type=Path, help="the results file (default: in benchmarks/local/)")
    parser.add_argument("--publish", metavar="MACHINE", help="also write benchmarks/results/NAME-MACHINE.json")
    args = parser.parse_args(argv)
    if args.name is None:
        print("\n".join(f"{name:18} {micro.study(name).__doc__.splitlines()[0]}" for name in micro.names()))
        return 0
    try:
        path = run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"every sample: {path}")
    return 0


def run(args: argparse.Namespace) -> Path:
    """Measure a study, write its file and print its tables.

    Raises:
        ValueError: the study or option does not exist, a GPU is missing, or a changed tree is to be published.
    """
    module = micro.study(args.name)
    options = dict(map(read_option, args.options))
    known = inspect.signature(module.measure).parameters
    if not set(options) <= set(known):
        raise ValueError(
            f"{args.name} has the options {', '.join(known) or 'none'}, and not {', '.join(set(options) - set(known))}"
        )
    for name, value in options.items():  # an option that may have several values has a tuple for its default
        if isinstance(known[name].default, tuple) and not isinstance(value, tuple):
            options[name] = tuple(value.split(",")) if isinstance(value, str) else (value,)
    for name, value in options.items():
        if any(type(count) is int and count < 1 for count in (value if isinstance(value, tuple) else [value])):
            raise ValueError(f"{name}={value}: a count is at least 1")
    if getattr(module, "NEEDS_GPU", False) and not torch.cuda.is_available():
        raise ValueError(f"{args.name} needs an NVIDIA GPU, and PyTorch sees none")
    if args.publish and (commit_of_tree()[0] is None or commit_of_tree()[1]):
        raise ValueError("--publish needs a clean commit (git, or BENCH_COMMIT)")
    started, code = time.monotonic(), code_of(f"benchmarks.micro.{args.name}")  # now: the tree may change meanwhile
    result = {"kind": args.name, "environment": environment(), "options": options}
    if torch.cuda.is_available():
        result["ceilings"] = measure_ceilings(torch.device("cuda"), torch.bfloat16)
        torch.cuda.empty_cache()  # other processes may be about to measure on it
    result |= module.measure(**options)
    result["environment"] |= {"code": code, "command": command(), "seconds": round(time.monotonic() - started)}
    paths = [args.output or LOCAL / f"{args.name}.json"]
    name = "-".join(filter(None, [args.name, result.get("part"), args.publish]))
    paths += [RESULTS / f"{name}.json"] if args.publish else []
    for path in paths:
        write(result, path)
    if result["environment"]["commit"]:
        print("\n".join(line for lines in tables(module, [result]).values() for line in lines))
    return paths[-1]


if __name__ == "__main__":
    raise SystemExit(run_command(main))
