"""The options that this stage adds, and their command-line arguments.

Each idea of this stage has a name in `IDEAS`. `without` switches off exactly the named ideas, so a table can show what
each of them is worth.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from stage_e_batching.options import BatchingOptions
from stage_e_batching.options import add_options as add_batching_options

IDEAS = {
    "graphs": "decode steps are CUDA graphs",
    "prefill_graphs": "steps with prefill are, too",
    "overlap": "the CPU prepares a step while the GPU runs the one before",
    "fused_layers": "kernels that do the work between a layer's matrix products, in steps of many tokens",
    "skinny_gemm": "matrix products that do it themselves, in steps of few tokens",
    "megakernel": "a decode step of a few requests is one launch",
    "pdl": "a kernel is brought in before the one in front of it has ended",
    "one_shot_all_reduce": "several ranks add up small tensors with a kernel of our own",
}


@dataclass(frozen=True, kw_only=True)
class GraphOptions(BatchingOptions):
    """Options of this stage's `LLM`.

    Attributes:
        without: ideas of this stage to switch off, names of `IDEAS`: a sequence of them, or one string with commas.
        enforce_eager: the same as `without=("graphs", "prefill_graphs")`.
    """

    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        off = _read_names(self.without)
        object.__setattr__(self, "without", tuple(name for name in IDEAS if name in off))

    def uses(self, idea: str) -> bool:
        """Tell whether an idea of `IDEAS` is switched on."""
        if idea not in IDEAS:
            raise KeyError(idea)
        eager = self.enforce_eager and idea in ("graphs", "prefill_graphs")
        return not eager and idea not in self.without


def _read_names(names: Any) -> set[str]:
    """Read what a caller gave as `without`."""
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    if not isinstance(names, (list, tuple, set, frozenset)):
        raise ValueError(f"without must be names of {', '.join(IDEAS)}, got {names!r}")
    for name in names:
        if name not in IDEAS:
            raise ValueError(f"without: no idea is called {name!r}; choose from {', '.join(IDEAS)}")
    return set(cast("Iterable[str]", names))


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add the options to the command line."""
    add_batching_options(group)
    group.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs, or CPU processes (default: %(default)s)"
    )
    group.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs: --without graphs,prefill_graphs")
    group.add_argument(
        "--without", default=(), metavar="NAMES", help=f"switch ideas off, with commas between: {', '.join(IDEAS)}"
    )
