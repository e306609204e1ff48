"""`python -m stage_f_graph_tp`: run the engine with graphs, overlap and tensor parallelism from the command line."""

import sys

from stage_a_naive.cli import run
from stage_f_graph_tp.options import add_options

DESCRIPTION = "Stage F: CUDA graphs, overlapped scheduling, fused kernels, tensor parallelism."


def main() -> int:
    try:
        return run("stage_f_graph_tp", DESCRIPTION, add_options)
    except RuntimeError as error:
        from stage_f_graph_tp.tensor_parallel import WorkerError  # here: `--help` need not wait for PyTorch

        if not isinstance(error, WorkerError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
