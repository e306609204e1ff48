"""Run the course's one-screen programs and print what each idea changes (`make loops`).

Each program runs its idea and its predecessor on the same work. Its last line is

    what is counted: BEFORE → AFTER [MACHINE: the gain there]

The figures of other machines are from `benchmarks/results`; `python -m benchmarks.report` writes them (`numbers.toml`).
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

from benchmarks.results import ROOT

PROGRAMS = (
    "stage_a_naive/cache.py",
    "stage_a_naive/loop.py",
    "stage_b_decode_step/loop.py",
    "stage_c_fused_mlp/loop.py",
    "stage_d_paged/loop.py",
    "stage_e_batching/loop.py",
    "stage_f_graph_tp/graphs_loop.py",
    "stage_f_graph_tp/overlap_loop.py",
    "stage_f_graph_tp/kernels/loop.py",
    "stage_f_graph_tp/megakernel/mini.py",
    "stage_f_graph_tp/tensor_parallel/loop.py",
    "beyond/quantization/loop.py",
    "beyond/speculation/loop.py",
    "beyond/structured/loop.py",
    "beyond/windows/loop.py",
    "beyond/experts/loop.py",
    "beyond/experts/parallel_loop.py",
    "beyond/scale_out/loop.py",
    "beyond/serving/loop.py",
)
ARGUMENTS = {"beyond/serving/loop.py": ["--once"]}  # without it, a server waits for clients
NOT_WRITTEN = 4  # the exit status, in a student edition, of a program that lacks an exercise and has said so
LAST_LINE = re.compile(r"(?P<what>[^:]+): (?P<before>.+?) → (?P<after>.+?) \[(?P<elsewhere>.+)\]")


def module_name(path: str) -> str:
    """`stage_a_naive/loop.py` -> `stage_a_naive.loop`."""
    return path.removesuffix(".py").replace("/", ".")


def idea(path: str) -> str:
    """Return a program's topic: the first line of its docstring, up to a colon."""
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    return docstring.splitlines()[0].partition(":")[0].rstrip(".")


def result(last_line: str) -> dict[str, str]:
    """Parse a program's last line into `what`, `before`, `after`, `elsewhere`.

    Raises:
        ValueError: the line has another format.
    """
    found = LAST_LINE.fullmatch(last_line)
    if not found:
        raise ValueError(f"a program's last line is `what: before → after [MACHINE: …]`, got {last_line!r}")
    return found.groupdict()


def row(idea: str, lines: object, here: str, elsewhere: str) -> str:
    return f"{idea:46} {lines:>5}   {here:60}   {elsewhere}"


def main() -> int:
    print(row("idea", "lines", "here", "elsewhere"), flush=True)
    for path in (path for path in PROGRAMS if (ROOT / path).exists()):
        command = [sys.executable, "-m", module_name(path), *ARGUMENTS.get(path, [])]
        # On stderr a program only reports what it builds. One thread: more would wait for one another.
        environment = os.environ | {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment, check=False)
        if done.returncode == NOT_WRITTEN:
            continue
        if done.returncode:
            return done.returncode
        found = result(done.stdout.splitlines()[-1])
        lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        here = f"{found['what']}: {found['before']} → {found['after']}"
        print(row(idea(path), lines, here, found["elsewhere"]), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
