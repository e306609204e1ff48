"""Draw the figures of the lessons that are measured in seconds and need no results file.

python -m benchmarks.pictures            # all of them, next to the lessons that show them

Drawings without measurements are SVG files next to their lessons: edit them there.
"""

from __future__ import annotations

import argparse

from benchmarks.pictures import norm, quantization
from benchmarks.results import ROOT
from stage_a_naive.entrypoints.interrupts import run_command

FIGURES = {
    "stage_d_paged/figures/norm.svg": norm.draw_norm,
    "beyond/quantization/figures/outlier.svg": lambda: quantization.draw_errors(quantization.row_with_outlier()),
}


def main(argv: list[str] | None = None) -> None:
    """Draw every figure, in place."""
    argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__.splitlines()[0]).parse_args(argv)
    for name, draw in FIGURES.items():
        path = ROOT / name
        path.parent.mkdir(exist_ok=True)
        draw().save(path)
        print(f"written: {name}")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
