"""Apply random load to stage E or to its server, and check answers, blocks and memory."""

import stage_a_naive.entrypoints.interrupts  # noqa: F401 (before all other imports: from here on, Ctrl-C ends a command)
