"""The labs: the six stages as course assignments, with a starter to hand out and a grader.

Nothing is kept twice. `exercises.toml` lists functions of the stages; the starter is a copy of a stage in which exactly
these bodies are missing, and the grader runs tests on what a learner put in their place.
"""

import stage_a_naive.entrypoints.interrupts  # noqa: F401 (before all other imports: from here on, Ctrl-C ends a command)
