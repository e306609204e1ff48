"""`python -m beyond.quantization`: run the engine with 8-bit weights or an 8-bit KV cache from the command line."""

from beyond.options import add_options
from stage_a_naive.entrypoints.cli import run

DESCRIPTION = "Beyond: 8-bit weights and an 8-bit KV cache on stage F's engine."

if __name__ == "__main__":
    raise SystemExit(run("beyond.quantization", DESCRIPTION, add_options))
