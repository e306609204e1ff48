"""The list of exercises, read from `exercises.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labs import bodies

ROOT = Path(__file__).resolve().parent.parent
LABS = ROOT / "labs"
WORK = LABS / "work"


@dataclass(frozen=True)
class Exercise:
    """A function that the learner writes.

    Attributes:
        id: such as "D.2".
        path: the file, relative to the repository.
        name: the function in it: `function`, or `Class.method`.
        points: what it is worth.
        minutes: how long it takes a student who knows PyTorch, about.
        hints: where to look when stuck, each saying more than the one before.
        tests: the test classes that judge it, as `file::Class`.
    """

    id: str
    title: str
    path: str
    name: str
    points: int
    minutes: int
    hints: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def lab(self) -> str:
        return self.id[0].lower()

    @property
    def message(self) -> str:
        """What the missing body says when it is called."""
        return f"Lab {self.id}: {self.title}"

    @property
    def stage(self) -> str:
        """The letter of the stage that it belongs to."""
        return self.lab

    def is_stub(self, body: str) -> bool:
        """Whether a body is still the one that `make lab-x` wrote."""
        return body.strip() == bodies.stub_statement(self.path, self.message)

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py")

    @property
    def is_break_it(self) -> bool:
        """Whether the learner writes a test here, and not a part of an engine."""
        return self.path.startswith("labs/")

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")

    @property
    def reference(self) -> Path:
        return ROOT / self.path

    def copy_in(self, work: Path) -> Path:
        """The learner's file."""
        return work / self.path.removeprefix("labs/")


@dataclass(frozen=True)
class Lab:
    """The exercises of one stage.

    Attributes:
        letter: "a" … "f".
        package: the stage.
        folders: what the learner gets a copy of, relative to the repository.
        whole: the test class that runs the learner's whole stage with nothing exchanged.
    """

    letter: str
    title: str
    package: str
    folders: tuple[str, ...]
    whole: str
    exercises: tuple[Exercise, ...]

    @property
    def root(self) -> Path:
        return ROOT

    @property
    def points(self) -> int:
        return sum(exercise.points for exercise in self.exercises)


@cache
def load_labs() -> dict[str, Lab]:
    """All labs by letter."""
    labs = {}
    for letter, entry in tomllib.loads((LABS / "exercises.toml").read_text(encoding="utf-8")).items():
        exercises = []
        for number, item in enumerate(entry.pop("exercises"), 1):
            path, name = item.pop("at").split("::")
            tests = tuple(f"test_lab_{letter}.py::{test}" for test in item.pop("tests"))
            hints = tuple(item.pop("hints"))
            identity = f"{letter.upper()}.{number}"
            exercises.append(Exercise(id=identity, path=path, name=name, hints=hints, tests=tests, **item))
        folders = tuple(entry.pop("folders"))
        whole = f"test_lab_{letter}.py::TestWholeStage"
        labs[letter] = Lab(letter=letter, folders=folders, whole=whole, exercises=tuple(exercises), **entry)
    return labs


def all_exercises() -> list[Exercise]:
    return [exercise for lab in load_labs().values() for exercise in lab.exercises]
