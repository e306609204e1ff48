"""The options that this stage adds, and all of them on the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from stage_e_batching.options import BatchingOptions
from stage_e_batching.options import add_options as add_batching_options


@dataclass(frozen=True, kw_only=True)
class GraphOptions(BatchingOptions):
    """Options of this stage's `LLM`. Each idea can be switched off by itself, for the ablation.

    Attributes:
        enforce_eager: run without CUDA graphs (a CPU has none anyway).
        prefill_graphs: record steps with prefill too, not only decode steps.
        overlap: prepare a step on the CPU while the GPU runs the one before.
        fused: use the kernels that fuse the work between matrix products, and the persistent megakernel.
    """

    prefill_graphs: bool = True
    overlap: bool = True
    fused: bool = True


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add the options to the command line."""
    add_batching_options(group)
    group.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs, or CPU processes (default: %(default)s)"
    )
    group.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    group.add_argument(
        "--no-prefill-graphs", dest="prefill_graphs", action="store_false", help="CUDA graphs for decode steps only"
    )
    group.add_argument("--no-overlap", dest="overlap", action="store_false", help="prepare a step after the one before")
    group.add_argument("--no-fused", dest="fused", action="store_false", help="stage D's layers, kernel by kernel")
