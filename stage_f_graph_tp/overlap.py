"""Overlap: the CPU prepares step n + 1 while the GPU runs step n.

Stage E's step is a chain: schedule, run, wait for the tokens, postprocess. While the CPU works the GPU waits, and the
other way round:

    CPU  [schedule 1]          [post 1][schedule 2]          [post 2][schedule 3]
    GPU              [ run 1 ]                     [ run 2 ]                     …

But most of what a step needs is known before the last tokens are: which sequences run, at which positions, in which
pages. The tokens themselves are already on the device. So the next step is ordered first, and only then are the tokens
of the one before fetched:

    CPU  [schedule 1][schedule 2][post 1][schedule 3][post 2]…
    GPU              [ run 1    ][ run 2           ][ run 3 …

The price: that a request has ended is noticed one step late. The step in between computes one token too many for it,
which is thrown away; its place in the pool is past everything that is known, so no cached page is touched. (NanoFlow,
Zhu et al., 2024, and SGLang's overlap scheduler, 2024, do the same.)
"""

from __future__ import annotations

from contextlib import suppress

from stage_e_batching.engine import Engine
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.model_runner import InFlight


class OverlappedEngine(Engine):
    """Stage E's engine, one step ahead of the tokens."""

    _running: tuple[ScheduledStep, InFlight] | None = None  # ordered, its tokens not fetched yet

    def run_step(self) -> None:
        """Launch the next step, then take in the tokens of the one before."""
        step = self.schedule()
        launched = self.runner.launch(step)
        previous, self._running = self._running, (step, launched)
        if previous:
            self.postprocess(previous[0], previous[1].wait())

    def _recover(self) -> None:
        """Also discard the step that is under way: its tokens are invalid, like its blocks."""
        running, self._running = self._running, None
        try:
            if running is not None:
                with suppress(Exception):  # it may have failed as well; what it reports then is reported already
                    running[1].wait()
        finally:
            super()._recover()
