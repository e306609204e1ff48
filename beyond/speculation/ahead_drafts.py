"""Drafts that the device makes: a step is launched before the host knows which guesses of the last one were right.

    CPU  [schedule 1][schedule 2][post 1][schedule 3][post 2]…
    GPU              [ guess, verify 1 ][ guess, verify 2   ][ guess, verify 3 …

This is stage F's overlap, with steps that may give a sequence more than one token. While a step is in flight, the host
counts one token for the sequence, because it gives at least one. The guesses that may be right are counted separately,
as `num_unsure`. Blocks are reserved for all guesses, the device adds the number of right guesses to every position
(`token_table.py`), and tokens sampled after a wrong guess arrive as `WRONG`.

The host decides which sequences guess, from the tokens that it knows: one token fewer than the device.
"""

from __future__ import annotations

from typing import Any, Protocol

from beyond.speculation.drafts import Drafter, SpeculationCounters, promising, without_rows
from beyond.speculation.ngram import NgramDrafter
from beyond.speculation.rows import DraftRows
from beyond.speculation.sequence import WRONG, Guesses, is_pausing, longest_draft
from stage_e_batching.parts import Sampled
from stage_e_batching.step import BatchSequence, ScheduledStep, State


class DeviceDrafts:
    """Drafts of which the host knows only the length.

    Args:
        drafter: decides which sequences have a guess.
        rows: adds rows for the guesses to a step.
        counters: count the guesses.
        draft_tokens: guesses per sequence.
    """

    need_tokens = False  # they are on the device

    def __init__(self, drafter: Drafter, rows: DraftRows, counters: SpeculationCounters, draft_tokens: int) -> None:
        self.drafter = drafter
        self._rows = rows
        self._counters = counters
        self._draft_tokens = draft_tokens
        self._promised: list[BatchSequence] = []  # may have a draft in the last scheduled step
        self._arrived: dict[BatchSequence, int] = {}  # verified in the arriving step: number of tokens before it

    def are_promising(self) -> bool:
        for sequence in self._promised:
            sequence.guesses.draft = []
        self._promised = promising(self.drafter, self._rows.decoding)
        return bool(self._promised)

    def propose(self) -> bool:
        """Reserve a row for each guess; the device fills them in."""
        for sequence in self._promised:
            sequence.guesses.draft = [WRONG] * min(self._draft_tokens, longest_draft(sequence))
        return True

    def complete(self, step: ScheduledStep) -> None:
        """Record how many extra tokens the step may give to each sequence."""
        if not self._promised:
            return
        self._rows.add(step)
        running = set(step.sequences[: step.num_decodes])
        for sequence in self._promised:
            if sequence not in running:  # it has lost its blocks
                sequence.guesses.draft = []
            elif sequence.guesses.draft:
                sequence.guesses.num_unsure = len(sequence.guesses.draft)

    def accept(self, step: ScheduledStep, sampled: Sampled) -> Sampled:
        """Return the accepted tokens. The token gained by a right guess was in flight too, and the guess has run."""
        guesses = _rows_of_guesses(step)
        if not guesses:
            return sampled
        wrong = {row for row in guesses if sampled.token_ids[row] == WRONG}
        for row, sequence in guesses.items():
            if sequence.state is State.FINISHED:
                wrong.add(row)
                continue
            if not sequence.guesses.draft:  # otherwise it already has others in flight
                sequence.guesses.num_unsure = 0
            if row not in wrong:
                sequence.num_in_flight += 1
                if sequence.block_table:  # not preempted meanwhile; the very last token does not run
                    most = sequence.max_total_tokens - 1
                    sequence.num_computed_tokens = min(sequence.num_computed_tokens + 1, most)
        live = [sequence for sequence in guesses.values() if sequence.state is not State.FINISHED]
        self._arrived = {sequence: len(sequence.token_ids) for sequence in live}
        self._counters.num_draft_tokens += len(live)
        self._counters.num_verifications += len(self._arrived)
        return without_rows(wrong, step, sampled)

    def settle(self, step: ScheduledStep) -> None:
        """Account for the right guesses, and free the blocks of the others."""
        for sequence, length in self._arrived.items():
            num_right = len(sequence.token_ids) - length - 1
            self._counters.num_accepted_tokens += num_right
            if not is_pausing(sequence):  # otherwise it was launched before the pause began
                sequence.guesses.settle(num_right, len(sequence.token_ids))
            self._rows.trim(sequence)
        self._arrived = {}

    def forget(self) -> None:
        self._promised, self._arrived = [], {}
        self._rows.forget()


class Known(Protocol):
    """An answer whose tokens are all on the host, including those that its sequence does not have yet."""

    sequence: Any  # a BatchSequence
    token_ids: list[int]
    guesses: Any  # None before the first look-up


def guess_of_table(drafter: NgramDrafter, answer: Known, count: int) -> list[int]:
    """Return the guesses that the device makes, as `TokenTable` does, for `count` rows after an answer's last token.

    If the look-up finds nothing, the guess is the last token again; past the very last token, rows repeat.
    """
    answer.guesses = answer.guesses or Guesses()
    draft = drafter.draft(answer) or [answer.token_ids[-1]] * count
    return draft[: max(0, min(count, answer.sequence.max_total_tokens - 1 - len(answer.token_ids)))]


def _rows_of_guesses(step: ScheduledStep) -> dict[int, BatchSequence]:
    """Find the rows of a step that ran guesses: all but the first of each sequence."""
    sequences = step.sequences
    return {row: sequences[row] for row in range(1, step.num_decodes) if sequences[row] is sequences[row - 1]}
