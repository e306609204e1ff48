"""The marks of a lab, and their formats for people and for grading services."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path

from labs.exercises import LABS, ROOT, Exercise
from labs.judge import HUNG
from stage_a_naive.entrypoints.language import columns, counted, padded, tr

WHOLE_POINTS = 10  # points lost if the whole stage is wrong although each exercise passes
HUNG_POINTS = 50  # the most points of a lab whose whole stage never ends


@dataclass
class Mark:
    """The result of one exercise. `state`: passed, failed, not started, not judged (nothing here can run its tests)."""

    id: str
    title: str
    max_points: int
    state: str = ""
    reason: str = ""
    seconds: float = 0.0
    task: str = ""  # what to write, and where
    num_tests: int = 0
    num_passed: int = 0
    partial: bool = False  # points in proportion to the tests that pass

    @property
    def points(self) -> float:
        if self.state == "passed":
            return self.max_points
        return round(self.max_points * self.num_passed / self.num_tests, 1) if self.partial and self.num_tests else 0


@dataclass
class Report:
    """The marks of a lab.

    Attributes:
        whole: the result of the whole stage with all of the learner's functions; "" if it was not run.
        notes: parts of the submission that do not count: changes in given code, files that are never run.
        tests: a hash of the drivers that judged.
        seed: of their inputs; the same seed gives the same inputs.
        walls: how the answers were isolated from the grader, in words; "" if no isolation was requested.
        commit: of the repository that judged, "" outside of one; `python` and `torch` are the versions.
    """

    lab: str
    title: str
    marks: list[Mark]
    whole: str = ""
    notes: list[str] = field(default_factory=list)
    tests: str = ""
    seed: int = 0
    walls: str = ""
    graded_at: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    commit: str = field(default_factory=lambda: commit())
    python: str = sys.version.split()[0]
    torch: str = version("torch")

    @property
    def points(self) -> float:
        """Return the exercises' points, minus the points lost if the whole stage is wrong."""
        earned = sum(mark.points for mark in self.marks)
        if self.whole not in ("", "right"):
            earned = min(earned - WHOLE_POINTS, HUNG_POINTS if self.whole.startswith(HUNG) else earned)
        return round(max(earned, 0), 1)

    @property
    def max_points(self) -> int:
        return sum(mark.max_points for mark in self.marks)

    def as_json(self) -> dict[str, object]:
        """Return all attributes by name."""
        found = asdict(self) | {"points": self.points, "max_points": self.max_points}
        found["exercises"] = [asdict(mark) | {"points": mark.points} for mark in self.marks]
        found["whole_stage"] = found.pop("whole")
        del found["marks"]
        return found

    @classmethod
    def from_json(cls, found: dict) -> Report:
        """Return the report that `as_json` was called on."""
        marks = [Mark(**{key: value for key, value in mark.items() if key != "points"}) for mark in found["exercises"]]
        kept = {attribute.name: found[attribute.name] for attribute in fields(cls) if attribute.name in found}
        return cls(**kept, marks=marks, whole=found["whole_stage"])

    def as_gradescope(self) -> dict[str, object]:
        """Return what Gradescope's autograder expects in `/autograder/results/results.json`."""
        tests = [
            {
                "number": mark.id,
                "name": f"{mark.id} {mark.title}",
                "score": mark.points,
                "max_score": mark.max_points,
                "status": "passed" if mark.state == "passed" else "failed",
                "output": mark.reason or mark.state,
                "visibility": "visible",
            }
            for mark in self.marks
        ]
        notes = [f"whole stage: {self.whole}"] if self.whole else []
        return {
            "score": self.points,
            "output": "\n".join(notes + self.notes),
            "output_format": "text",
            "execution_time": round(sum(mark.seconds for mark in self.marks)),
            "tests": tests,
            "extra_data": {"commit": self.commit, "tests": self.tests, "seed": self.seed, "walls": self.walls},
        }

    def as_otter(self) -> dict[str, object]:
        """Return otter-grader's format: one entry per question with score, possible points and visibility."""
        questions = {
            mark.id: {
                "name": mark.id,
                "path": mark.task,
                "score": mark.points,
                "possible": mark.max_points,
                "incorrect": mark.state != "passed",
                "test_cases": [
                    {
                        "name": mark.title,
                        "message": mark.reason,
                        "passed": mark.state == "passed",
                        "hidden": False,
                    }
                ],
            }
            for mark in self.marks
        }
        return {
            "assignment": f"lab-{self.lab}",
            "total": self.points,
            "possible": self.max_points,
            "results": questions,
            "commit": self.commit,
            "tests_hash": self.tests,
            "output": "\n".join(self.notes),
        }

    def __str__(self) -> str:
        width = max(columns(tr(mark.title)) for mark in self.marks)
        lines = [tr("Lab {letter}: {title}").format(letter=self.lab.upper(), title=tr(self.title)), ""]
        for mark in self.marks:
            points = f"{mark.points}/{mark.max_points}"
            lines.append(
                f"  {mark.id:4} {padded(tr(mark.title), width)}  {points:>6}  {tr(mark.state) if mark.state else ''}"
            )
            if mark.state == "not started":
                lines.append(f"       -> {mark.task}")
            elif mark.reason and mark.state != "passed":
                lines.append(f"       -> {mark.reason}")
        lines += ["", f"  {'':4} {padded(tr('total'), width)}  {f'{self.points}/{self.max_points}':>6}"]
        if self.whole:
            lost = round(sum(mark.points for mark in self.marks) - self.points, 1)
            costs = counted(" (it costs {lost:g} point)", " (it costs {lost:g} points)", math.ceil(lost))
            whole = tr("right") if self.whole == "right" else self.whole + costs.format(lost=lost)
            lines.append("  " + tr("the whole stage, all of it yours, on the tutor: {verdict}").format(verdict=whole))
        lines += ["  " + tr("note: {note}").format(note=note) for note in self.notes]
        lines += (
            [f"  commit {self.commit or 'unknown'}, tests {self.tests}, seed {self.seed}; answers ran {self.walls}"]
            if self.walls
            else []
        )
        return "\n".join(lines)


def mark_for(exercise: Exercise) -> Mark:
    """Return a mark without a verdict."""
    task = tr("write {name} in {file}").format(name=exercise.name, file=exercise.copy_in(Path("labs/work")))
    if exercise.slow:
        task = tr("find and repair in labs/work/slow what makes it slow")
    return Mark(exercise.id, exercise.title, exercise.points, task=task)


def hash_of_tests(letter: str) -> str:
    """Return a hash of the drivers that judge a lab, to check whether two marks are comparable."""
    digest = hashlib.sha256()
    for file in (LABS / "tests" / f"test_lab_{letter}.py", LABS / "exercises.toml"):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """Return the repository's commit, or "" outside of one."""
    run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout.strip()


FORMS = {"plain": Report.as_json, "gradescope": Report.as_gradescope, "otter": Report.as_otter}


def write_json(report: Report, target: Path, form: str = "plain") -> None:
    """Write a report in one of `FORMS`."""
    target.write_text(json.dumps(FORMS[form](report), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
