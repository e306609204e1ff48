"""Checks the answers of the "try it" cells, without showing them."""

from __future__ import annotations


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
