"""`python -m stage_f_graph_tp`: run the engine with graphs, overlap and tensor parallelism from the command line."""

from stage_a_naive.entrypoints.cli import run
from stage_f_graph_tp.options import add_options

DESCRIPTION = "Stage F: CUDA graphs, overlapped scheduling, fused kernels, tensor parallelism."

if __name__ == "__main__":
    raise SystemExit(run("stage_f_graph_tp", DESCRIPTION, add_options))
