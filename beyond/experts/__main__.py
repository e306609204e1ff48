"""`python -m beyond.experts`: run a model with experts from the command line."""

from beyond.options import add_options
from stage_a_naive.entrypoints.cli import run

DESCRIPTION = "Beyond: models with a mixture of experts, on stage F's engine."

if __name__ == "__main__":
    raise SystemExit(run("beyond.experts", DESCRIPTION, add_options))
