"""Every week of the course has slides that can be shown: their figures and links are there, and their code fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast
ROOT = Path(__file__).resolve().parent.parent
DECKS = sorted((ROOT / "docs" / "slides").glob("week*.md"))


def test_every_week_of_the_course_links_to_its_slides() -> None:
    weeks = re.findall(
        r"^\| (\d) \| \[slides\]\((.+?)\)", (ROOT / "docs/course.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [(str(i), f"slides/week{i}.md") for i in range(1, 8)] == weeks
    assert [ROOT / "docs" / name for _, name in weeks] == DECKS


def test_the_speakers_notes_say_the_hours_of_the_weeks_labs() -> None:
    rows = re.findall(
        r"^\| \d \| \[slides\].*\| ([\d.]+) \| [^|]*\|$", (ROOT / "docs/course.md").read_text(), re.MULTILINE
    )
    notes = [re.search(r"^<!-- ([\d.]+) hours\b", deck.read_text(), re.MULTILINE) for deck in DECKS]
    assert [note and note[1] for note in notes] == rows


@pytest.mark.parametrize("deck", DECKS, ids=lambda path: path.stem)
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
