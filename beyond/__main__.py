"""`python -m beyond`: run the engine with all options from the command line."""

from beyond.options import add_options
from stage_a_naive.entrypoints.cli import run

DESCRIPTION = "Beyond: 8-bit weights and caches, speculation, tensor and pipeline parallelism on stage F's engine."

if __name__ == "__main__":
    raise SystemExit(run("beyond", DESCRIPTION, add_options))
