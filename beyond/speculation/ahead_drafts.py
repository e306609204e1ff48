"""Drafts that the device makes: a verification is launched before the host knows what the last one found right.

    CPU  [schedule 1][schedule 2][post 1][schedule 3][post 2]…
    GPU              [ guess, verify 1 ][ guess, verify 2   ][ guess, verify 3 …

This is stage F's overlap, where a step may give a sequence more than one token. While it is in flight the host counts
one token for it: it gives at least that one. The guesses that may be right are counted apart, as `num_unsure`. Blocks
are reserved for all of them, the device adds those that were right to every position (`token_table.py`), and what was
sampled behind a wrong guess arrives as `WRONG`.

Who guesses is the host's decision, from the tokens that it knows: one token less than the device.
"""

from __future__ import annotations

from typing import Any, Protocol

from beyond.speculation.drafts import Drafter, SpeculationCounters, promising, without_rows
from beyond.speculation.ngram import NgramDrafter
from beyond.speculation.rows import DraftRows
from beyond.speculation.sequence import WRONG, SpeculativeSequence
from stage_e_batching.parts import Sampled
from stage_e_batching.step import ScheduledStep, State


class DeviceDrafts:
    """Drafts of which the host knows the length alone.

    Args:
        drafter: knows who has a guess.
        rows: of the steps that verify guesses.
        counters: count the guesses.
        draft_tokens: guesses per sequence.
    """

    need_tokens = False  # the device has them

    def __init__(self, drafter: Drafter, rows: DraftRows, counters: SpeculationCounters, draft_tokens: int) -> None:
        self.drafter = drafter
        self._rows = rows
        self._counters = counters
        self._draft_tokens = draft_tokens
        self._promised: list[SpeculativeSequence] = []  # a draft of theirs may be in the step decided last
        self._arrived: dict[SpeculativeSequence, int] = {}  # verified in the step that arrives: tokens before it

    def are_promising(self) -> bool:
        for sequence in self._promised:
            sequence.draft = []
        self._promised = promising(self.drafter, self._rows.decoding)
        return bool(self._promised)

    def propose(self) -> bool:
        """Reserve a row for each guess; the device fills them in."""
        for sequence in self._promised:
            sequence.draft = [WRONG] * min(self._draft_tokens, sequence.longest_draft)
        return True

    def complete(self, step: ScheduledStep) -> None:
        """Note how many more tokens than one the step may give to a sequence."""
        if not self._promised:
            return
        self._rows.add(step)
        running = set(step.sequences[: step.num_decodes])
        for sequence in self._promised:
            if sequence not in running:  # it has lost its blocks
                sequence.draft = []
            elif sequence.draft:
                sequence.num_unsure = len(sequence.draft)

    def accept(self, step: ScheduledStep, sampled: Sampled) -> Sampled:
        """Return the tokens that are certain. What a right guess gained was in flight too, and the guess has run."""
        guesses = _rows_of_guesses(step)
        if not guesses:
            return sampled
        wrong = {row for row in guesses if sampled.token_ids[row] == WRONG}
        for row, sequence in guesses.items():
            if sequence.state is State.FINISHED:
                wrong.add(row)
                continue
            if not sequence.draft:  # else it has others in flight already
                sequence.num_unsure = 0
            if row not in wrong:
                sequence.num_in_flight += 1
                if sequence.block_table:  # it was not preempted meanwhile; its last token of all does not run
                    most = sequence.max_total_tokens - 1
                    sequence.num_computed_tokens = min(sequence.num_computed_tokens + 1, most)
        live = [sequence for sequence in guesses.values() if sequence.state is not State.FINISHED]
        self._arrived = {sequence: len(sequence.token_ids) for sequence in live}
        self._counters.num_draft_tokens += len(live)
        self._counters.num_verifications += len(self._arrived)
        return without_rows(wrong, step, sampled)

    def settle(self, step: ScheduledStep) -> None:
        """Account for what was right, and give the blocks of the rest back."""
        for sequence, length in self._arrived.items():
            num_right = len(sequence.token_ids) - length - 1
            self._counters.num_accepted_tokens += num_right
            if not sequence.is_pausing:  # else it was launched before the loss that began the pause was known
                sequence.settle(num_right)
            self._rows.trim(sequence)
        self._arrived = {}

    def forget(self) -> None:
        self._promised, self._arrived = [], {}
        self._rows.forget()


class Known(Protocol):
    """An answer of which the host knows all tokens, also those that its sequence does not have yet."""

    sequence: Any  # a SpeculativeSequence
    token_ids: list[int]
    memory: Any  # what the look-up keeps of it


def guess_of_table(drafter: NgramDrafter, answer: Known, count: int) -> list[int]:
    """Return the guesses that the device makes for this many rows behind an answer's last token, as `TokenTable` does.

    Where it looks up nothing it guesses the last token again; past the last token of all it repeats the row of that.
    """
    draft = drafter.draft(answer) or [answer.token_ids[-1]] * count
    return draft[: max(0, min(count, answer.sequence.max_total_tokens - 1 - len(answer.token_ids)))]


def _rows_of_guesses(step: ScheduledStep) -> dict[int, SpeculativeSequence]:
    """Find the rows of a step that ran guesses: all but the first of each sequence."""
    sequences = step.sequences
    return {row: sequences[row] for row in range(1, step.num_decodes) if sequences[row] is sequences[row - 1]}
