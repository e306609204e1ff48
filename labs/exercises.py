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
STAGES = (
    "stage_a_naive",
    "stage_b_decode_step",
    "stage_c_fused_mlp",
    "stage_d_paged",
    "stage_e_batching",
    "stage_f_graph_tp",
    "beyond",
)
WHOLE = ("TestWholeStage",)  # runs the learner's whole stage as it is
VARIED = "abcdefl"  # labs whose exercise 0 is a variant of the stage's program


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
        tests: the classes of the lab's driver that judge it.
        needs: other exercises of the lab whose functions these classes run.
        slow: replacements of the function's text in the starter, if the learner gets a slow body instead of none.
        prefix: the folder within the learner's folder that has the lab's copies; "" is that folder itself.
    """

    id: str
    title: str
    path: str
    name: str
    points: int
    minutes: int
    hints: tuple[str, ...]
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()
    slow: tuple[tuple[str, str], ...] = ()
    prefix: str = ""

    @property
    def lab(self) -> str:
        return self.id[0].lower()

    @property
    def message(self) -> str:
        """Return the error message of a missing body."""
        return f"Lab {self.id}: {self.title}"

    def starter_text(self, text: str) -> str:
        """Return the file's text for the learner: without the function's body, or with a slow one."""
        if not self.slow:
            return bodies.stub(text, self.name, self.path, self.message)
        span = bodies.find(text, self.name, self.path)
        body = text[span.body_start : span.body_end]
        for find, put in self.slow:
            if body.count(find) != 1:
                raise ValueError(f"{self.id}: {find!r} is {body.count(find)} times in {self.name}, expected once")
            body = body.replace(find, put)
        return text[: span.body_start] + body + text[span.body_end :]

    def is_stub(self, body: str) -> bool:
        """Return whether a body is still the one that `make lab-x` wrote."""
        if not self.slow:
            return body.strip() == bodies.stub_statement(self.path, self.message)
        given = self.starter_text(self.reference.read_text(encoding="utf-8"))
        span = bodies.find(given, self.name, self.path)
        return body == given[span.body_start : span.body_end]

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py")

    @property
    def is_break_it(self) -> bool:
        """Return whether the learner writes a test here, and not a part of an engine."""
        return self.path.startswith("labs/break_it/")

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")

    @property
    def reference(self) -> Path:
        return ROOT / self.path

    def copy_in(self, work: Path) -> Path:
        """Return the path of the learner's file."""
        return work / self.prefix / self.path.removeprefix("labs/")


@dataclass(frozen=True)
class Lab:
    """The exercises of one stage.

    Attributes:
        letter: "a" … "g", "p".
        package: the stage.
        folders: what the learner gets a copy of, relative to the repository.
        prefix: as of its exercises.
    """

    letter: str
    title: str
    package: str
    folders: tuple[str, ...]
    exercises: tuple[Exercise, ...]
    prefix: str = ""

    def copy_of(self, path: str, work: Path) -> Path:
        """Return the path of the learner's copy of a file or folder of the repository."""
        return work / self.prefix / path.removeprefix("labs/")

    @property
    def root(self) -> Path:
        return ROOT

    @property
    def points(self) -> int:
        return sum(exercise.points for exercise in self.exercises)


@cache
def load_labs() -> dict[str, Lab]:
    """Read all labs, by letter."""
    labs = {}
    for letter, entry in tomllib.loads((LABS / "exercises.toml").read_text(encoding="utf-8")).items():
        exercises = []
        for number, item in enumerate(entry.pop("exercises"), 0 if letter in VARIED else 1):
            path, name = item.pop("at").split("::")
            item = {"prefix": entry.get("prefix", "")} | item
            item |= {key: tuple(item.get(key, ())) for key in ("hints", "tests", "needs")}
            item["slow"] = tuple(map(tuple, item.get("slow", ())))
            exercises.append(Exercise(id=f"{letter.upper()}.{number}", path=path, name=name, **item))
        folders = tuple(entry.pop("folders"))
        labs[letter] = Lab(letter=letter, folders=folders, exercises=tuple(exercises), **entry)
    return labs


def all_exercises() -> list[Exercise]:
    return [exercise for lab in load_labs().values() for exercise in lab.exercises]


def exercise_of(identity: str) -> Exercise:
    """Return the exercise with this id, in upper or lower case."""
    return next(exercise for exercise in all_exercises() if exercise.id == identity.upper())
