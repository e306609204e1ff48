"""The figures that one notebook shows: each module measures or records one thing with a stage's own code and draws it.

A notebook calls two functions, one that runs something and one that draws what came of it; no cell holds drawing code.
Figures that lessons show too are in `benchmarks`.
"""
