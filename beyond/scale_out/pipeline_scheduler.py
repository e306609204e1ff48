"""A scheduler that keeps several batches in flight: stage E's, without the sequences whose last token is not known yet.

A sequence whose token has been launched cannot run again before that token is sampled, so with one batch of all
sequences every stage but one waits. Therefore a step takes at most its share of the decodes, `ceil(decodes / batches)`,
and only sequences whose last token has been sampled: the next step takes others.

    stage 0   [ A ][ B ]head A[ A ]head B[ B ] …        A, B: the halves of the running sequences, through the layers;
    stage 1        [ A ][ B ]     [ A ][ B ] …          head A: the LM head and the sampler for A's next tokens

Chunks of one prompt need no such rule. Each reads the keys that the chunks before it have written, and every stage
runs the steps in the order in which they were launched: several chunks of a prompt may be in flight.
"""

from __future__ import annotations

from typing import Any

from stage_e_batching.queues import by_arrival
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import BatchSequence, ScheduledStep, State


class PipelineScheduler(Scheduler):
    """Decides who runs, in shares.

    Args:
        num_micro_batches: batches in flight that the running sequences are divided into.
        options: those of `Scheduler`, by name.
    """

    def __init__(self, *, num_micro_batches: int, **options: Any) -> None:
        self.num_micro_batches = num_micro_batches
        super().__init__(**options)

    def _start_empty(self) -> None:
        super()._start_empty()
        self._sampled: set[BatchSequence] = set()  # on the device, while their tokens are on the way to the host
        self._latest: set[BatchSequence] = set()  # those that decoded in the last step
        self._slots_in_use: dict[BatchSequence, int] = {}  # of sequences that left while a token was in flight

    def has_ready(self) -> bool:
        """Whether a sequence may run before another batch is sampled."""
        return bool(self.prefilling or self.waiting or not all(sequence.num_in_flight for sequence in self.decoding))

    def note_sampled(self, step: ScheduledStep) -> None:
        """Let a batch run again in the next step: its tokens are on the device, or will be before that step runs."""
        self._sampled = set(step.sampling)

    def ready(self, most: int) -> list[BatchSequence]:
        """Return the sequences whose last token is sampled, at most this many: rather not those of the last step.

        They are in the order of arrival: a block for one may be taken from those behind it, and from none before it.
        """
        ready = [sequence for sequence in self.decoding if not sequence.num_in_flight or sequence in self._sampled]
        return sorted(sorted(ready, key=self._latest.__contains__)[:most], key=by_arrival)

    def schedule(self) -> ScheduledStep:
        """Decide the next step, with the batch slots of sequences that left before their token arrived, if it has."""
        for sequence in [sequence for sequence in self._slots_in_use if not sequence.num_in_flight]:
            self.note_room(self._slots_in_use.pop(sequence))
        step = super().schedule()
        self._latest = set(step.sequences[: step.num_decodes])
        self._sampled.clear()
        return step

    def _schedule_decodes(self, step: ScheduledStep) -> None:
        """One token of a share of the decoding sequences, the oldest of those whose last token is sampled."""
        share = -(-len(self.decoding) // self.num_micro_batches)
        for sequence in self.ready(share):
            if sequence.state is not State.DECODING:
                break  # an earlier one needed its blocks
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
        """Admit nobody while a preempted sequence's token is in flight: it is recomputed with that token."""
        if not any(sequence.state is State.WAITING for sequence in self._slots_in_use):
            super()._admit(step, budget)

    def _vacate(self, sequence: BatchSequence) -> None:
        """Free what a sequence holds; its batch slot only when nothing is in flight: the sampler reads its row."""
        if sequence.batch_slot >= 0 and sequence.num_in_flight:
            self._slots_in_use[sequence], sequence.batch_slot = sequence.batch_slot, -1
        super()._vacate(sequence)
