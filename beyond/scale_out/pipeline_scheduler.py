"""Stage E's scheduler for several batches in flight: it skips sequences whose last token is not sampled yet.

A sequence cannot run again before its token in flight is sampled, so with one batch of all sequences every stage but
one waits. Therefore a step takes at most its share of the decodes, `ceil(decodes / batches)`, and only sequences whose
last token is sampled; the next step takes others.

    stage 0   [ A ][ B ]head A[ A ]head B[ B ] …        A, B: the halves of the running sequences, through the layers;
    stage 1        [ A ][ B ]     [ A ][ B ] …          head A: the LM head and the sampler for A's next tokens

Chunks of one prompt need no such rule. Each chunk reads the keys that earlier chunks have written, and every stage runs
the steps in launch order, so several chunks of a prompt may be in flight.
"""

from __future__ import annotations

from typing import Any

from stage_e_batching.queues import by_arrival
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import BatchSequence, ScheduledStep, State


class PipelineScheduler(Scheduler):
    """Schedules decodes in shares.

    Args:
        num_micro_batches: batches in flight that the running sequences are divided into.
        options: of `Scheduler`, by name.
    """

    def __init__(self, *, num_micro_batches: int, **options: Any) -> None:
        self.num_micro_batches = num_micro_batches
        super().__init__(**options)

    def _start_empty(self) -> None:
        super()._start_empty()
        self._sampled: set[BatchSequence] = set()  # their tokens are on the device, and on the way to the host
        self._latest: set[BatchSequence] = set()  # decoded in the last step
        self._slots_in_use: dict[BatchSequence, int] = {}  # of sequences that left while a token was in flight

    def has_ready(self) -> bool:
        """Whether a sequence may run before another batch is sampled."""
        return bool(self.prefilling or self.waiting or not all(sequence.num_in_flight for sequence in self.decoding))

    def note_sampled(self, step: ScheduledStep) -> None:
        """Let a batch run again in the next step: its tokens will be on the device before that step runs."""
        self._sampled = set(step.sampling)

    def ready(self, most: int) -> list[BatchSequence]:
        """Return at most `most` sequences whose last token is sampled, preferably not those of the last step.

        They are in order of arrival, because a sequence may take blocks from later ones but not from earlier ones.
        """
        ready = [sequence for sequence in self.decoding if not sequence.num_in_flight or sequence in self._sampled]
        return sorted(sorted(ready, key=self._latest.__contains__)[:most], key=by_arrival)

    def schedule(self) -> ScheduledStep:
        """Schedule the next step, after freeing batch slots of sequences whose last token has arrived."""
        for sequence in [sequence for sequence in self._slots_in_use if not sequence.num_in_flight]:
            self.note_room(self._slots_in_use.pop(sequence))
        step = super().schedule()
        self._latest = set(step.sequences[: step.num_decodes])
        self._sampled.clear()
        return step

    def _schedule_decodes(self, step: ScheduledStep) -> None:
        """Schedule one token for a share of the decoding sequences: the oldest ones whose last token is sampled."""
        share = -(-len(self.decoding) // self.num_micro_batches)
        for sequence in self.ready(share):
            if sequence.state is not State.DECODING:
                break  # an earlier sequence took its blocks
            start = sequence.num_computed_tokens
            if start % self.block_manager.block_size == 0 and not self._grow(sequence, step):
                break
            step.sequences.append(sequence)
            step.starts.append(start)
            sequence.num_computed_tokens = start + 1
        step.num_decodes = len(step)
        step.num_tokens = [1] * len(step)
        step.samples = [True] * len(step)

    def _admit(self, step: ScheduledStep, budget: int) -> None:
        """Admit no sequence while a preempted one has a token in flight: it is recomputed with that token."""
        if not any(sequence.state is State.WAITING for sequence in self._slots_in_use):
            super()._admit(step, budget)

    def _vacate(self, sequence: BatchSequence) -> None:
        """Release a sequence's resources; keep its batch slot while a token is in flight: the sampler reads its row."""
        if sequence.batch_slot >= 0 and sequence.num_in_flight:
            self._slots_in_use[sequence], sequence.batch_slot = sequence.batch_slot, -1
        super()._vacate(sequence)
