"""Write the folder in which an answer runs: the stages and drivers, with one function replaced by the learner's.

The answer's process imports only from this folder. It has the reference's body of another exercise only if the driver
runs that too (`needs` in `exercises.toml`), and no expected values.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from labs import bodies
from labs.exercises import ROOT, STAGES, Exercise, Lab, all_exercises
from labs.submission import Answer, Unusable, read_answer

IGNORED = shutil.ignore_patterns("*.png", "work", "pack", "templates", "notebooks", "break_it", "values", "slides")


class Place(NamedTuple):
    """An answer's lines in the folder: `first` to `last` of `file`, and what to add for the learner's line."""

    file: str
    first: int
    last: int
    shift: int
    shown: str


def write(lab: Lab, folder: Path, answers: Iterable[Answer] = ()) -> list[Place]:
    """Write the files that a lab needs, with the bodies of these answers; return where the learner's bodies are."""
    top = lab.package.split(".")[0]
    later = STAGES[STAGES.index(top) + 1 :]
    for name in (*(stage for stage in STAGES if stage not in later), "csrc", "docs", "labs"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=IGNORED, copy_function=_copy)
    shutil.copy(ROOT / "pyproject.toml", folder)  # the version
    (folder / "models").symlink_to(ROOT / "models")
    there = [answer for answer in answers if (folder / answer.exercise.path).exists()]
    places = [(answer, put(answer, folder / answer.exercise.path)) for answer in there]
    return [place for answer, place in places if answer.source]


def _copy(source: str, target: str) -> None:
    """Copy a file; a lesson, which may show an answer, becomes empty."""
    if source.endswith(".md"):
        Path(target).touch()
    else:
        shutil.copy2(source, target)


def put(answer: Answer, file: Path) -> Place:
    """Replace a body in a file by an answer's body."""
    exercise = answer.exercise
    text = file.read_text(encoding="utf-8")
    span = bodies.find(text, exercise.name, exercise.path)
    before, body, after = text[: span.body_start], answer.body, text[span.body_end :]
    first = before.count("\n") + 1
    if not exercise.is_python:  # the compiler's errors name the learner's file
        line = text.count("\n", 0, span.body_end) + 1
        body = f'\n#line {answer.body_line} "{exercise.path}"\n{body}\n#line {line} "given/{exercise.path}"\n'
    elif not body.startswith(span.indent):
        body = textwrap.indent(textwrap.dedent(body), span.indent)
    file.write_text(before + body + after, encoding="utf-8")
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()  # of the reference
    shown = str(exercise.copy_in(Path()))
    return Place(exercise.path, first, first + body.count("\n"), answer.body_line - first, shown)


def answers_for(lab: Lab, judged: list[Exercise], work: Path) -> list[Answer]:
    """Return the bodies that replace the reference's in the folder, the judged ones last.

    Raises:
        Unusable: a judged body is missing.
    """
    found = []
    for exercise in judged:
        answer = read_answer(exercise, work)
        if answer is None:
            raise Unusable(f"{exercise.id} is missing: the whole stage needs all functions of the lab")
        found.append(answer)
    return [*others(lab, judged, work), *found]


def others(lab: Lab, judged: list[Exercise], work: Path) -> list[Answer]:
    """Return the bodies of exercises that are not judged: the learner's, or none.

    The reference's bodies stay if the driver of a judged exercise runs them (`needs`), so that another exercise's
    mistake costs nothing here. Bodies that a student edition lacks are always the learner's.
    """
    needed = {key for exercise in judged for key in exercise.needs}
    found = []
    for exercise in all_exercises():
        is_own = exercise.lab == lab.letter and exercise.id not in needed
        if exercise in judged or exercise.is_break_it or not (is_own or exercise.is_python and is_left_out(exercise)):
            continue
        try:
            found.append(read_answer(exercise, work) or missing(exercise))
        except Unusable:
            found.append(missing(exercise))
    return found


def missing(exercise: Exercise) -> Answer:
    """Replace an answer by the starter's body, or in CUDA by one that compiles and cannot be run."""
    text = exercise.starter_text(exercise.reference.read_text(encoding="utf-8"))
    span = bodies.find(text, exercise.name, exercise.path)
    body = text[span.body_start : span.body_end]
    return Answer(exercise, Path(), "", 0, "__builtin_trap();" if "static_assert(false" in body else body, 0)


def is_left_out(exercise: Exercise) -> bool:
    """Return whether this repository has the starter instead of the reference."""
    return exercise.reference.is_file() and exercise.message in exercise.reference.read_text(encoding="utf-8")
