"""`python -m stage_c_fused_mlp`: stage B's command line, and which kernel computes the MLP block."""

from __future__ import annotations

from argparse import _ArgumentGroup

from stage_a_naive.cli import run
from stage_b_decode_step.__main__ import add_options as add_stage_b_options
from stage_c_fused_mlp.fused_mlp import GENERATIONS
from stage_c_fused_mlp.llm import LLM


def add_options(group: _ArgumentGroup) -> None:
    """Stage B's options and this stage's own."""
    add_stage_b_options(group)
    group.add_argument("--mlp-kernel", default="auto", choices=GENERATIONS, help="which kernel computes the MLP block")


if __name__ == "__main__":
    text = "Stage C: stage B with the MLP block of every layer in one C++/CUDA operator of our own."
    raise SystemExit(run(LLM, "stage_c_fused_mlp", text, add_options))
