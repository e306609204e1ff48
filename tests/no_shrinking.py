"""A pytest plugin for `run.py`: property tests try the same examples every time and stop at the first that fails."""

from hypothesis import Phase, settings

settings.register_profile("no shrinking", max_examples=300, derandomize=True, phases=[Phase.explicit, Phase.generate])
settings.load_profile("no shrinking")
