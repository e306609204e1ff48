"""Find stop strings and cut the text before them, without ever showing a part of one.

A stop string may be spread over several tokens. While an answer is streamed, its end may be the beginning of a stop
string; that end is held back until the next tokens decide.
"""

from __future__ import annotations

from collections.abc import Sequence


def first_stop(text: str, stops: Sequence[str], num_new: int) -> int | None:
    """Return where the first stop string in `text` begins; None if there is none.

    Args:
        num_new: length of the end of the text that was not searched yet. A match must end in it.
    """
    before = len(text) - num_new
    found = [at for stop in stops if (at := text.find(stop, max(0, before - len(stop) + 1))) >= 0]
    return min(found, default=None)


def num_held_back(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a stop string."""
    return max((overlap(text, stop) for stop in stops), default=0)


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
