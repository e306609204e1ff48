"""The options of pipeline stages, which `beyond.options` adds to stage F's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from stage_a_naive.contract.params import as_integer, check_field


@dataclass(frozen=True, kw_only=True)
class ScaleOutOptions:
    """The options for pipeline stages.

    With several stages, `trace` also writes `TRACE.stage0` … with the busy times of each stage.

    Attributes:
        pipeline_parallel_size: stages; each holds consecutive layers, on `tensor_parallel_size` ranks.
        num_micro_batches: batches in flight; None means one per stage.
    """

    pipeline_parallel_size: int = 1
    num_micro_batches: int | None = None

    def __post_init__(self) -> None:
        check_field(self, "pipeline_parallel_size", as_integer, lambda v: v >= 1, "an integer, 1 or more")
        if self.num_micro_batches is not None:
            check_field(self, "num_micro_batches", as_integer, lambda v: v >= 1, "None or an integer, 1 or more")
        if self.pipeline_parallel_size == 1 and self.num_micro_batches not in (None, 1):
            raise ValueError(
                f"num_micro_batches={self.num_micro_batches} needs pipeline_parallel_size above 1: "
                "one stage has nothing to overlap"
            )

    @property
    def batches_in_flight(self) -> int:
        return self.num_micro_batches or self.pipeline_parallel_size


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add the options to the command line."""
    group.add_argument(
        "--pipeline-parallel-size", type=int, default=1, metavar="N", help="stages of layers (default: %(default)s)"
    )
    group.add_argument(
        "--num-micro-batches", type=int, metavar="N", help="batches in flight (default: as many as stages)"
    )
