"""`python -m beyond.speculation`: run stage F's engine with speculative decoding from the command line."""

import sys

from beyond.options import add_options
from stage_a_naive.entrypoints.cli import run

if __name__ == "__main__":
    sys.exit(run("beyond.speculation", "Beyond: speculative decoding on stage F's engine.", add_options))
