"""`python -m stage_a_naive`: run the naive engine from the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage_a_naive.entrypoints.cli import run
from stage_a_naive.entrypoints.language import tr

if TYPE_CHECKING:
    from stage_a_naive.contract.outputs import Metrics
    from stage_a_naive.llm import LLM


def idea(llm: LLM, metrics: Metrics) -> str:
    """Describe how the cache grew."""
    last = metrics["num_prompt_tokens"] + metrics["num_generated_tokens"] - 1
    grew = tr("one prefill, then one token per step; the cache grew to {last} positions and was copied at every step")
    return grew.format(last=last)


if __name__ == "__main__":
    text = "Stage A: the naive prefill and decode loop on a Hugging Face model."
    raise SystemExit(run("stage_a_naive", text, idea=idea))
