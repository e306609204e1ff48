"""Grade a learner's lab: a table for people, JSON for a grading service.

    python -m labs.grade d                      (make grade-d)
    python -m labs.grade d --only D.2           (make grade-d ONLY=D.2)
    python -m labs.grade d --tests hidden/      (make grade-d LAB_TESTS=hidden/)
    python -m labs.grade d --json results.json

The learner's code runs in another process (`judge.py`), with the copies in `labs/work/` first on Python's path. If it
takes that process down, the exercise that was being judged has failed, and judging goes on with the next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from labs.exercises import LABS, ROOT, WORK, Exercise, Lab, load_labs
from labs.judge import WORK_VARIABLE
from labs.starter import link_models

TIMEOUT = 1800.0  # seconds for all of a lab's tests
PUBLIC_TESTS = LABS / "tests"


@dataclass
class Mark:
    """What came of one exercise. `state`: passed, failed, not started, not judged (nothing here can run its tests)."""

    id: str
    title: str
    max_points: int
    state: str = ""
    reason: str = ""
    seconds: float = 0.0
    place: str = ""  # file and function

    @property
    def points(self) -> int:
        return self.max_points if self.state == "passed" else 0


@dataclass
class Report:
    """The marks of a lab. `whole` is what came of the whole stage with nothing exchanged; "" if it was not run."""

    lab: str
    title: str
    marks: list[Mark]
    whole: str = ""
    graded_at: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    @property
    def points(self) -> int:
        return sum(mark.points for mark in self.marks)

    @property
    def max_points(self) -> int:
        return sum(mark.max_points for mark in self.marks)

    def as_json(self) -> dict[str, object]:
        exercises = [asdict(mark) | {"points": mark.points} for mark in self.marks]
        return {
            "lab": self.lab, "title": self.title, "points": self.points, "max_points": self.max_points,
            "exercises": exercises, "whole_stage": self.whole, "graded_at": self.graded_at,
            "python": sys.version.split()[0], "torch": torch.__version__,
        }  # fmt: skip

    def __str__(self) -> str:
        width = max(len(mark.title) for mark in self.marks)
        lines = [f"Lab {self.lab.upper()}: {self.title}", ""]
        for mark in self.marks:
            points = f"{mark.points}/{mark.max_points}"
            lines.append(f"  {mark.id:4} {mark.title:{width}}  {points:>6}  {mark.state}")
            if mark.state == "not started":
                lines.append(f"       -> write {mark.place}")
            elif mark.reason and mark.state != "passed":
                lines.append(f"       -> {mark.reason}")
        lines += ["", f"  {'':4} {'total':{width}}  {f'{self.points}/{self.max_points}':>6}"]
        if self.whole:
            lines.append(f"  the whole stage, all of it yours, on the tutor: {self.whole}")
        return "\n".join(lines)


def grade(lab: Lab, work: Path = WORK, only: list[str] | None = None, extra_tests: Path | None = None) -> Report:
    """Judge the exercises of a lab.

    Args:
        work: where the learner's copies are.
        only: ids of exercises; None is all.
        extra_tests: a directory with more tests, files and classes named like the public ones; both must pass.
    """
    chosen = [exercise for exercise in lab.exercises if only is None or exercise.id in only]
    report = Report(lab.letter, lab.title, [_mark(exercise) for exercise in chosen])
    marks = {mark.id: mark for mark in report.marks}
    directories = [PUBLIC_TESTS] + ([extra_tests] if extra_tests else [])
    pending = list(marks)
    while pending:
        lines, ended = _judge(pending, directories, work)
        _enter(lines, marks)
        running = _unfinished(lines)
        if running is not None:
            marks[running].state, marks[running].reason = "failed", ended
        done = {line["exercise"] for line in lines if line["event"] == "end"} | {running}
        remaining = [i for i in pending if i not in done]
        if remaining == pending or running is None:  # no test of these could be run
            broken = next((line["reason"] for line in lines if line["event"] == "broken"), "no test judges it here")
            for i in remaining:
                marks[i].state, marks[i].reason = "failed", broken
            break
        # What was not reached before the crash is judged now.
        pending = remaining
    if only is None and all(mark.state == "passed" for mark in report.marks):
        lines, ended = _judge([lab.letter], [PUBLIC_TESTS], work)
        results = [line for line in lines if line["event"] == "end"]
        failed = [line["reason"] for line in results if line["state"] != "passed"]
        report.whole = failed[0] if failed else "right" if results else ended
    return report


def _mark(exercise: Exercise) -> Mark:
    place = f"{exercise.name} in {exercise.copy_in(Path('labs/work'))}"
    return Mark(exercise.id, exercise.title, exercise.points, place=place)


def _judge(selected: list[str], directories: list[Path], work: Path) -> tuple[list[dict], str]:
    """Run the judge; returns what it wrote, and how it ended."""
    path = os.pathsep.join([str(work.resolve()), str(ROOT)])
    environment = os.environ | {
        "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1",
        WORK_VARIABLE: str(work.resolve()),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="six-engines-grade-") as folder:
        results = Path(folder) / "results.jsonl"
        results.touch()
        command = [sys.executable, "-m", "labs.judge", str(results), *map(str, directories), "--", *selected]
        try:
            run = subprocess.run(
                command, env=environment, cwd=folder, timeout=TIMEOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True,
            )  # fmt: skip
            last = (run.stdout.strip().splitlines() or [""])[-1]
            ended = f"it took the process down (signal {-run.returncode})" if run.returncode < 0 else last
        except subprocess.TimeoutExpired:
            ended = f"the tests did not end within {TIMEOUT:.0f} s"
        return [json.loads(line) for line in results.read_text().splitlines()], ended


def _enter(lines: list[dict], marks: dict[str, Mark]) -> None:
    """An exercise has passed if all of its tests have; else its state is that of the first that has not."""
    for line in lines:
        if line["event"] != "end":
            continue
        mark = marks[line["exercise"]]
        mark.seconds = round(mark.seconds + line["seconds"], 3)
        state = "not judged" if line["state"] == "skipped" else line["state"]
        if not mark.state or (mark.state == "passed" and state != "passed"):
            mark.state, mark.reason = state, line["reason"]


def _unfinished(lines: list[dict]) -> str | None:
    """The exercise whose test began and never ended."""
    if lines and lines[-1]["event"] == "start":
        return lines[-1]["exercise"]
    return None


def _chosen(lab: Lab, only: str | None) -> list[str] | None:
    if not only:
        return None
    ids = [i.strip().upper() for i in only.split(",")]
    known = [exercise.id for exercise in lab.exercises]
    unknown = [i for i in ids if i not in known]
    if unknown:
        raise ValueError(f"lab {lab.letter} has no exercise {', '.join(unknown)}; it has {', '.join(known)}")
    return ids


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m labs.grade", description=__doc__.splitlines()[0])
    parser.add_argument("lab", choices=list(load_labs()))
    parser.add_argument("--only", help="an exercise, or several with commas: D.2 or D.2,D.3")
    parser.add_argument("--tests", type=Path, help="a directory with more tests (test_lab_d.py …); both must pass")
    parser.add_argument("--work", type=Path, default=WORK, help="where the learner's copies are")
    parser.add_argument("--json", type=Path, help="where to write the marks (default: grade-d.json beside the copies)")
    args = parser.parse_args(argv)
    lab = load_labs()[args.lab]
    try:
        only = _chosen(lab, args.only)
        if not (args.work / lab.package).is_dir():
            raise ValueError(f"{args.work / lab.package} is not there; `make lab-{lab.letter}` writes the starter")
        if args.tests is not None and not (args.tests / f"test_lab_{lab.letter}.py").is_file():
            raise ValueError(f"{args.tests} has no test_lab_{lab.letter}.py")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    link_models(args.work)
    report = grade(lab, args.work, only, args.tests and args.tests.resolve())
    print(report)
    target = args.json or args.work / f"grade-{lab.letter}.json"
    target.write_text(json.dumps(report.as_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
