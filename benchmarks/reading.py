"""The reading time at the head of a lesson; `python -m benchmarks.report` writes it.

    About 12<!--minutes--> minutes to read, [lab A](…) 3.5<!--hours of lab a--> hours.

A reader reads 150 words of prose per minute, or 300 Chinese characters, or ten lines of code. A table of measurements
counts as one minute.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

WORDS_A_MINUTE, LINES_A_MINUTE = 150, 10
TABLE = re.compile(r"<!-- ([\w:-]+) -->\n.*?<!-- /\1 -->", re.DOTALL)
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
HIDDEN = re.compile(r"<!--.*?-->|\]\([^)]*\)|[|*#`，。：；、？！（）“”-]", re.DOTALL)
TWO_CHARACTERS = re.compile("[一-鿿]{1,2}")  # a word of Chinese, on average


def minutes(text: str) -> int:
    """Return the minutes that it takes to read a lesson, as a whole number."""
    tables = len(TABLE.findall(text))
    text = TABLE.sub("", text)
    lines = sum(block.count("\n") for block in BLOCK.findall(text))
    words = len(TWO_CHARACTERS.sub(" x ", HIDDEN.sub(" ", BLOCK.sub("", text))).split())
    return round(words / WORDS_A_MINUTE + lines / LINES_A_MINUTE + tables)


def fill(text: str, root: Path) -> str:
    """A lesson with the minutes of its reading and the hours of its lab written.

    Raises:
        KeyError: the lab does not exist.
    """

    def hours(match: re.Match[str]) -> str:
        labs = tomllib.loads((root / "labs" / "exercises.toml").read_text(encoding="utf-8"))
        return f"{sum(exercise['minutes'] for exercise in labs[match[2]]['exercises']) / 60:.1f}{match[1]}"

    text = re.sub(r"[\d.]+(<!--hours of lab (\w)-->)", hours, text)
    return re.sub(r"\d+(?=<!--minutes-->)", str(minutes(text)), text)
