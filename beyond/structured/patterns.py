"""Regular expressions that two readers agree on: the library, which masks tokens, and `regex`, which checks answers.

The library reads Rust's dialect, whose character classes know operations on sets: in `[a&&b]` Rust sees what is in both
classes, which is nothing, and Python three characters. What the two would read differently is refused with its
position. What one of them does not know at all is refused by that one.

`regex` is Python's `re` with a limit on time: an expression such as `(a|aa)*b` takes both exponentially long. Where it
finds no match, `re` has the last word: `regex` reads `([^a]|[^b])*` as a class that leaves both out.
"""

from __future__ import annotations

import re

import regex

SECONDS = 0.5  # that a check of an answer may take
NOT_QUOTED = r"\x01"  # a character that no string of the library's JSON has
# In order: an escape; the beginning of a class; what repeats; flags; any other character.
PARTS = re.compile(r"\\.|\[\^?\]?|[*+?]\??\+|\{\d+(,\d*)?\}\+|\(\?[a-zA-Z-]+\)|.", re.DOTALL)
IN_CLASS = re.compile(r"\\.|\[:\^?\w+:\]|\[|&&|--|~~|\]|.", re.DOTALL)


class PatternError(ValueError):
    """A regular expression that cannot be had; the message has the position."""


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
    except re.error:  # it does not know `\p{L}`, for one
        return False


def check_pattern(pattern: str) -> None:
    """Look at an expression before it is used.

    Raises:
        PatternError: it is wrong, or would be read in two ways.
    """
    scan(pattern)
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise PatternError(str(error)) from None


def scan(pattern: str) -> str:
    """Look for what is read in two ways; return the expression for strings of JSON, where `[^"]` forbids the quote too.

    In a class that has all control characters, the library allows every escape, also that of a character which the
    class leaves out. With one control character less, which no answer can have anyway, it looks at each escape.

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
