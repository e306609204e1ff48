"""Draw the figures of the lessons that need no results file.

python -m benchmarks.pictures            # all of them, beside the lessons that show them
"""

from __future__ import annotations

import argparse

from benchmarks.micro import coalescing
from benchmarks.pictures import pages, quantization, shards, stage_d
from benchmarks.results import ROOT
from stage_a_naive.entrypoints.interrupts import run_command

FIGURES = {
    "stage_c_fused_mlp/reads.png": coalescing.draw_reads,
    "stage_d_paged/figures/fragmentation.png": pages.draw_fragmentation,
    "stage_d_paged/figures/cached_blocks.png": pages.draw_cached_blocks,
    "stage_d_paged/figures/layer.png": stage_d.draw_layer,
    "stage_d_paged/figures/norm.png": stage_d.draw_norm,
    "stage_d_paged/figures/rope.png": stage_d.draw_rope,
    "stage_d_paged/figures/gqa.png": stage_d.draw_gqa,
    "stage_d_paged/figures/swiglu.png": stage_d.draw_swiglu,
    "stage_d_paged/attention/online_softmax.png": stage_d.draw_online_softmax,
    "stage_d_paged/attention/splits.png": stage_d.draw_splits,
    "stage_f_graph_tp/tensor_parallel/ranks.png": shards.draw_ranks,
    "beyond/quantization/figures/outlier.png": lambda: quantization.draw_errors(quantization.row_with_outlier()),
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
