"""A sequence with guesses for its next tokens, and the rule that decides whether guessing pays.

A verification costs more than a decode step: it has more rows, and the device or the host has to guess. So each request
keeps a balance. A verification adds the gained tokens and subtracts `COST`. A request whose balance falls below zero
makes no drafts for a while, each time for twice as long. So with wrong guesses the loss is a few steps, however long
the text. A request that gains starts with the shortest pause again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any

from stage_a_naive.contract.outputs import Completion
from stage_e_batching.step import BatchSequence

WRONG = -1  # replaces a token that was sampled after a wrong guess
COST = 1.0  # tokens that a verification must gain to pay for itself
MOST_CREDIT = 4.0  # limit, so that a request that stops gaining notices soon
FIRST_PAUSE = 16  # tokens
DRAFT, NUM_UNSURE = attrgetter("guesses.draft"), attrgetter("guesses.num_unsure")  # fast in a loop


@dataclass(slots=True, eq=False)
class Guesses:
    """A sequence's draft of its next tokens, and whether guessing pays: `sequence.guesses`."""

    draft: list[int] = field(default_factory=list)  # the guesses that the next step verifies
    num_unsure: int = 0  # guesses in flight: the sequence may be this much longer than the host knows

    balance: float = 0.0
    pause: int = FIRST_PAUSE
    resume_at: float = 0  # no draft before the sequence is this long

    memory: Any = None  # data of its drafter

    def settle(self, num_right: int, num_tokens: int) -> None:
        """Account for a verification with this many right guesses, after which the sequence has `num_tokens` tokens."""
        self.balance = min(self.balance + num_right - COST, MOST_CREDIT)
        if self.balance < 0:
            self.resume_at = num_tokens + self.pause
            self.pause *= 2
            self.balance = 0.0
        elif num_right > COST:
            self.pause = FIRST_PAUSE


def guessing_sequence(completion: Completion, **given: Any) -> BatchSequence:
    """Make a sequence with guesses; no drafts for penalties, rules about single tokens and a replaced sampler.

    Penalties count the tokens before each row, and a replaced sampler sees each token once, so neither can run on
    guesses. Rules about tokens run in the same place.
    """
    params = completion.request.params
    never = params.needs_penalties or params.has_token_rules or completion.request.sampling_fn is not None
    return BatchSequence(completion, guesses=Guesses(resume_at=inf if never else 0), **given)


def is_pausing(sequence: BatchSequence) -> bool:
    """Whether a sequence makes no drafts, after a loss or because it never may."""
    return len(sequence.completion.all_token_ids) < sequence.guesses.resume_at


def longest_draft(sequence: BatchSequence) -> int:
    """Return the most useful guesses: a step gives one token more than right guesses, and the last is not run."""
    return max(0, sequence.max_total_tokens - len(sequence) - 1)


def token_at(sequence: BatchSequence, position: int) -> int:
    """Return the token at a position, or its guess."""
    known = sequence.token_ids
    return known[position] if position < len(known) else sequence.guesses.draft[position - len(known)]
