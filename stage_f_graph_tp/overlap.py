"""Overlap: the CPU prepares step n + 1 while the GPU runs step n.

Stage E's step is a chain: schedule, run, wait for the tokens, postprocess. While the CPU works the GPU waits, and the
other way round:

    CPU  [schedule 1]          [post 1][schedule 2]          [post 2][schedule 3]
    GPU              [ run 1 ]                     [ run 2 ]                     …

But most of what a step needs is known before the last tokens are: which sequences run, at which positions, in which
blocks. The tokens themselves are already on the device. So the next step is launched first, and only then are the
tokens of the one before fetched:

    CPU  [schedule 1][schedule 2][post 1][schedule 3][post 2]…
    GPU              [ run 1    ][ run 2           ][ run 3 …

A token that was launched and has not arrived is *in flight*. For the scheduler it counts as there: the sequence is
longer by one, and its next position can be scheduled.

The price: that a request has ended is noticed one step late. The step in between computes one token too many for it,
which is dropped; its slot lies past everything that is known, so no cached block is touched. (NanoFlow, Zhu et al.,
2024, and SGLang's overlap scheduler, 2024, do the same.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from stage_e_batching.engine import Engine, Sampled
from stage_e_batching.queues import by_arrival
from stage_e_batching.step import BatchSequence, ScheduledStep, State
from stage_f_graph_tp.head import InFlight
from stage_f_graph_tp.runner import StepRunner


@dataclass(slots=True, eq=False)
class AheadSequence(BatchSequence):
    """A sequence whose last tokens may still be in flight."""

    num_in_flight: int = 0

    def __len__(self) -> int:
        return len(self.token_ids) + self.num_in_flight


class OverlappedEngine(Engine):
    """Stage E's engine, one step ahead of the tokens."""

    sequence_class = AheadSequence
    runner: StepRunner
    _running: tuple[ScheduledStep, InFlight] | None = None  # launched, its tokens not fetched yet

    def run_step(self) -> None:
        """Launch the next step, then take in the tokens of the one before."""
        step = self.schedule()
        launched = self.runner.launch(step)
        self._count_in_flight(step)
        previous, self._running = self._running, (step, launched)
        if previous:
            self._take_in(previous[0], previous[1].wait())

    def _count_in_flight(self, step: ScheduledStep[AheadSequence]) -> None:
        """Let every sequence that samples be longer by a token; one that is complete with it runs no more."""
        decoding = self.scheduler.decoding
        for sequence, samples in zip(step.sequences, step.samples, strict=True):
            if samples:
                sequence.num_in_flight += 1
                if len(sequence) == sequence.max_total_tokens:
                    del decoding[bisect_left(decoding, sequence.request_id, key=by_arrival)]

    def _take_in(self, step: ScheduledStep[AheadSequence], sampled: Sampled) -> None:
        """Postprocess a step after the next one was launched. Tokens for sequences that have ended are dropped."""
        sampling = [i for i, samples in enumerate(step.samples) if samples]
        ended = []
        for row, i in enumerate(sampling):
            step.sequences[i].num_in_flight -= 1
            if step.sequences[i].state is State.FINISHED:
                ended.append(row)
        if ended:
            for row in ended:
                step.samples[sampling[row]] = False
            sampled = without_rows(ended, sampled)
        self.postprocess(step, sampled)

    def _recover(self) -> None:
        """Also discard the step that is under way: its tokens are invalid, like its blocks."""
        running, self._running = self._running, None
        try:
            if running is not None:
                with suppress(Exception):  # it may have failed as well; what it reports then is reported already
                    running[1].wait()
        finally:
            for sequence in cast("list[AheadSequence]", self.scheduler.unfinished):
                sequence.num_in_flight = 0
            super()._recover()


def without_rows(rows: Container[int], sampled: Sampled) -> Sampled:
    """Return a step's tokens without those of `rows`."""
    kept = [row for row in range(len(sampled.token_ids)) if row not in rows]
    errors = sampled.errors or {}
    return Sampled(
        [sampled.token_ids[row] for row in kept],
        sampled.logprobs and [sampled.logprobs[row] for row in kept],
        {i: errors[row] for i, row in enumerate(kept) if row in errors},
    )
