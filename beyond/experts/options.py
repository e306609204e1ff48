"""The option of expert parallelism, which `beyond.options` adds to stage F's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

WAYS = ("off", "sum", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """How ranks divide the experts of a layer.

    Attributes:
        expert_parallel: "off": every rank has a part of each expert. "sum" and "all_to_all": each has some whole
            experts (`parallel.py`). With "sum" it runs them on the rows of all tokens, and the ranks' sums are added
            up. With "all_to_all" a row is sent only to the ranks of its experts.
    """

    expert_parallel: str = "off"

    def __post_init__(self) -> None:
        if self.expert_parallel not in WAYS:
            raise ValueError(f"expert_parallel={self.expert_parallel!r} is unknown; choose one of {', '.join(WAYS)}")


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add the option to the command line."""
    group.add_argument(
        "--expert-parallel", choices=WAYS, default="off", help="whole experts on every rank (default: %(default)s)"
    )
