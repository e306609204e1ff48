"""`python -m beyond.scale_out`: run the engine with pipeline stages from the command line, also under `torchrun`."""

import sys

from beyond.scale_out.options import add_options
from stage_a_naive.cli import run

DESCRIPTION = "Beyond: the layers of a model on several GPUs or machines, on stage F's engine."


def main() -> int:
    try:
        return run("beyond.scale_out", DESCRIPTION, add_options)
    except RuntimeError as error:
        from stage_f_graph_tp.tensor_parallel import WorkerError  # here: `--help` need not wait for PyTorch

        if not isinstance(error, WorkerError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
