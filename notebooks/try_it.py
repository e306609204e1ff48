"""Checks the answers of the "try it" cells, without showing them."""

from __future__ import annotations

import hashlib


def check(answer: object, right: object, hint: str) -> None:
    """Say whether an answer is right; `...` means that it has not been given yet.

    Raises:
        AssertionError: it is wrong; the message is the hint.
    """
    if answer is ...:
        print("Replace the dots with your answer and run this cell again.")
        return
    assert answer == right, f"{answer!r} is not it. {hint}"
    print(f"{answer!r} is right.")


def digest(answer: object) -> str:
    """A short hash of an answer."""
    return hashlib.sha256(repr(answer).encode()).hexdigest()[:12]


def check_digest(answer: object, right: str, hint: str) -> None:
    """`check` for a cell that cannot work its answer out: it has the right answer's `digest` and not the answer.

    Raises:
        AssertionError: it is wrong; the message is the hint.
    """
    check(answer, answer if answer is ... or digest(answer) == right else object(), hint)
