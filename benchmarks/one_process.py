"""`python -m benchmarks.one_process`: the server of `beyond/serving` with its engine in a thread of the same process.

It serves to measure the gain of the second process of `python -m beyond.serving`, and takes the same options.
"""

from __future__ import annotations

from contextlib import closing

from beyond.serving.__main__ import STAGES, parse, serve_llm
from beyond.serving.engine_process import load_class

if __name__ == "__main__":
    options, engine_options = parse(None)
    engine = options.engine or STAGES[options.stage]
    with closing(load_class(engine)(**engine_options)) as llm:
        serve_llm(llm, engine, options)
