"""`python -m stage_f_graph_tp`: run the engine with graphs, overlap and tensor parallelism from the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage_a_naive.entrypoints.cli import run
from stage_a_naive.entrypoints.language import tr
from stage_f_graph_tp.options import add_options

if TYPE_CHECKING:
    from stage_a_naive.contract.outputs import Metrics
    from stage_f_graph_tp.llm import LLM

DESCRIPTION = "Stage F: CUDA graphs, overlapped scheduling, fused kernels, tensor parallelism."


def idea(llm: LLM, metrics: Metrics) -> str:
    """Say how the steps were launched."""
    recorded, eager = tr("recorded as CUDA graphs or one launch"), tr("run as they are: no GPU, no graphs")
    ahead, waiting = (
        tr("each launched before the host had the token of the last"),
        tr("each launched when the host had the token of the last"),
    )
    return tr("{steps} steps, {graphs}; {overlap}").format(
        steps=llm.engine.counters.num_steps,
        graphs=recorded if llm.device.type == "cuda" else eager,
        overlap=ahead if llm.options.uses("overlap") else waiting,
    )


if __name__ == "__main__":
    raise SystemExit(run("stage_f_graph_tp", DESCRIPTION, add_options, idea=idea))
