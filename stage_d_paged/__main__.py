"""`python -m stage_d_paged`: run the paged engine from the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage_a_naive.entrypoints.cli import run
from stage_a_naive.entrypoints.language import tr
from stage_d_paged.options import add_options

if TYPE_CHECKING:
    from stage_a_naive.contract.outputs import Metrics
    from stage_d_paged.llm import LLM


def idea(llm: LLM, metrics: Metrics) -> str:
    """Describe how many blocks the answer needed."""
    last = metrics["num_prompt_tokens"] + metrics["num_generated_tokens"] - 1
    size, pool = llm.block_manager.block_size, llm.block_manager.num_blocks
    used = tr("{last} positions in {used} of {pool} blocks of {size}; nothing is reserved for tokens that never come")
    return used.format(last=last, used=-(-last // size), pool=pool, size=size)


if __name__ == "__main__":
    raise SystemExit(run("stage_d_paged", "Stage D: a model from scratch on a paged KV cache.", add_options, idea=idea))
