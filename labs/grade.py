"""Grade a learner's lab: a table for people, JSON for a grading service.

    python -m labs.grade d                      (make grade-d)
    python -m labs.grade d --only D.2           (make grade-d ONLY=D.2)
    python -m labs.grade d --only D.2 --show    (make grade-d ONLY=D.2 SHOW=1): prints, tracebacks, breakpoint()
    python -m labs.grade d --tests hidden/      (make grade-d LAB_TESTS=hidden/)
    python -m labs.grade d --json results.json --form gradescope --sandbox

Of the learner's copy only the functions of the exercises are taken (`submission.py`), each into a process of its own
(`judge.py`); everything else that runs is this repository's.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from labs import no_triton, progress, sandbox
from labs.exercises import LABS, ROOT, WORK, Exercise, Lab, load_labs
from labs.job import TEST_SECONDS, Job
from labs.mutants import MUTATIONS
from labs.report import FORMS, Mark, Report, hash_of_tests, mark_for, write_json
from labs.submission import Unusable, changes_in_given_code, intruders, read_answer
from stage_a_naive.entrypoints.interrupts import run_command

PUBLIC_TESTS = LABS / "tests"
SILENCE = 300.0  # seconds that the judge may need for its imports, and beyond a test's time
# `-I`: no variable of the caller's, no folder of the user's, no current folder on Python's path.
START = "import sys; sys.path.insert(0, {root!r}); from labs import judge; {call}"


class JudgeError(RuntimeError):
    """The judge could not begin, or no answer is to blame for its end."""


def grade(
    lab: Lab,
    work: Path = WORK,
    only: list[str] | None = None,
    extra_tests: Path | None = None,
    seconds: float = TEST_SECONDS,
    walls: tuple[str, ...] = (),
) -> Report:
    """Judge the exercises of a lab.

    Args:
        work: where the learner's copies are.
        only: ids of exercises; None is all.
        extra_tests: a directory with more tests, files and classes named like the public ones; both must pass.
        seconds: that a test may take.
        walls: what each answer is kept apart by (`sandbox.walls`).
    """
    chosen = [exercise for exercise in lab.exercises if only is None or exercise.id in only]
    directories = [PUBLIC_TESTS] + ([extra_tests] if extra_tests else [])
    report = Report(lab.letter, lab.title, [mark_for(exercise) for exercise in chosen])
    report.walls = sandbox.described(walls) if walls else ""
    report.tests = hash_of_tests(directories, lab.letter)
    report.notes = intruders(work) + changes_in_given_code(lab, work)
    jobs, judged = [], list(zip(chosen, report.marks, strict=True))
    for exercise, mark in judged:
        mark.hidden = extra_tests is not None and judges(extra_tests, exercise)
        mark.state, mark.reason = _before_judging(exercise, work)
        if not mark.state:
            jobs.append((mark, job_for(exercise.id, work, directories, seconds, walls)))
    for (mark, _), lines in zip(jobs, judge([job for _, job in jobs]), strict=True):
        enter(lines, mark)
    if only is None and all(m.state == "passed" or e.is_break_it and m.state == "not judged" for e, m in judged):
        whole = Mark(lab.letter, "", 0)
        enter(judge([job_for(lab.letter, work, [PUBLIC_TESTS], seconds, walls)])[0], whole)
        report.whole = "right" if whole.state == "passed" else whole.reason
    return report


def judges(tests: Path, exercise: Exercise) -> bool:
    """Whether a directory's tests have a class that judges the exercise."""
    text = (tests / f"test_lab_{exercise.lab}.py").read_text(encoding="utf-8")
    classes = {node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    return not classes.isdisjoint(test.split("::")[1] for test in exercise.tests)


def job_for(
    key: str, work: Path, directories: list[Path], seconds: float = TEST_SECONDS, walls: tuple[str, ...] = ()
) -> Job:
    """The job for an exercise's id or a lab's letter."""
    return Job(key, str(work.resolve()), tuple(map(str, directories)), seconds, walls=walls)


def _before_judging(exercise: Exercise, work: Path, audited: bool = True) -> tuple[str, str]:
    """State and reason of an exercise whose verdict is clear without running it."""
    try:
        if read_answer(exercise, work, audited) is None:
            return "not started", exercise.message
    except Unusable as error:
        return "failed", str(error)
    if exercise.is_break_it and not MUTATIONS.exists():
        return "not judged", "this edition has no broken engine: hand your test in"
    if no_triton.needs(exercise) and no_triton.is_missing():
        return "not judged", "there is no Triton here: Linux has one (WSL2, Colab, the devcontainer)"
    return "", ""


def judge(jobs: list[Job]) -> list[list[dict]]:
    """Run jobs in isolated processes; returns what each reported.

    A job in which the judge itself ended has failed, and another judge goes on with the jobs after it.

    Raises:
        JudgeError: a judge ended before its first job.
    """
    found: list[list[dict]] = []
    while len(found) < len(jobs):
        found += _judge_until_it_ends(jobs[len(found) :])
    return found


def _judge_until_it_ends(jobs: list[Job]) -> list[list[dict]]:
    """What the jobs reported that one judge began."""
    nonces = [secrets.token_hex(16) for _ in jobs]
    lines = [json.dumps([asdict(job) for job in jobs]), *nonces]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        tempfile.TemporaryFile() as log,  # without a name: an answer that deletes files finds none of the grader's
        subprocess.Popen(_isolated("judge.main()"), env=_environment(), cwd="/", stderr=log, **pipes) as process,
    ):
        with contextlib.suppress(BrokenPipeError):  # it has ended: what it said is read all the same
            process.stdin.write("".join(f"{line}\n" for line in lines).encode())
            process.stdin.close()
        reported = _read(process, jobs[0].seconds + SILENCE)
        end = _how(process.wait())
        log.seek(0)
        said = log.read().decode(errors="replace").strip()[-2000:]
    found = _sorted_by_job(reported, jobs, nonces)
    if not found:
        raise JudgeError(f"the judge itself failed ({end}): {said}")
    if process.returncode or found[-1][-1]["event"] != "ended":
        found[-1].append({"event": "broken", "reason": f"not allowed: it took the judge down ({end})"})
    return found


