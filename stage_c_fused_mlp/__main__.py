"""`python -m stage_c_fused_mlp`: stage B's command line, and which kernel computes the MLP block."""

from __future__ import annotations

from argparse import _ArgumentGroup

from stage_a_naive.entrypoints.cli import run
from stage_b_decode_step.__main__ import add_options as add_stage_b_options


def add_options(group: _ArgumentGroup) -> None:
    """Stage B's options and this stage's own."""
    add_stage_b_options(group)
    kernels = "auto | naive | warp | fused | library"
    group.add_argument("--mlp-kernel", default="auto", help=f"what computes the MLP block: {kernels} (default: auto)")


if __name__ == "__main__":
    text = "Stage C: stage B with the MLP block of every layer in one C++/CUDA operator of our own."
    raise SystemExit(run("stage_c_fused_mlp", text, add_options))
