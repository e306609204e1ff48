"""Judges many versions of one lab in one process: the reference, every starter with one body missing, wrong answers.

`python tests/lab_driver.py d OUT.json`. A process of its own for each version would spend its time importing PyTorch,
so here the stages' modules are dropped between versions and imported again from another folder.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import tomllib
from pathlib import Path

from labs import bodies
from labs.exercises import Exercise, load_labs
from labs.grade import PUBLIC_TESTS, Mark, _enter
from labs.judge import WORK_VARIABLE, run_tests
from labs.starter import write_starter

ANSWERS = Path(__file__).parent / "lab_wrong_answers.toml"


def wrong_answers(letter: str) -> list[dict[str, str]]:
    answers = tomllib.loads(ANSWERS.read_text(encoding="utf-8"))["answer"]
    return [answer for answer in answers if answer["exercise"].startswith(letter.upper())]


def answer_wrongly(exercise: Exercise, work: Path, find: str, put: str) -> None:
    """Change the function in the learner's copy."""
    file = exercise.copy_in(work)
    text = file.read_text(encoding="utf-8")
    span = bodies.find(text, exercise.name, exercise.path)
    body = text[span.start : span.end]
    if body.count(find) != 1:
        raise ValueError(f"{exercise.id}: {find!r} stands {body.count(find)} times in the reference, expected once")
    file.write_text(text[: span.start] + body.replace(find, put) + text[span.end :], encoding="utf-8")


def marks_of(work: Path, selected: list[str]) -> dict[str, dict[str, str]]:
    """State and reason of each exercise, judged in this process."""
    for name in list(sys.modules):
        if name.startswith(("stage_", "labs.tests")) or "test_lab_" in name:
            del sys.modules[name]
    importlib.invalidate_caches()
    os.environ[WORK_VARIABLE] = str(work)
    sys.path.insert(0, str(work))
    results = work / "results.jsonl"
    try:
        run_tests(results, [PUBLIC_TESTS], selected, work)
    finally:
        sys.path.remove(str(work))
    marks = {i: Mark(i, "", 1, state="") for i in selected}
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    broken = [line for line in lines if line["event"] == "broken"]
    if broken:
        raise RuntimeError(f"the tests could not be collected: {broken[0]['reason']}")
    _enter(lines, marks)
    return {i: {"state": mark.state, "reason": mark.reason} for i, mark in marks.items()}


def main(letter: str, out: Path) -> None:
    lab = load_labs()[letter]
    ids = [exercise.id for exercise in lab.exercises]
    found: dict[str, object] = {"stubs": {}, "wrong": []}
    with tempfile.TemporaryDirectory(prefix="six-engines-labs-") as folder:

        def judged(name: str, missing: list[Exercise], selected: list[str], wrong: dict[str, str] | None = None):
            work = Path(folder).resolve() / name
            write_starter(lab, work, missing=missing)
            if wrong is not None:
                exercise = next(e for e in lab.exercises if e.id == wrong["exercise"])
                answer_wrongly(exercise, work, wrong["find"], wrong["put"])
            return marks_of(work, selected)

        found["reference"] = judged("reference", [], ids)
        for exercise in lab.exercises:
            found["stubs"][exercise.id] = judged(f"without-{exercise.id}", [exercise], ids)
        for number, answer in enumerate(wrong_answers(letter)):
            marks = judged(f"wrong-{number}", [], [answer["exercise"]], answer)
            found["wrong"].append(answer | marks[answer["exercise"]])
    out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
