"""The benchmark: the same work for every engine, each in a fresh process, with the hardware's floor for each figure.

python -m benchmarks.run                # every engine, into benchmarks/local/
python -m benchmarks.micro              # list the studies of single kernels and costs
python -m benchmarks.report             # the READMEs' tables and pictures, from the committed results files
"""

import stage_a_naive.entrypoints.interrupts  # noqa: F401 (before all other imports: from here on, Ctrl-C ends a command)
