"""The break-it exercises: does the learner's test distinguish a broken engine from the reference?

The test runs on copies of the reference with the module in question compiled and its source removed: one unchanged, the
    others with one bug each. Each run is a separate process, in a random order, that reports only whether the test
    passed.
"""

from __future__ import annotations

import py_compile
import random
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labs import bodies
from labs.exercises import LABS, Exercise

MUTATIONS = LABS / "break_it" / "mutations.toml"
RUNS = 3  # runs per engine: a test that passes at random is detected


@dataclass(frozen=True)
class Mutation:
    """A bug: in `file`, `find` becomes `put`."""

    file: str
    find: str
    put: str

    def apply(self, text: str) -> str:
        """Return the file's text with the bug in it."""
        if text.count(self.find) != 1:
            raise ValueError(f"the mutation's text is {text.count(self.find)} times in {self.file}, expected once")
        return text.replace(self.find, self.put)

    def write(self, folder: Path, broken: bool) -> None:
        """Compile the file of a copy of the repository, with or without the bug, and remove its source."""
        path = folder / self.file
        text = path.read_text(encoding="utf-8")
        path.write_text(self.apply(text) if broken else text, encoding="utf-8")
        py_compile.compile(str(path), cfile=str(path.with_suffix(".pyc")), dfile=path.name, doraise=True)
        path.unlink()


def load_mutations(graded: bool = True) -> dict[str, list[Mutation]]:
    """Read the bugs of the break-it exercises, by lab; a lab's bugs are all in one file.

    Args:
        graded: include the last bug of each lab, which only graders use.
    """
    entries = tomllib.loads(MUTATIONS.read_text(encoding="utf-8"))
    return {
        letter: [Mutation(lab["file"], *change) for change in zip(lab["find"], lab["put"], strict=True)][
            : None if graded else -1
        ]
        for letter, lab in entries.items()
    }


def learners_test(exercise: Exercise, work: Path) -> str:
    """Return the text of the exercise's file, with the body of the test from the learner."""
    given, theirs = exercise.reference.read_text(encoding="utf-8"), exercise.copy_in(work).read_text(encoding="utf-8")
    return bodies.transplant(given, theirs, exercise.name, exercise.path)


def why_not(mutations: list[Mutation], run: Callable[[Callable[[Path], None]], tuple[bool | None, str]]) -> str:
    """Return why a learner's test does not distinguish the broken engines from the reference, "" if it does.

    Args:
        mutations: the bugs, in one file. run: runs the test on an engine changed by the given function; returns whether
        it passed, None if it did not end, and the first error.
    """
    passed: dict[int, list[bool | None]] = {number: [] for number in range(len(mutations) + 1)}
    order = [number for number in passed for _ in range(RUNS)]
    random.SystemRandom().shuffle(order)  # a run's number does not reveal its engine
    for number in order:
        mutation = mutations[number - 1]
        found, error = run(lambda tree, m=mutation, broken=number > 0: m.write(tree, broken))
        passed[number].append(found)
        if number == 0 and found is None:
            return "your test does not end on the reference"
        if number == 0 and not found and True not in passed[0]:
            return f"your test fails on the reference, which is right: {error or 'no test ran'}"
        which = f"broken engine {number}" if len(mutations) > 1 else "the broken engine"
        if number and found is None:
            return f"your test does not end on {which}; let it give up after some steps"
        if number and found:
            return f"your test passes on {which} too: it does not see the bug"
        if number == 0 and not found:
            return f"your test passes on the reference in some of {RUNS} runs alone: {error or 'at times'}"
    return ""
