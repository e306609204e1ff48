"""Grade a learner's lab: a table for people, JSON for a grading service.

    python -m labs.grade d                      (make grade-d)
    python -m labs.grade d --only D.2           (make grade-d ONLY=D.2)
    python -m labs.grade d --only D.2 --show    (make grade-d ONLY=D.2 SHOW=1): prints, tracebacks, breakpoint()
    python -m labs.grade d --seed 7             (make grade-d SEED=7): other inputs
    python -m labs.grade d --json results.json --form gradescope --sandbox

Only the functions of the exercises are taken from the learner's copy (`submission.py`), each into a separate folder and
process (`tree.py`, `judge.py`). The lab's driver runs there and sends the values that it finds. It also runs on the
reference. This process, which runs nothing of a submission, compares the two (`values.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType

from labs import mutants, no_triton, progress, sandbox, tree, values
from labs.exercises import LABS, ROOT, WHOLE, WORK, Exercise, Lab, load_labs
from labs.judge import HUNG, Job
from labs.report import FORMS, Mark, Report, hash_of_tests, mark_for, write_json
from labs.submission import Answer, Unusable, changes_in_given_code, intruders, read_answer
from stage_a_naive.entrypoints.interrupts import run_command

RECORDED = LABS / "values"  # values of the reference, for an edition without it
SECONDS = 120.0  # seconds in which a driver must send something
SILENCE = 300.0  # seconds that the judge may need for its imports, and beyond a driver's time
# `-I`: no variable of the caller's, no folder of the user's, no current folder on Python's path.
START = "import sys; sys.path.insert(0, {root!r}); from labs import judge; {call}"


class JudgeError(RuntimeError):
    """The judge could not start, or ended without an answer being the cause."""


@dataclass(frozen=True)
class Outcome:
    """The result of a job: the lines that it sent, how it ended, and where the learner's lines are in its folder."""

    lines: list[str]
    ended: str
    places: list[tree.Place]


