"""Accept only regular expressions on which two readers agree: the library's masks and Python's `regex`.

The library reads Rust's dialect, whose character classes have set operations: for Rust `[a&&b]` is the intersection of
two classes, which is empty, and for Python a class of three characters. Expressions that the two would read differently
are refused with the position. Syntax that one of them does not know, that reader refuses.

`regex` is like Python's `re` with a time limit: an expression such as `(a|aa)*b` takes both exponentially long. If it
finds no match, `re` decides, because `regex` misreads `([^a]|[^b])*` as a class that excludes both.
"""

from __future__ import annotations

import re

import regex

SECONDS = 0.5  # time limit of a check
NOT_QUOTED = r"\x01"  # a character that the library's JSON strings never contain
# In order: an escape; the beginning of a class; a repetition; flags; any other character.
PARTS = re.compile(r"\\.|\[\^?\]?|[*+?]\??\+|\{\d+(,\d*)?\}\+|\(\?[a-zA-Z-]+\)|.", re.DOTALL)
IN_CLASS = re.compile(r"\\.|\[:\^?\w+:\]|\[|&&|--|~~|\]|.", re.DOTALL)


class PatternError(ValueError):
    """A regular expression that is not supported; the message has the position."""


def matches(pattern: str, text: str, whole: bool = False) -> bool:
    """Tell whether an expression matches somewhere in a text, or the whole of it.

    Raises:
        TimeoutError: it takes longer than `SECONDS`.
    """
    how = "fullmatch" if whole else "search"
    if getattr(regex, how)(pattern, text, timeout=SECONDS) is not None:
        return True
    try:
        return getattr(re, how)(pattern, text) is not None
    except re.error:  # `re` does not know `\p{L}`, for example
        return False


def check_pattern(pattern: str) -> None:
    """Check an expression before it is used.

    Raises:
        PatternError: it is wrong, or ambiguous between the two readers.
    """
    scan(pattern)
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise PatternError(str(error)) from None


def scan(pattern: str) -> str:
    """Refuse ambiguous syntax; return the expression for JSON strings, where `[^"]` also forbids the quote.

    In a class with all control characters the library allows every escape, even of a character that the class excludes.
    Without one control character, which no answer can contain anyway, it checks each escape.

    Raises:
        PatternError: as in `check_pattern`.
    """
    written, at = "", 0
    while at < len(pattern):
        found = PARTS.match(pattern, at)
        assert found is not None  # the last choice is any character
        part, begin, at = found[0], at, found.end()
        if part[0] == "[":
            inside, at = _scan_class(pattern, at)
            part = part.replace("[^", f"[^{NOT_QUOTED}").replace("]", r"\]") + inside
        elif part[-1] == "+" and len(part) > 1 and part[0] != "\\":
            raise PatternError(f"{part!r} at position {begin} repeats twice; put what is repeated into a group (?:…)")
        elif part.startswith("(?") and begin:
            raise PatternError(f"the flags {part} at position {begin} are not at the beginning; write (?i:…)")
        written += part
    return written


def _scan_class(pattern: str, at: int) -> tuple[str, int]:
    """Return the rest of a class, and where it ends."""
    begin = at
    while at < len(pattern):
        found = IN_CLASS.match(pattern, at)
        assert found is not None
        if found[0] == "]":
            return pattern[begin : found.end()], found.end()
        if found[0] in ("[", "&&", "--", "~~"):
            raise PatternError(
                f"{found[0]!r} in a class at position {at} is an operation on sets in some dialects; write a backslash "
                "before it"
            )
        at = found.end()
    raise PatternError(f"a class is not closed: {pattern[begin - 1 :]!r}")
