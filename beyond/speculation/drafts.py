"""Drafts on the host: guesses that need the last token, and so wait for it where a guess is worth it.

Guessing needs the last token, and stage F is a step ahead of it. So there are two kinds of steps:

    nothing to guess    stage F's: launch step n + 1, then fetch the tokens of step n
    a draft             stage E's: fetch what is in flight, guess, run the step, take in the tokens that were right

The second kind leaves the GPU idle while the CPU works. On text that repeats nothing there are none of them. Where the
device guesses there are none at all (`ahead_drafts.py`).

A step verifies guesses g1, g2, … behind the last token t with rows t, g1, g2, …. Each row samples the token that
follows it, by the same noise as ever. The token sampled in row t is certain; if it equals g1, then row g1 was computed
from the right tokens, and what it sampled is certain too; and so on. So each step gains the guesses that were right and
one token more, and every token is the one that the engine would have sampled without guessing. (In 16 bits, up to the
rounding of a step with another number of rows.)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from beyond.speculation.options import MAX_SPECULATING
from beyond.speculation.rows import DraftRows
from beyond.speculation.sequence import SpeculativeSequence
from stage_e_batching.parts import Sampled
from stage_e_batching.step import Counters, ScheduledStep

SHARE = 4  # one in this many decoding sequences must have a draft, or waiting costs the others more than it gains


class Drafter(Protocol):
    """What makes guesses."""

    def has_draft(self, sequence: SpeculativeSequence) -> bool:
        """Whether there seems to be a guess, from the tokens on the host."""
        ...

    def draft(self, sequence: SpeculativeSequence) -> list[int]:
        """Return the guess, when all tokens are on the host, or a list of its length."""
        ...

    def complete(self, sequences: list[SpeculativeSequence]) -> None:
        """Fill in the drafts, when they are scheduled and have their blocks."""
        ...


Shorten = Callable[[SpeculativeSequence, list[int]], None]


class Draft(Protocol):
    """An answer whose sequence has a draft."""

    sequence: Any  # a SpeculativeSequence


def draft_of(answer: Draft, count: int) -> list[int]:
    """Return the guesses that run in this many rows behind an answer's last token: the host made them."""
    return answer.sequence.draft


@dataclass
class SpeculationCounters(Counters):
    """Totals since the engine was made."""

    num_verifications: int = 0  # drafts verified: a step may verify several
    num_draft_tokens: int = 0  # tokens of these drafts
    num_accepted_tokens: int = 0  # of these, those that were right


class HostDrafts:
    """Drafts that are complete on the host before their step is launched.

    Args:
        drafter: makes the guesses.
        rows: of the steps that verify them.
        counters: count them.
        shorten: end a guess where it may not go on; None where guesses are made later.
    """

    def __init__(
        self, drafter: Drafter, rows: DraftRows, counters: SpeculationCounters, shorten: Shorten | None = None
    ) -> None:
        self.drafter = drafter
        self._rows = rows
        self._shorten = shorten
        self._counters = counters
        self._proposed: list[SpeculativeSequence] = []  # they have a draft, for the step that is under way
        self._verified: dict[SpeculativeSequence, int] = {}  # in that step, with their tokens before it
        self._are_promising = False
        # The device does not know which of their tokens was the last right one: the host sends it with their next step.
        self._unknown: set[SpeculativeSequence] = set()

    @property
    def need_tokens(self) -> bool:
        return self._are_promising or bool(self._unknown)

    def are_promising(self) -> bool:
        self._are_promising = bool(promising(self.drafter, self._rows.decoding))
        return self._are_promising

    def propose(self) -> bool:
        """Guess for every sequence that may. Returns whether there is a guess."""
        decoding = self._rows.decoding
        for sequence in decoding:
            sequence.draft = [] if sequence.is_pausing else self.drafter.draft(sequence)
            del sequence.draft[sequence.longest_draft :]
            if sequence.draft and self._shorten is not None:
                self._shorten(sequence, sequence.draft)
        self._proposed = [sequence for sequence in decoding if sequence.draft]
        return bool(self._proposed)

    def complete(self, step: ScheduledStep) -> None:
        if self._unknown:
            decoding = set(self._rows.decoding)
            self._unknown = {s for s in self._unknown.difference(step.sequences) if s in decoding}
        if not self._proposed:
            return
        self._rows.add(step)
        verified = [sequence for sequence in dict.fromkeys(step.sequences[: step.num_decodes]) if sequence.draft]
        self._verified = {sequence: len(sequence.token_ids) for sequence in verified}
        self._unknown.update(verified)
        self._counters.num_verifications += len(verified)
        self._counters.num_draft_tokens += sum(len(sequence.draft) for sequence in verified)
        if verified:
            self.drafter.complete(verified)

    def accept(self, step: ScheduledStep, sampled: Sampled) -> Sampled:
        if not self._verified:
            return sampled
        wrong, row = set(), 0
        while row < step.num_decodes:
            sequence = step.sequences[row]
            end = row + 1 + len(sequence.draft)
            right = self.count_right(sequence.draft, sampled.token_ids[row:end])
            sequence.num_computed_tokens += right
            wrong.update(range(row + 1 + right, end))
            row = end
        return without_rows(wrong, step, sampled)

    def count_right(self, draft: list[int], sampled: list[int]) -> int:
        """Return how many guesses, from the first on, are the tokens that were sampled in their places."""
        right = 0
        while right < len(draft) and draft[right] == sampled[right]:
            right += 1
        return right

    def settle(self, step: ScheduledStep) -> None:
        """Account for what was right, give the blocks of the rest back, and drop drafts that did not run."""
        if not self._proposed:
            return
        for sequence, length in self._verified.items():
            num_right = len(sequence.token_ids) - length - 1
            self._counters.num_accepted_tokens += num_right
            sequence.settle(num_right)
            self._rows.trim(sequence)
        for sequence in self._proposed:  # where prompts have steps of their own, drafts may not have run
            sequence.draft = []
        self._proposed, self._verified = [], {}

    def forget(self) -> None:
        self._proposed, self._verified, self._unknown = [], {}, set()
        self._rows.forget()


def promising(drafter: Drafter, decoding: Sequence[SpeculativeSequence]) -> list[SpeculativeSequence]:
    """Return the sequences that seem to have a guess; none where they are too few, or too many run."""
    if len(decoding) > MAX_SPECULATING:
        return []
    found = [s for s in decoding if not s.is_pausing and drafter.has_draft(s) and s.longest_draft > 0]
    return found if len(found) * SHARE >= len(decoding) else []


def without_rows(rows: Container[int], step: ScheduledStep, sampled: Sampled) -> Sampled:
    """Return a step's tokens without those of some of its decodes, which sample no more."""
    kept = [row for row in range(len(sampled.token_ids)) if row not in rows]
    step.samples[: step.num_decodes] = [row not in rows for row in range(step.num_decodes)]
    errors = sampled.errors or {}
    return Sampled(
        [sampled.token_ids[row] for row in kept],
        sampled.logprobs and [sampled.logprobs[row] for row in kept],
        {i: errors[row] for i, row in enumerate(kept) if row in errors},
    )
