"""The ruler: the same work through every engine, each in a fresh process, with the hardware's floor beside each figure.

python -m benchmarks.run --size cpu     # measure, write a JSON file into benchmarks/results/
python -m benchmarks.report             # tables and plots from the committed JSON files
python -m benchmarks.doctor             # what this machine has
"""
