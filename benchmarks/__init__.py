"""The ruler: the same work through every engine, each in a fresh process, with the hardware's floor beside each figure.

python -m benchmarks.run                # every engine, into benchmarks/local/
python -m benchmarks.micro              # list the studies of single kernels and costs
python -m benchmarks.report             # the READMEs' tables and pictures, from the committed results files
"""
