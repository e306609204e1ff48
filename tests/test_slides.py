"""Every week of the course has slides that can be shown: their figures and links are there, and their code fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast
ROOT = Path(__file__).resolve().parent.parent
DECKS = {end: sorted((ROOT / "docs" / "slides").glob(f"week?{end}")) for end in (".md", ".zh-CN.md")}


@pytest.mark.parametrize("end", DECKS)
def test_every_week_of_the_course_links_to_its_slides(end: str) -> None:
    plan = (ROOT / f"docs/course{end}").read_text(encoding="utf-8")
    weeks = re.findall(r"^\| (\d) \| \[(?:slides|幻灯片)\]\((.+?)\)", plan, re.MULTILINE)
    assert [(str(i), f"slides/week{i}{end}") for i in range(1, 8)] == weeks
    assert [ROOT / "docs" / name for _, name in weeks] == DECKS[end]


@pytest.mark.parametrize("end", DECKS)
def test_the_speakers_notes_say_the_hours_of_the_weeks_labs(end: str) -> None:
    plan = (ROOT / f"docs/course{end}").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d \| \[(?:slides|幻灯片)\].*\| ([\d.]+) \| [^|]*\|$", plan, re.MULTILINE)
    hours = re.compile(r"^<!-- (?:合计 )?([\d.]+) (?:hours\b|小时)", re.MULTILINE)
    assert [hours.findall(deck.read_text(encoding="utf-8"))[-1:] for deck in DECKS[end]] == [[row] for row in rows]


@pytest.mark.parametrize("deck", sum(DECKS.values(), []), ids=lambda path: path.stem)
def test_slides_fit_an_hour_and_the_screen_and_lead_to_what_is_there(deck: Path) -> None:
    text = deck.read_text(encoding="utf-8")
    slides = re.split(r"^#{1,2} ", text, flags=re.MULTILINE)[1:]
    assert 12 <= len(slides) <= 17
    assert sum("<!-- _class: question -->" in slide for slide in slides) >= 2, "too few predictions are asked for"
    assert all(re.search(r"^<!-- [^_].* .*-->$", slide, re.MULTILINE) for slide in slides), "a slide without a note"
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (deck.parent / target).exists(), f"{target} is not there"
    for code in re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        assert code.count("\n") <= 14, f"too long for a slide: {code}"