class Judge:
    """The process of `judge.py`, started when needed, and started again after an answer has ended it.

    Args:
        walls: the means that isolate each answer (`sandbox.walls`).
        seed: of the drivers' inputs.
        recorded: what drivers sent on the reference with this seed, by class; more is added.
        seconds: in which a driver must send something.

    Attributes:
        deadline: on the monotonic clock; after it, no job is started.
    """

    def __init__(
        self,
        seed: int = 0,
        walls: tuple[str, ...] = (),
        recorded: dict[str, list[str]] | None = None,
        seconds: float = SECONDS,
    ) -> None:
        self.seed, self.walls, self.seconds = seed, walls, seconds
        self.recorded: dict[str, list[str]] = {} if recorded is None else recorded
        self.deadline = math.inf
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (without a name: an answer that deletes files finds none)

    def __enter__(self) -> Judge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._log.close()

    def _stop(self) -> str:
        """End the process; return how it ended."""
        if self._process is None:
            return ""
        process, self._process = self._process, None
        with process, contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        code = process.returncode
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"

    @contextlib.contextmanager
    def job(
        self,
        lab: Lab,
        classes: tuple[str, ...],
        answers: list[Answer],
        change: Callable[[Path], None] | None = None,
        work: Path | None = None,
    ) -> Iterator[tuple[Job, list[tree.Place]]]:
        """Provide a folder in which these answers run, while the block runs.

        Args:
            change: changes the folder's copy of the repository.
            work: a folder that namespaces hide in addition to the reference.
        """
        folder = Path(tempfile.mkdtemp(prefix="six-engines-job-"))
        try:
            (folder / "scratch").mkdir()
            places = tree.write(lab, folder / "tree", answers)
            if change is not None:
                change(folder / "tree")
            walls, hidden = (self.walls, unseen(work)) if answers or change else ((), ())
            yield Job(str(folder), lab.letter, classes, self.seed, self.seconds, walls, hidden), places
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def run(self, lab: Lab, classes: tuple[str, ...], answers: list[Answer], **options: object) -> Outcome:
        """Run a lab's driver on answers, or without answers on the reference. Takes the arguments of `job`.

        Raises:
            JudgeError: the judge ended before its first job or in a job of the reference, or no time is left.
        """
        if time.monotonic() > self.deadline:
            raise JudgeError("there was no time left")
        with self.job(lab, classes, answers, **options) as (job, places):
            is_new = self._process is None
            process = self._process = self._process or subprocess.Popen(
                _isolated("judge.main()"),
                env=_environment(),
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
            with contextlib.suppress(BrokenPipeError):  # it has ended: what it said is read all the same
                process.stdin.write(f"{json.dumps(asdict(job))}\n".encode())
                process.stdin.flush()
            lines: list[str] = []
            try:
                for text in _lines_of(process, job.seconds + SILENCE):
                    line = json.loads(text)
                    if "ended" in line:
                        return Outcome(lines, str(line["ended"]), places)
                    lines.append(str(line["line"]))
            except (ValueError, TypeError, KeyError, RecursionError):  # of root's, who can write to it
                process.kill()
            end = self._stop()
            if not lines and (is_new or not answers):
                self._log.seek(0)
                said = self._log.read().decode(errors="replace").strip()[-2000:]
                raise JudgeError(f"the judge itself failed ({end}): {said}")
            return Outcome(lines, f"not allowed: it took the judge down ({end})", places)

    def expected(self, lab: Lab, classes: tuple[str, ...]) -> list[values.Test]:
        """Return what the driver sends on the reference."""
        if any(f"{lab.letter}.{name}" not in self.recorded for name in classes):
            if any(tree.is_left_out(exercise) for exercise in lab.exercises):
                raise JudgeError(
                    f"the values of lab {lab.letter} are not in {RECORDED}, and there is no reference here"
                )
            for name in classes:
                outcome = self.run(lab, (name,), [])
                tests = values.read(outcome.lines)
                error = next((f"{test.name}: {test.error}" for test in tests if test.error), "")
                if error or not tests or not tests[-1].ended:
                    raise JudgeError(f"lab {lab.letter}, {name}, the reference itself: {error or outcome.ended}")
                self.recorded[f"{lab.letter}.{name}"] = outcome.lines
        return [test for name in classes for test in values.read(self.recorded[f"{lab.letter}.{name}"])]

    def report(self, lab: Lab, work: Path, only: list[str] | None = None) -> Report:
        """Judge the exercises of a lab.

        Args:
            work: where the learner's copies are.
            only: ids of exercises; None is all, and the whole stage.

        Raises:
            JudgeError: there is no copy, or the judge ended without an answer being the cause.
        """
        copy = lab.copy_of(lab.package.replace(".", "/"), work)
        if not copy.is_dir():
            raise JudgeError(f"{copy} is not there; `make lab-{lab.letter}` writes the starter")
        chosen = [exercise for exercise in lab.exercises if only is None or exercise.id in only]
        report = Report(lab.letter, lab.title, [mark_for(exercise) for exercise in chosen])
        report.walls = sandbox.described(self.walls) if self.walls else ""
        report.tests, report.seed = hash_of_tests(lab.letter), self.seed
        report.notes = intruders(work) + changes_in_given_code(lab, work)
        judged = list(zip(chosen, report.marks, strict=True))
        for exercise, mark in judged:
            mark.state, mark.reason = _before_judging(exercise, work)
            if not mark.state:
                self.enter(mark, lab, [exercise], work)
        if only is None and all(m.state == "passed" or e.is_break_it and m.state == "not judged" for e, m in judged):
            whole = Mark(lab.letter, "", 0)
            self.enter(whole, lab, list(lab.exercises), work)
            report.whole = "right" if whole.state == "passed" else whole.reason
        return report

    def enter(self, mark: Mark, lab: Lab, exercises: list[Exercise], work: Path) -> None:
        """Fill in a mark: passed if every value equals the reference's; otherwise the first difference is the reason.

        Args:
            exercises: one, or all of the lab for its whole stage.
        """
        classes = WHOLE if len(exercises) > 1 else exercises[0].tests
        try:
            if exercises[0].is_break_it and len(exercises) == 1:
                self._enter_test(mark, lab, exercises[0], work)
                return
            judged = [exercise for exercise in exercises if not exercise.is_break_it]
            answers = tree.answers_for(lab, judged, work)
        except Unusable as error:
            mark.state, mark.reason = "failed", str(error)
            return
        expected = self.expected(lab, classes)
        skipped = next((test.skip for test in expected if test.skip), "")
        if skipped:
            mark.state, mark.reason = "not judged", skipped
            return
        outcome = self.run(lab, classes, answers, work=work)
        found = values.read(outcome.lines)
        mark.num_tests, reasons = len(expected), []
        for number, test in enumerate(expected):
            reasons.append(_reason(test, found[number] if number < len(found) else None, outcome, found))
        if len(found) > len(expected):
            reasons.append("it sent more than the driver asks for")
        mark.num_passed, mark.seconds = reasons.count(""), round(sum(test.seconds for test in found), 3)
        mark.reason = values.shortened(next(filter(None, reasons), ""), values.LIMIT)
        mark.state = "failed" if mark.reason else "passed"

    def _enter_test(self, mark: Mark, lab: Lab, exercise: Exercise, work: Path) -> None:
        text, others = mutants.learners_test(exercise, work), tree.others(lab, [exercise], work)

        def run(change: Callable[[Path], None]) -> tuple[bool | None, str]:
            def with_test(folder: Path) -> None:
                change(folder)
                (folder / "test_break.py").write_text(text, encoding="utf-8")

            outcome = self.run(lab, (), others, change=with_test, work=work)
            try:
                line = json.loads(outcome.lines[0])
                return bool(line["passed"]), values.shortened(str(line["error"]))
            except (LookupError, ValueError, TypeError):
                return (None if outcome.ended.startswith(HUNG) else False), outcome.ended

        mark.num_tests = 1
        mark.reason = mutants.why_not(mutants.load_mutations(graded=self.seed != 0)[lab.letter], run)
        mark.state, mark.num_passed = ("failed", 0) if mark.reason else ("passed", 1)


def _reason(expected: values.Test, got: values.Test | None, outcome: Outcome, found: list[values.Test]) -> str:
    """Return why a test has failed, with the learner's line where it showed."""
    if found and not found[-1].name:
        return values.NO_DRIVER
    if got is None or got.name != expected.name or (not got.ended and not got.error):
        last = f" in {found[-1].name}" if found else ""
        return (outcome.ended or "it ended the process") + last
    reason = values.failure(expected, got)
    if reason and reason == got.error:
        for file, line in got.frames:
            for place in outcome.places:
                if place.file == file and place.first <= line <= place.last:
                    return f"{values.shortened(reason, values.LIMIT)} ({place.shown}:{line + place.shift})"
    return reason


def _lines_of(process: subprocess.Popen[bytes], patience: float) -> Iterator[bytes]:
    """Yield a process's lines until it ends; kill it if it is silent for `patience` seconds."""
    rest = b""
    while select.select([process.stdout], [], [], patience)[0]:
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    process.kill()


def unseen(work: Path | None) -> tuple[str, ...]:
    """Return the folders that an answer must not see: the reference's and the submission's.

    The tutor, compiled files and Python itself stay visible.
    """
    needed = [Path(sys.prefix).resolve(), ROOT / "models", Path(_environment()["SIX_ENGINES_BUILD"])]
    found = [folder for folder in ROOT.iterdir() if folder.is_dir()]
    found = [folder for folder in found if not any(path.is_relative_to(folder) for path in needed)]
    return tuple(map(str, found + ([work.resolve()] if work and not work.is_relative_to(ROOT) else [])))


def grade(lab: Lab, work: Path = WORK, only: list[str] | None = None, **options: object) -> Report:
    """Judge the exercises of a lab as `Judge.report` does, with a judge that has these options."""
    with Judge(**options) as judge:
        return judge.report(lab, work, only)


@cache
def values_of(lab: Lab, seed: int) -> dict[str, list[str]]:
    """Return what the lab's drivers send on the reference, by class."""
    with Judge(seed) as judge:
        for exercise in lab.exercises:
            if not exercise.is_break_it and not (no_triton.needs(exercise) and no_triton.is_missing()):
                judge.expected(lab, exercise.tests)
        judge.expected(lab, WHOLE)
        return judge.recorded


def _before_judging(exercise: Exercise, work: Path) -> tuple[str, str]:
    """Return state and reason of an exercise that can be judged without running it."""
    try:
        if read_answer(exercise, work) is None:
            return "not started", exercise.message
    except Unusable as error:
        return "failed", str(error)
    if exercise.is_break_it and not mutants.MUTATIONS.exists():
        return "not judged", "this edition has no broken engine: hand your test in"
    if no_triton.needs(exercise) and no_triton.is_missing():
        return "not judged", "there is no Triton here: Linux has one (WSL2, Colab, the devcontainer)"
    return "", ""


def _isolated(call: str) -> list[str]:
    return [sys.executable, "-I", "-c", START.format(root=str(ROOT), call=call)]


def _environment() -> dict[str, str]:
    return (
        {"SIX_ENGINES_BUILD": str(ROOT / "build" / "extensions")}
        | os.environ
        | {
            "TRITON_INTERPRET": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "SIX_ENGINES_GRADING": "1",  # a student edition puts the learner's copies first, but not here
        }
    )


def show(exercise: Exercise, lab: Lab, work: Path, seed: int = 0) -> None:
    """Run the driver of one exercise in the foreground, with prints, whole tracebacks and `breakpoint()`."""
    with Judge(seed) as judge, judge.job(lab, exercise.tests, tree.answers_for(lab, [exercise], work)) as (job, _):
        call = f"judge.show({json.dumps(asdict(replace(job, walls=())))!r})"
        subprocess.run(_isolated(call), env=_environment(), check=False)


def _chosen(lab: Lab, only: str | None) -> list[str] | None:
    if not only:
        return None
    ids = [i.strip().upper() for i in only.split(",")]
    known = [exercise.id for exercise in lab.exercises]
    unknown = [i for i in ids if i not in known]
    if unknown:
        raise ValueError(f"lab {lab.letter} has no exercise {', '.join(unknown)}; it has {', '.join(known)}")
    return ids


def _recorded(lab: Lab, seed: int) -> dict[str, list[str]] | None:
    """Read the reference's recorded values for seed 0, if an edition has them."""
    file = RECORDED / f"{lab.letter}.json"
    return json.loads(file.read_text(encoding="utf-8")) if seed == 0 and file.is_file() else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m labs.grade", description=__doc__.splitlines()[0])
    parser.add_argument("lab", choices=list(load_labs()), help="its letter")
    parser.add_argument("--only", help="an exercise, or several with commas: D.2 or D.2,D.3")
    parser.add_argument("--show", action="store_true", help="with --only and one exercise: prints, tracebacks, pdb")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs: another one gives other cases")
    parser.add_argument(
        "--values", action="store_true", help="read what the reference gives, of `labs.batch`, on stdin"
    )
    parser.add_argument("--work", type=Path, default=WORK, help="where the learner's copies are")
    parser.add_argument(
        "--json",
        type=Path,
        help="where to write the marks (default: grade-d.json beside the copies, and nothing with --only)",
    )
    parser.add_argument("--form", choices=list(FORMS), default="plain", help="of the JSON")
    parser.add_argument("--partial", action="store_true", help="points in proportion to the tests that pass")
    parser.add_argument(
        "--sandbox", action="store_true", help="each answer behind what this machine has: namespaces, another user"
    )
    args = parser.parse_args(argv)
    lab = load_labs()[args.lab]
    try:
        only = _chosen(lab, args.only)
        if args.show and (only is None or len(only) != 1):
            raise ValueError(f"SHOW=1 shows one exercise: ONLY={lab.exercises[0].id}")
        why_not = sandbox.why_not() if args.sandbox else ""
        if why_not:
            raise ValueError(f"--sandbox cannot be had here ({why_not}); grade without it, in a container of your own")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.show:
        [exercise] = [exercise for exercise in lab.exercises if exercise.id in only]
        state, reason = _before_judging(exercise, args.work)
        if state:
            print(f"{exercise.id} {state}: {mark_for(exercise).task if state == 'not started' else reason}")
            return 1
        if not exercise.is_break_it:
            show(exercise, lab, args.work, args.seed)
    try:
        walls = sandbox.walls() if args.sandbox else ()
        recorded = json.load(sys.stdin) if args.values else _recorded(lab, args.seed)
        report = grade(lab, args.work, only, seed=args.seed, walls=walls, recorded=recorded)
    except JudgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.show:
        [mark] = report.marks
        print(f"{mark.id} {mark.state}{f': {mark.reason}' if mark.reason else ''}")
        return int(mark.state != "passed")
    for mark in report.marks:
        mark.partial = args.partial
    print(report)
    if not args.json:  # if the marks go elsewhere, this folder may be read-only
        progress.remember(report, args.work)
    if args.json or only is None:
        write_json(report, args.json or args.work / f"grade-{lab.letter}.json", args.form)
    return 0


if __name__ == "__main__":
    sandbox.hide()
    sys.exit(run_command(main))
