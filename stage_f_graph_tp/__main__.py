"""`python -m stage_f_graph_tp`: run the engine with graphs, overlap and tensor parallelism from the command line."""

from stage_a_naive.cli import run
from stage_f_graph_tp.llm import LLM
from stage_f_graph_tp.options import add_options

if __name__ == "__main__":
    description = "Stage F: CUDA graphs, overlapped scheduling, fused kernels, tensor parallelism."
    raise SystemExit(run(LLM, "stage_f_graph_tp", description, add_options))
