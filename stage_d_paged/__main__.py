"""`python -m stage_d_paged`: run the paged engine from the command line."""

from stage_a_naive.entrypoints.cli import run
from stage_d_paged.options import add_options

if __name__ == "__main__":
    raise SystemExit(run("stage_d_paged", "Stage D: a model from scratch on a paged KV cache.", add_options))
