"""Random load for as long as asked, on stage E or on the server in front of it: answers, blocks, memory."""

import stage_a_naive.entrypoints.interrupts  # noqa: F401 (before all other imports: from here on, Ctrl-C ends a command)
