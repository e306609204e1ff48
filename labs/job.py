"""What the grader hands to the judge: which tests, of whose submission."""

from __future__ import annotations

from dataclasses import dataclass

from labs.exercises import Exercise, Lab, load_labs

WORK_VARIABLE = "SIX_ENGINES_LAB_WORK"  # the environment variable that says where the learner's copies are
TEST_SECONDS = 120.0  # a test may take, and the collection of the tests


@dataclass(frozen=True)
class Job:
    """What is judged in one process.

    Attributes:
        key: an exercise's id; or a lab's letter for the whole stage, with all of its functions the learner's.
        work: the submission.
        tests: directories with `test_lab_x.py`; all must pass.
        seconds: that a test may take.
        audited: refuse what `audit.py` forbids.
        walls: what it is kept apart by (`sandbox.walls`).
    """

    key: str
    work: str
    tests: tuple[str, ...]
    seconds: float = TEST_SECONDS
    audited: bool = True
    walls: tuple[str, ...] = ()

    @property
    def lab(self) -> Lab:
        return load_labs()[self.key[0].lower()]

    @property
    def exercises(self) -> list[Exercise]:
        """Whose functions are exchanged."""
        return [e for e in self.lab.exercises if self.key in (e.id, self.lab.letter) and not e.is_break_it]

    @property
    def classes(self) -> tuple[str, ...]:
        """The test classes that judge it, as `file::Class`."""
        if self.key == self.lab.letter:
            return (self.lab.whole,)
        return next(e.tests for e in self.lab.exercises if e.id == self.key)
