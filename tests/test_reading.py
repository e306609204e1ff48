"""A lesson says how long it takes, and none takes longer than forty minutes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import reading
from labs.exercises import load_labs

pytestmark = pytest.mark.fast
ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted([*ROOT.glob("stage_*/**/*.md"), *ROOT.glob("beyond/**/*.md"), ROOT / "docs" / "debugging.md"])


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_lesson_says_at_its_head_how_long_it_takes_and_that_is_forty_minutes_at_most(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    head = text.split("\n## ")[0]
    assert re.findall(r"(\d+)<!--minutes-->", head) == [str(reading.minutes(text))], "`python -m benchmarks.report`"
    assert reading.minutes(text) <= 40
    assert reading.fill(text, ROOT) == text


@pytest.mark.parametrize("letter", "abcdefghijk")
def test_the_lesson_of_a_lab_says_how_many_hours_its_exercises_take(letter: str) -> None:
    hours = sum(exercise.minutes for exercise in load_labs()[letter].exercises) / 60
    assert any(f"{hours:.1f}<!--hours of lab {letter}-->" in path.read_text(encoding="utf-8") for path in LESSONS)


def test_words_code_and_tables_are_counted_and_what_nobody_sees_is_not() -> None:
    words, code, table = "word " * 300, "```python\n" + "x = 1\n" * 30 + "```\n", "<!-- t -->\n| 1 | 2 |\n<!-- /t -->\n"
    assert reading.minutes(f"{words}\n{code}{table}<!-- not this -->") == 2 + 3 + 1
    assert reading.minutes("读，" * 600 + "`读`" * 300) == 6, "a character alone is a word"
    assert reading.minutes("键值缓存，" * 75) == 1
    assert reading.fill(f"9<!--minutes--> minutes\n{words}\n{code}", ROOT).startswith("5<!--minutes--> minutes")
