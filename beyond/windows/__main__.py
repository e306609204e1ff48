"""`python -m beyond.windows`: run the engine with a pool for each kind of layer from the command line."""

from beyond.options import add_options
from stage_a_naive.entrypoints.cli import run

DESCRIPTION = "Beyond: a KV pool of their own for layers that see only the last tokens, on stage F's engine."

if __name__ == "__main__":
    raise SystemExit(run("beyond.windows", DESCRIPTION, add_options))
