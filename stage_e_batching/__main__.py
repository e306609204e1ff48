"""`python -m stage_e_batching`: run the continuously batching engine from the command line."""

from stage_a_naive.entrypoints.cli import run
from stage_e_batching.options import add_options

if __name__ == "__main__":
    raise SystemExit(run("stage_e_batching", "Stage E: continuous batching.", add_options))
