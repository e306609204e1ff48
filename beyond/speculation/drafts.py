"""Drafts on the host: a guess needs the last token, so the engine waits for it if a guess is worth the wait.

Stage F is a step ahead of the last token. So there are two kinds of steps:

    nothing to guess    stage F's: launch step n + 1, then fetch the tokens of step n
    a draft             stage E's: fetch what is in flight, guess, run the step, take in the tokens that were right

The second kind leaves the GPU idle while the CPU works. On text without repetition it does not occur, and if the device
guesses it never occurs (`ahead_drafts.py`).

A step verifies guesses g1, g2, … after the last token t with rows t, g1, g2, …. Each row samples the next token, with
the same noise as without guessing. The token sampled in row t is certain. If it equals g1, then row g1 was computed
from the right tokens, and its token is certain too; and so on. So each step gives the right guesses and one more token,
and every token is the one that the engine would have sampled without guessing. (In 16 bits, up to the rounding of a
step with another number of rows.)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from beyond.speculation.options import MAX_SPECULATING
from beyond.speculation.rows import DraftRows
from beyond.speculation.sequence import is_pausing, longest_draft
from stage_e_batching.parts import Sampled
from stage_e_batching.step import BatchSequence, Counters, ScheduledStep

SHARE = 4  # at least 1 / SHARE of the decoding sequences must have a draft, or waiting costs more than it gains


class Drafter(Protocol):
    """Makes guesses."""

    def has_draft(self, sequence: BatchSequence) -> bool:
        """Whether the tokens on the host promise a guess."""
        ...

    def draft(self, sequence: BatchSequence) -> list[int]:
        """Return the guesses, or a list of the same length; all tokens are on the host."""
        ...

    def complete(self, sequences: list[BatchSequence]) -> None:
        """Fill in the drafts, once they are scheduled and have blocks."""
        ...


Shorten = Callable[[BatchSequence, list[int]], None]


class Draft(Protocol):
    """An answer whose sequence has a draft."""

    sequence: Any  # a BatchSequence


def draft_of(answer: Draft, count: int) -> list[int]:
    """Return the host's guesses that run in `count` rows after an answer's last token."""
    return answer.sequence.guesses.draft


@dataclass
class SpeculationCounters(Counters):
    """Totals since the engine was made."""

    num_verifications: int = 0  # drafts verified: a step may verify several
    num_draft_tokens: int = 0  # tokens of these drafts
    num_accepted_tokens: int = 0  # how many of these were right


class HostDrafts:
    """Drafts that are complete on the host before their step is launched.

    Args:
        drafter: makes the guesses.
        rows: adds rows for the guesses to a step.
        counters: count the guesses.
        shorten: cuts a draft before a forbidden token; None if guesses are made later.
    """

    def __init__(
        self, drafter: Drafter, rows: DraftRows, counters: SpeculationCounters, shorten: Shorten | None = None
    ) -> None:
        self.drafter = drafter
        self._rows = rows
        self._shorten = shorten
        self._counters = counters
        self._proposed: list[BatchSequence] = []  # have a draft for the current step
        self._verified: dict[BatchSequence, int] = {}  # in the current step, with the number of tokens before it
        self._are_promising = False
        # The device does not know their last right token: the host sends it with their next step.
        self._unknown: set[BatchSequence] = set()

    @property
    def need_tokens(self) -> bool:
        return self._are_promising or bool(self._unknown)

    def are_promising(self) -> bool:
        self._are_promising = bool(promising(self.drafter, self._rows.decoding))
        return self._are_promising

    def propose(self) -> bool:
        """Guess for every sequence that may draft. Returns whether there is a guess."""
        decoding = self._rows.decoding
        for sequence in decoding:
            sequence.guesses.draft = [] if is_pausing(sequence) else self.drafter.draft(sequence)
            del sequence.guesses.draft[longest_draft(sequence) :]
            if sequence.guesses.draft and self._shorten is not None:
                self._shorten(sequence, sequence.guesses.draft)
        self._proposed = [sequence for sequence in decoding if sequence.guesses.draft]
        return bool(self._proposed)

    def complete(self, step: ScheduledStep) -> None:
        if self._unknown:
            decoding = set(self._rows.decoding)
            self._unknown = {s for s in self._unknown.difference(step.sequences) if s in decoding}
        if not self._proposed:
            return
        self._rows.add(step)
        verified = [
            sequence for sequence in dict.fromkeys(step.sequences[: step.num_decodes]) if sequence.guesses.draft
        ]
        self._verified = {sequence: len(sequence.token_ids) for sequence in verified}
        self._unknown.update(verified)
        self._counters.num_verifications += len(verified)
        self._counters.num_draft_tokens += sum(len(sequence.guesses.draft) for sequence in verified)
        if verified:
            self.drafter.complete(verified)

    def accept(self, step: ScheduledStep, sampled: Sampled) -> Sampled:
        if not self._verified:
            return sampled
        wrong, row = set(), 0
        while row < step.num_decodes:
            sequence = step.sequences[row]
            end = row + 1 + len(sequence.guesses.draft)
            right = self.count_right(sequence.guesses.draft, sampled.token_ids[row:end])
            sequence.num_computed_tokens += right
            wrong.update(range(row + 1 + right, end))
            row = end
        return without_rows(wrong, step, sampled)

    def count_right(self, draft: list[int], sampled: list[int]) -> int:
        """Return how many guesses, from the first on, equal the sampled tokens."""
        right = 0
        while right < len(draft) and draft[right] == sampled[right]:
            right += 1
        return right

    def settle(self, step: ScheduledStep) -> None:
        """Account for the right guesses, free the blocks of the others, and drop drafts that did not run."""
        if not self._proposed:
            return
        for sequence, length in self._verified.items():
            num_right = len(sequence.token_ids) - length - 1
            self._counters.num_accepted_tokens += num_right
            sequence.guesses.settle(num_right, len(sequence.token_ids))
            self._rows.trim(sequence)
        for sequence in self._proposed:  # in steps without decodes, drafts have not run
            sequence.guesses.draft = []
        self._proposed, self._verified = [], {}

    def forget(self) -> None:
        self._proposed, self._verified, self._unknown = [], {}, set()
        self._rows.forget()


def promising(drafter: Drafter, decoding: Sequence[BatchSequence]) -> list[BatchSequence]:
    """Return the sequences that promise a guess; none if they are too few, or if too many sequences run."""
    if len(decoding) > MAX_SPECULATING:
        return []
    found = [s for s in decoding if not is_pausing(s) and drafter.has_draft(s) and longest_draft(s) > 0]
    return found if len(found) * SHARE >= len(decoding) else []


def without_rows(rows: Container[int], step: ScheduledStep, sampled: Sampled) -> Sampled:
    """Return a step's tokens without those of the given decodes, which stop sampling."""
    kept = [row for row in range(len(sampled.token_ids)) if row not in rows]
    step.samples[: step.num_decodes] = [row not in rows for row in range(step.num_decodes)]
    errors = sampled.errors or {}
    return Sampled(
        [sampled.token_ids[row] for row in kept],
        sampled.logprobs and [sampled.logprobs[row] for row in kept],
        {i: errors[row] for i, row in enumerate(kept) if row in errors},
    )
