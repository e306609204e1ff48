"""The figures of the notebooks: each module measures or records one thing with a stage's own code, and draws it.

A notebook calls two functions, one that runs something and one that draws what came of it; no cell holds drawing code.
All functions take an engine that the notebook has built, so they run on whatever device it runs on.
"""
