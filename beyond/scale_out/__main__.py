"""`python -m beyond.scale_out`: run the engine with pipeline stages from the command line, also under `torchrun`."""

from beyond.options import add_options
from stage_a_naive.entrypoints.cli import run

DESCRIPTION = "Beyond: the layers of a model on several GPUs or machines, on stage F's engine."

if __name__ == "__main__":
    raise SystemExit(run("beyond.scale_out", DESCRIPTION, add_options))
