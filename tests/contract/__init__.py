"""What every engine of the course promises: one file per behaviour, one row per engine.

To add an engine, add a row to `ENGINES` in `engines.py`: a name, the package whose `LLM` it is, what it can do (`has`),
and its options. Every behaviour is then tested for it. A behaviour that only some engines have says what it needs, as
`@pytest.mark.needs("pool", "side by side")`; the other rows are left out. The fixtures, all in `conftest.py`:

- `engine`: the row; `engine.make(**options)` makes another `LLM` of it, `engine.has` tells what it can do;
- `llm`: the row's `LLM`, made once per worker and closed at the end. A test leaves it as it found it;
- `tutor`: the same with the embedded model, which answers in sentences;
- `naive`: stage A on the same model; `expected`: the greedy tokens that the row owes for each of `PROMPTS`.
"""
