"""`python -m stage_f_graph_tp`: run the engine with graphs, overlap and tensor parallelism from the command line."""

import sys

from stage_a_naive.cli import run
from stage_f_graph_tp.llm import LLM
from stage_f_graph_tp.options import add_options
from stage_f_graph_tp.worker import WorkerError

DESCRIPTION = "Stage F: CUDA graphs, overlapped scheduling, fused kernels, tensor parallelism."

if __name__ == "__main__":
    try:
        raise SystemExit(run(LLM, "stage_f_graph_tp", DESCRIPTION, add_options))
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
