"""Drafts without a model: what followed the last time that these few tokens came up.

Answers repeat: names, code, the question's own words, the text that is to be corrected. A dictionary per request leads
from every n-gram of prompt and answer to the position after its latest occurrence (prompt lookup decoding, Saxena,
2023). A step adds one n-gram per request and looks one up, on the CPU, while the GPU runs the step before. The same
look-up on the device is `TokenTable.guess`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from stage_e_batching.step import BatchSequence

SIZE = 3  # tokens that must agree


@dataclass
class NgramIndex:
    """The positions after a sequence's n-grams."""

    positions: dict[tuple[int, ...], int] = field(default_factory=dict)  # of the token after the latest occurrence
    num_tokens: int = 0  # that were entered


class Text(Protocol):
    """Tokens, and what is guessed about them."""

    guesses: Any  # `Guesses`

    @property
    def token_ids(self) -> list[int]: ...


class NgramDrafter:
    """Looks up the last tokens of a sequence in its earlier text.

    Args:
        num_tokens: the longest draft.
        size: tokens that must agree.
    """

    def __init__(self, num_tokens: int, size: int = SIZE) -> None:
        self._num_tokens = num_tokens
        self._size = size

    def has_draft(self, sequence: Text) -> bool:
        """Whether the last known tokens have occurred before."""
        return self._find(sequence) is not None

    def draft(self, sequence: Text) -> list[int]:
        """Guess the next tokens; none if the last ones are new.

        If the earlier occurrence overlaps the guess, copying continues inside the guess: `a b a b a` -> `b a b a`.
        """
        at = self._find(sequence)
        if at is None:
            return []
        tokens = sequence.token_ids
        draft = tokens[at : at + self._num_tokens]
        while len(draft) < self._num_tokens:
            draft.append(draft[len(draft) - (len(tokens) - at)])
        return draft

    def complete(self, sequences: list[BatchSequence]) -> None:
        """Do nothing: `draft` has returned the guesses."""

    def _find(self, sequence: Text) -> int | None:
        """Return the position after the latest earlier occurrence of the last tokens; None if they are new.

        The last n-gram is looked up before it is entered: nothing follows it yet.
        """
        tokens, size = sequence.token_ids, self._size
        index = sequence.guesses.memory = sequence.guesses.memory or NgramIndex()
        for end in range(max(index.num_tokens, size), len(tokens)):
            index.positions[tuple(tokens[end - size : end])] = end
        index.num_tokens = len(tokens)
        return index.positions.get(tuple(tokens[-size:]))
