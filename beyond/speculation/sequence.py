"""A sequence whose next tokens are guessed, and the rule that decides whether guessing is worth it.

A verification costs more than a decode step: it has more rows, and the device or the host has to guess. So each request
keeps a balance. A verification adds the tokens that it gained and takes `COST` off. A request whose balance falls below
zero makes no drafts for a while, and each time for twice as long: where guesses are wrong the loss is a handful of
steps, however long the text. A request that gains starts with the shortest pause again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any

from stage_e_batching.step import BatchSequence

WRONG = -1  # in place of a token that was sampled behind a wrong guess
COST = 1.0  # tokens that a verification must gain to pay for itself
MOST_CREDIT = 4.0  # so that a request that used to gain notices soon that it does not any more
FIRST_PAUSE = 16  # tokens
DRAFT, NUM_UNSURE = attrgetter("draft"), attrgetter("num_unsure")  # of a sequence; several times as fast in a loop


@dataclass(slots=True, eq=False)
class SpeculativeSequence(BatchSequence):
    """A sequence with a draft of its next tokens."""

    draft: list[int] = field(default_factory=list)  # the guesses that the next step verifies
    num_unsure: int = 0  # guesses of its last step: until that arrives, it may be this much longer than the host knows

    balance: float = 0.0
    pause: int = FIRST_PAUSE
    resume_at: float = 0  # no draft before the sequence is this long

    memory: Any = None  # what its drafter keeps of it

    def __post_init__(self) -> None:
        """Never draft with penalties, rules about single tokens or a replaced sampler.

        Penalties count the tokens before each row, and a replaced sampler is told of each token once: neither can be
        run on tokens that may not come. Rules are applied where those are.
        """
        params = self.request.params
        if params.needs_penalties or params.has_token_rules or self.request.sampling_fn is not None:
            self.resume_at = inf

    @property
    def is_pausing(self) -> bool:
        """Whether it makes no drafts: it lost, or may never make any."""
        return len(self.completion.all_token_ids) < self.resume_at

    @property
    def longest_draft(self) -> int:
        """Guesses that can be of use: a step gives one token more than were right, and the last of all is not run."""
        return max(0, self.max_total_tokens - len(self) - 1)

    def token_at(self, position: int) -> int:
        """Return the token at a position, or the guess for it."""
        known = self.token_ids
        return known[position] if position < len(known) else self.draft[position - len(known)]

    def settle(self, num_right: int) -> None:
        """Account for a verification that found this many guesses right."""
        self.balance = min(self.balance + num_right - COST, MOST_CREDIT)
        if self.balance < 0:
            self.resume_at = len(self.token_ids) + self.pause
            self.pause *= 2
            self.balance = 0.0
        elif num_right > COST:
            self.pause = FIRST_PAUSE
