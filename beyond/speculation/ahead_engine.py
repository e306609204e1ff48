"""Verifications launched one step ahead: the next one is on its way before the host knows what was right.

    CPU  [schedule 1][schedule 2][post 1][schedule 3][post 2]…
    GPU              [ guess, verify 1 ][ guess, verify 2   ][ guess, verify 3 …

This is stage F's overlap, where a step may give a sequence more than one token. While it is in flight the host counts
one token for it: it gives at least that one. The guesses that may be right are counted apart, as `num_unsure`. Blocks
are reserved for all of them, the device adds those that were right to every position (`token_table.py`), and what was
sampled behind a wrong guess arrives as `WRONG`.

Who guesses is the host's decision, from the tokens that it knows: one token less than the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from beyond.speculation.engine import DraftingEngine
from beyond.speculation.sequence import WRONG, SpeculativeSequence
from stage_e_batching.engine import Sampled
from stage_e_batching.step import ScheduledStep, State
from stage_f_graph_tp.overlap import without_rows


class AheadEngine(DraftingEngine):
    """Stage F's engine, whose steps verify guesses that the device makes.

    Args:
        scheduler, runner, drafter, options: as in `DraftingEngine`.
        draft_tokens: guesses per sequence.
    """

    def __init__(self, *args: Any, draft_tokens: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._draft_tokens = draft_tokens
        self._promised: list[SpeculativeSequence] = []  # those that get a draft in the step that is being launched
        self._guessing: list[SpeculativeSequence] = []  # those that had one in the step launched last
        self._arriving: list[SpeculativeSequence] = []  # and in the step before it, which is fetched next

    def run_step(self) -> None:
        """Launch the next step, with a row for each guess, then take in the tokens of the one before."""
        self._promised = self._promising()
        for sequence in self._promised:
            sequence.draft = [WRONG] * min(self._draft_tokens, sequence.longest_draft)  # the device fills them in
        super().run_step()

    def _count_in_flight(self, step: ScheduledStep) -> None:
        """Let every sequence that samples be longer by one token, and note how many more it may have got."""
        self._arriving, self._guessing = self._guessing, [s for s in self._promised if s.draft]
        for sequence in self._arriving:
            sequence.num_unsure = 0
        if self._guessing:
            for sequence in self._guessing:
                sequence.num_unsure = len(sequence.draft)
                sequence.drop_draft()
            decoding = list(dict.fromkeys(step.sequences[: step.num_decodes]))
            samples = [True] * len(decoding) + step.samples[step.num_decodes :]
            step = replace(step, sequences=decoding + step.sequences[step.num_decodes :], samples=samples)
        super()._count_in_flight(step)

    def _take_in(self, step: ScheduledStep, sampled: Sampled) -> None:
        """Take in the tokens that are certain, and account for the guesses."""
        if not self._arriving:
            super()._take_in(step, sampled)
            return
        guesses = _rows_of_guesses(step)
        wrong = {row for row in guesses if sampled.token_ids[row] == WRONG}
        for row, sequence in guesses.items():
            step.samples[row] = row not in wrong
            if step.samples[row]:
                _count_gained(sequence)
        verified = {sequence: len(sequence.token_ids) for sequence in guesses.values()}
        super()._take_in(step, without_rows(wrong, sampled) if wrong else sampled)
        self.counters.num_draft_tokens += len(guesses)
        self.counters.num_verifications += len(verified)
        for sequence, length in verified.items():
            self._settle(sequence, len(sequence.token_ids) - length - 1)

    def _settle(self, sequence: SpeculativeSequence, num_right: int) -> None:
        """Account for a verification that found this many guesses right."""
        self.counters.num_accepted_tokens += num_right
        if not sequence.is_pausing:  # else it was launched before the loss that began the pause was known
            sequence.num_right = num_right
            sequence.settle()
        self.scheduler.trim(sequence)

    def _append(
        self, sequence: SpeculativeSequence, token_id: int, logprob: dict[int, float] | None, now: float
    ) -> bool:
        """Give a sequence its next token, unless it ended with an earlier one of this step."""
        if sequence.is_settled:
            self.counters.num_generated_tokens -= 1  # it was counted as sampled, and is dropped
            return False
        sequence.is_settled = super()._append(sequence, token_id, logprob, now)
        return sequence.is_settled


def _rows_of_guesses(step: ScheduledStep) -> dict[int, SpeculativeSequence]:
    """Find the rows of a step that ran guesses: all but the first of each sequence that has not ended."""
    sequences = step.sequences
    return {
        row: sequences[row]
        for row in range(1, step.num_decodes)
        if sequences[row] is sequences[row - 1] and sequences[row].state is not State.FINISHED
    }


def _count_gained(sequence: SpeculativeSequence) -> None:
    """Count a token that a right guess gained. It was in flight too, and its guess is computed."""
    sequence.num_in_flight += 1
    if sequence.block_table:  # it was not preempted meanwhile; its last token of all does not run
        sequence.num_computed_tokens = min(sequence.num_computed_tokens + 1, sequence.max_total_tokens - 1)
