"""`python -m stage_d_paged`: run the paged engine from the command line."""

from stage_a_naive.cli import run
from stage_d_paged.llm import LLM
from stage_d_paged.options import add_options

if __name__ == "__main__":
    raise SystemExit(run(LLM, "stage_d_paged", "Stage D: a model from scratch on a paged KV cache.", add_options))
