"""`python -m stage_a_naive`: run the naive engine from the command line."""

from stage_a_naive.entrypoints.cli import run

if __name__ == "__main__":
    raise SystemExit(run("stage_a_naive", "Stage A: the naive prefill and decode loop on a Hugging Face model."))
