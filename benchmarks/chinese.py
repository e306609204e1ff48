"""Tables and pictures of the lessons in Chinese: the same lines, with the texts of `words.zh-CN.toml`.

`python -m benchmarks.report` writes every table in English and in Chinese, and `X.zh-CN.svg` for each picture `X.svg`
that a Chinese document shows. Numbers stay as they are, and so do texts without a translation.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

WORDS = tomllib.loads(Path(__file__).with_name("words.zh-CN.toml").read_text(encoding="utf-8"))
TEXTS = WORDS["words"] | WORDS["marks"]
NUMBER = r"([+-]?\d[\d.,–-]*|\d)"
CODE = re.compile(r"`[^`]*`|[\w, ]*\[[^\]]*\]")  # or a shape, which keeps its commas
IN_SVG = re.compile(r"(<(?:title|text|tspan)\b[^>]*>)([^<]*)")


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text).replace(r"\{\}", "(.+?)").replace(r"\#", NUMBER))


PATTERNS = [(_pattern(text), chinese) for text, chinese in TEXTS.items() if "{}" in text or "#" in text]


@cache
def chinese(text: str) -> str:
    """Translate a text: as a whole, or else part by part between punctuation marks."""
    if text in TEXTS or not re.search("[A-Za-z]", text) or CODE.fullmatch(text):
        return TEXTS.get(text, text)
    for pattern, said in PATTERNS:
        if match := pattern.fullmatch(text):
            return said.format(*map(chinese, match.groups()))
    return text


def chinese_table(lines: Sequence[str]) -> list[str]:
    """Translate the lines of a table and the lines around it."""
    return [
        "|".join(cell and f" {chinese(cell.strip())} " for cell in line.split("|"))
        if line.startswith("| ")
        else chinese(line)
        for line in lines
    ]


def chinese_svg(picture: str) -> str:
    """Translate the texts of an SVG file."""
    return IN_SVG.sub(lambda match: match[1] + chinese(match[2]), picture)
