"""`python -m stage_e_batching`: run the continuously batching engine from the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage_a_naive.entrypoints.cli import run
from stage_a_naive.entrypoints.language import tr
from stage_e_batching.options import add_options

if TYPE_CHECKING:
    from stage_a_naive.contract.outputs import Metrics
    from stage_e_batching.llm import LLM


def idea(llm: LLM, metrics: Metrics) -> str:
    """Say how many steps there were; other requests could have joined any of them."""
    decided = tr("{steps} steps, each scheduled separately: a request that arrived meanwhile would have joined the next one")
    return decided.format(steps=llm.engine.counters.num_steps)


if __name__ == "__main__":
    raise SystemExit(run("stage_e_batching", "Stage E: continuous batching.", add_options, idea=idea))
