"""The options that this stage adds to stage D's, and their command-line arguments."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

from stage_a_naive.contract.params import as_integer, check_field
from stage_d_paged.options import EngineOptions
from stage_d_paged.options import add_options as add_paged_options


@dataclass(frozen=True, kw_only=True)
class BatchingOptions(EngineOptions):
    """Options of `LLM` from this stage on.

    Attributes:
        enable_chunked_prefill: cut prompts into chunks that share steps with decodes; False runs prompts whole, in
            steps without decodes.
        max_num_penalty_seqs: how many requests with penalties may run at the same time; further ones wait. Each has a
            row of counts on the device, one number per token of the vocabulary.
        trace: write a record of every step to this file (JSON lines).
    """

    enable_chunked_prefill: bool = True
    max_num_penalty_seqs: int = 256
    trace: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        from stage_e_batching.scheduler import check_step_limits  # here: `--help` need not wait for PyTorch

        super().__post_init__()
        check_step_limits(self.max_num_seqs, self.max_num_batched_tokens)
        check_field(self, "max_num_penalty_seqs", as_integer, lambda v: v >= 1, "an integer, 1 or more")
        if self.trace is not None:
            check_field(self, "trace", _as_path, bool, "None or the path of a file")


def _as_path(value: object) -> str | None:
    return os.fspath(value) if isinstance(value, (str, os.PathLike)) else None


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add the options to the command line."""
    add_paged_options(group)
    group.add_argument(
        "--no-chunked-prefill",
        dest="enable_chunked_prefill",
        action="store_false",
        help="keep prompts whole, in steps of their own",
    )
    group.add_argument(
        "--max-num-penalty-seqs",
        type=int,
        metavar="N",
        default=BatchingOptions.max_num_penalty_seqs,
        help="requests with penalties that run together (default: %(default)s)",
    )
    group.add_argument("--trace", metavar="FILE", help="a record of every step, for benchmarks.pictures.timeline")