def _read(process: subprocess.Popen, patience: float) -> bytes:
    """What a process writes until it ends; one that is silent for `patience` seconds is killed."""
    parts = []
    while select.select([process.stdout], [], [], patience)[0]:
        parts.append(os.read(process.stdout.fileno(), 1 << 16))
        if not parts[-1]:
            return b"".join(parts)
    process.kill()
    return b"".join(parts)


def _sorted_by_job(reported: bytes, jobs: list[Job], nonces: list[str]) -> list[list[dict]]:
    """The judge's lines, by job; a line without the nonce of the job whose turn it is counts for nothing."""
    found: list[list[dict]] = []
    for text in reported.splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        turn = len(found) - 1 if found and found[-1][-1]["event"] != "ended" else len(found)
        if turn == len(jobs) or not isinstance(line, dict):
            continue
        if (line.get("job"), line.get("nonce")) != (jobs[turn].key, nonces[turn]):
            continue
        if turn == len(found):
            found.append([])
        found[turn].append(line)
    return found


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _isolated(call: str) -> list[str]:
    return [sys.executable, "-I", "-c", START.format(root=str(ROOT), call=call)]


def _environment() -> dict[str, str]:
    return os.environ | {
        "TRITON_INTERPRET": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "SIX_ENGINES_GRADING": "1",  # a student edition puts the learner's copies first, but not here
    }


def enter(lines: list[dict], mark: Mark) -> None:
    """Fill in a mark: passed if every test that was expected has passed, else the first that has not says why."""
    by_event: dict[str, list[dict]] = {}
    for line in lines:
        by_event.setdefault(line["event"], []).append(line)
    expected = by_event["expected"][0]["tests"]
    ends = by_event.get("end", [])
    mark.num_tests = len(expected)
    if [line["test"] for line in ends] != expected[: len(ends)]:
        mark.state, mark.reason = "failed", "not allowed: other tests ran than those that judge it"
        return
    mark.seconds = round(sum(line["seconds"] for line in ends), 3)
    mark.num_passed = sum(line["state"] == "passed" for line in ends)
    unfinished = len(by_event.get("start", [])) > len(ends)
    failed = [line for line in ends if line["state"] == "failed"]
    if failed:
        mark.state, mark.reason = "failed", failed[0]["reason"]
    elif "broken" in by_event or unfinished or len(ends) != len(expected) or "done" not in by_event:
        reason = by_event["broken"] if "broken" in by_event else by_event["ended"]
        where = f" in {by_event['start'][-1]['test']}" if unfinished else ""
        mark.state, mark.reason = "failed", (reason[0]["reason"] or "it ended the process") + where
    elif not ends:
        mark.state, mark.reason = "failed", "no test judges it here"
    elif any(line["state"] == "skipped" for line in ends):
        mark.state = "not judged"
        mark.reason = next(line["reason"] for line in ends if line["state"] == "skipped")
    else:
        mark.state, mark.reason = "passed", ""


def show(exercise: Exercise, work: Path, tests: list[Path]) -> int:
    """Judge one exercise in the foreground, with prints, whole tracebacks and `breakpoint()`; it gives no mark."""
    job = asdict(replace(job_for(exercise.id, work, tests), audited=False))
    call = f"sys.exit(judge.show(judge.Job(**{job!r})))"
    return subprocess.run(_isolated(call), env=_environment(), check=False).returncode


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
    parser.add_argument("lab", choices=list(load_labs()), help="its letter")
    parser.add_argument("--only", help="an exercise, or several with commas: D.2 or D.2,D.3")
    parser.add_argument("--show", action="store_true", help="with --only and one exercise: prints, tracebacks, pdb")
    parser.add_argument("--tests", type=Path, help="a directory with more tests (test_lab_d.py …); both must pass")
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
        copy = lab.copy_of(lab.package.replace(".", "/"), args.work)
        if not copy.is_dir():
            raise ValueError(f"{copy} is not there; `make lab-{lab.letter}` writes the starter")
        if args.tests is not None and not (args.tests / f"test_lab_{lab.letter}.py").is_file():
            raise ValueError(f"{args.tests} has no test_lab_{lab.letter}.py")
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
        state, reason = _before_judging(exercise, args.work, audited=False)
        if state:
            print(f"{exercise.id} {state}: {mark_for(exercise).task if state == 'not started' else reason}")
            return 1
        return show(exercise, args.work, [PUBLIC_TESTS] + ([args.tests.resolve()] if args.tests else []))
    try:
        walls = sandbox.walls() if args.sandbox else ()
        report = grade(lab, args.work, only, args.tests and args.tests.resolve(), walls=walls)
    except JudgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for mark in report.marks:
        mark.partial = args.partial
    print(report)
    if not args.json:  # who wants the marks elsewhere may not be able to write here
        progress.remember(report, args.work)
    if args.json or only is None:
        write_json(report, args.json or args.work / f"grade-{lab.letter}.json", args.form)
    return 0


if __name__ == "__main__":
    sandbox.hide()
    sys.exit(run_command(main))
