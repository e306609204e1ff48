"""The plan and the question bank agree with the labs: the hours are those of the exercises, which are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from labs.exercises import all_exercises, load_labs
from tests.test_labs import answers, write_answer

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parent.parent
PLAN, BANK = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/course.md", "docs/interview.md"))
MINUTES = {exercise.id: exercise.minutes for exercise in all_exercises()}


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    table = PLAN.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\| \d.*\|$", table, re.M)]


def test_each_lab_has_its_week_with_the_hours_of_its_exercises() -> None:
    letters = []
    for *_, labs, hours, check in rows("Seven weeks"):
        these = re.findall(r"labs/lab_(.)\.md", labs)
        letters += these
        minutes = sum(exercise.minutes for letter in these for exercise in load_labs()[letter].exercises)
        assert float(hours) == pytest.approx(minutes / 60, abs=0.051)
        assert re.findall(r"make grade-(.)", check) == these
    assert sorted(letters) == sorted(load_labs())


def test_each_day_has_the_hours_of_what_is_written() -> None:
    days = rows("Seven days")
    assert len(days) == 7
    for *_, write, hours, _ in days:
        these = re.findall(r"[A-Z]\.\d+", write)
        assert float(hours) == pytest.approx(sum(MINUTES[name] for name in these) / 60, abs=0.051), these


def test_each_answer_of_the_question_bank_names_exercises_with_their_titles() -> None:
    questions = re.split(r"^### ", BANK, flags=re.MULTILINE)[1:]
    proofs = re.findall(r" · exercises? (.+)\*$", BANK, flags=re.MULTILINE)
    assert len(questions) == len(proofs) >= 49
    titles = {f"{exercise.id} ({exercise.title})" for exercise in all_exercises()}
    assert {name for proof in proofs for name in re.split(r"(?<=\)), ", proof)} <= titles


@pytest.mark.parametrize("letter", load_labs())
def test_right_and_wrong_answers_change_functions_that_are_there(letter: str, tmp_path: Path) -> None:
    """A slow test judges them."""
    for kind in ("right", "wrong"):
        for number, answer in enumerate(answers(kind, letter)):
            write_answer(answer, tmp_path / f"{kind}-{number}")
