"""Judge answers: the tests of a lab run on the reference with one function exchanged for the learner's.

`labs.grade` starts this as `python -I` with nothing but this repository on the path, and hands it a list of jobs. It
imports PyTorch, the reference and the tests, and then forks one process per job: its own process group, with limits of
time, memory and output, and a pipe for results as its only descriptor. In that process the learner's function is
compiled into the reference's module (`install`) and the exercise's tests run. The process that reports to the grader
never runs a line of a submission, so whatever an answer does costs its own exercise.

Two secrets keep an answer from speaking for the judge. What a job's process sends must carry the job's token, and what
this process tells the grader carries the job's nonce, which it reads after the fork: no answer's memory ever holds it.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import io
import json
import os
import resource
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

import pytest

from labs import no_triton, sandbox
from labs.exercises import ROOT, Exercise, all_exercises
from labs.job import TEST_SECONDS, WORK_VARIABLE, Job
from labs.recorder import Collector, Recorder, first_line
from labs.report import HUNG
from labs.submission import Answer, Unusable, read_answer

MEMORY = 12 << 30  # bytes of data that a job may have
FILE_BYTES = 64 << 20  # that a file which a job writes may have, what it prints included
REPORT_BYTES = 16 << 20  # that a job may report
TAIL_BYTES = 1 << 16  # of what a job has printed, where the reason of its end is looked for
SPOKE = "not allowed: it wrote to the judge"
# What a job may report: the event's fields, and of which type each is.
LINES = {
    event: {"event": str} | fields
    for event, fields in {
        "collected": {"tests": list},
        "start": {"test": str},
        "end": {"test": str, "state": str, "reason": str, "seconds": float},
        "broken": {"reason": str},
        "done": {},
    }.items()
}


def install(answer: Answer) -> None:
    """Put the learner's function in the place of the reference's, in every module that has imported it by name.

    It is compiled under the name and line numbers of the learner's file, so that tracebacks, and Triton, which reads a
    kernel's source, find its text. Its decorators and globals are those of the reference's module.
    """
    exercise = answer.exercise
    module = importlib.import_module(exercise.module)
    *classes, name = exercise.name.split(".")
    owner: object = module
    for part in classes:
        owner = getattr(owner, part)
    original, value = vars(owner)[name], _compiled(answer, module)
    setattr(owner, name, value)
    if not classes:
        ours = ("stage_", "beyond.", "labs.tests")
        for other in [m for name, m in list(sys.modules.items()) if name.startswith(ours)]:
            for attribute, found in list(vars(other).items()):
                if found is original:
                    setattr(other, attribute, value)


def _compiled(answer: Answer, module: ModuleType) -> object:
    classes = answer.exercise.name.split(".")[:-1]
    indented = answer.source[:1] in (" ", "\t")
    # An indented definition is compiled inside of as many classes as it has around it.
    outer = "".join(f"{' ' * 4 * depth}class {name}:\n" for depth, name in enumerate(classes)) if indented else ""
    padding = "\n" * (answer.line - 1 - len(classes))
    future = importlib.import_module("__future__").annotations.compiler_flag
    flags = future if "annotations" in vars(module) else 0
    found: dict[str, object] = {}
    exec(
        compile(padding + outer + answer.source, str(answer.file), "exec", flags, dont_inherit=True),
        vars(module),
        found,
    )
    value: object = None
    for part in answer.exercise.name.split("."):
        value = found[part] if value is None else vars(value)[part]
    return value


def run(job: Job, plugins: list[object], options: tuple[str, ...]) -> int:
    """Judge in this process; returns pytest's exit status."""
    os.environ[WORK_VARIABLE] = job.work
    answers = [read_answer(exercise, Path(job.work), job.audited) for exercise in job.exercises]
    if None in answers:
        raise Unusable("a function of the lab is missing")
    for answer in [*_in_place_of_the_reference(job), *answers]:
        if answer.exercise.is_python:
            install(answer)
        else:
            importlib.import_module("labs.native").use(answer, whole=job.key == job.lab.letter)
    return _run_tests(job, plugins, options)


def _in_place_of_the_reference(job: Job) -> Iterator[Answer]:
    """The learner's answers to other exercises, as far as the reference has none: in a student edition it has none."""
    for exercise in _left_out():
        if exercise not in job.exercises and (exercise.is_python or exercise.lab == job.lab.letter):
            with contextlib.suppress(Unusable):
                answer = read_answer(exercise, Path(job.work), job.audited)
                if answer is not None:
                    yield answer


@cache
def _left_out() -> list[Exercise]:
    """The exercises that are starters in the repository that judges."""
    left_out = [
        e for e in all_exercises() if not e.is_break_it and e.message in e.reference.read_text(encoding="utf-8")
    ]
    return [e for e in left_out if not (no_triton.needs(e) and no_triton.is_missing())]


def _run_tests(job: Job, plugins: list[object], options: tuple[str, ...]) -> int:
    files = [str(Path(folder) / f"test_lab_{job.lab.letter}.py") for folder in job.tests]
    always = ["-p", "no:cacheprovider", "--import-mode=importlib", "-c", "/dev/null", "--rootdir", job.tests[0]]
    return int(pytest.main([*options, *always, *filter(os.path.exists, files)], plugins=[*plugins, no_triton.Plugin()]))


@dataclass(frozen=True)
class Child:
    """A process that was forked for a job.

    Attributes:
        receiver: the end of the pipe where its reports come.
        token: what each of them begins with.
        log: a file without a name, with what it prints.
        folder: where it may write; removed when it has ended.
    """

    job: Job
    pid: int
    receiver: int
    token: str
    log: int
    folder: str


def start(job: Job, task: Callable[[Job, Callable[[dict[str, object]], None]], object]) -> Child:
    """Run `task(job, send)` in a process of its own; `send` reports one line."""
    receiver, sender = os.pipe()
    log, name = tempfile.mkstemp()
    os.unlink(name)
    token = secrets.token_hex(8)
    folder = tempfile.mkdtemp(prefix="six-engines-job-")
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        _be_the_child(job, task, sender, log, token)
    os.close(sender)
    return Child(job, child, receiver, token, log, folder)


def supervise(child: Child) -> Iterator[dict[str, object]]:
    """Yield what a job's process reports, and at last how it ended, when nothing of it runs any more."""
    seconds = child.job.seconds
    ended = f"{HUNG} {seconds:.0f} s: an endless loop?"
    deadline, rest, size = time.monotonic() + seconds, b"", 0
    done = False
    while time.monotonic() < deadline and not done:
        ready, _, _ = select.select([child.receiver], [], [], 0.5)
        data = os.read(child.receiver, 1 << 16) if ready else b""
        size += len(data)
        *lines, rest = (rest + data).split(b"\n")
        found = [_reported(line, child.token) for line in lines]
        if None in found or size > REPORT_BYTES:
            yield {"event": "broken", "reason": SPOKE}
            break
        for line in found:
            deadline = time.monotonic() + seconds
            done |= line["event"] == "done"
            yield line
        if ready and not data:
            ended = ""
            break
    status = _end(child.pid, patience=0.0 if done else 0.5)
    sandbox.end_children()
    os.close(child.receiver)
    shutil.rmtree(child.folder, ignore_errors=True)
    with os.fdopen(child.log, "rb") as log:
        yield {"event": "ended", "reason": ended or _how_it_ended(status, log)}


def _reporter(sender: int, token: str) -> Callable[[dict[str, object]], None]:
    """What sends a line to the judge. It looks nothing up when it is called, so that no answer can replace a part."""
    write = os.write

    def send(line: dict[str, object]) -> None:
        write(sender, f"{token}{line!r}\n".encode())

    return send


def _reported(line: bytes, token: str) -> dict[str, object] | None:
    """A line of a job's process, or None if it is not one that its reporter wrote."""
    if not line.startswith(token.encode()):
        return None
    try:  # an answer may have found the reporter, and say with it what it likes
        found = ast.literal_eval(line[len(token) :].decode())
        return found if {key: type(value) for key, value in found.items()} == LINES[found["event"]] else None
    except Exception:
        return None


def _be_the_child(job: Job, task: Callable, sender: int, log: int, token: str) -> None:
    try:
        os.setsid()
        sandbox.die_with_parent()
        for stream, fd in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(fd, stream)
        for fd in map(int, os.listdir("/dev/fd")):
            if fd > 2 and fd != sender:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(fd)
        if job.walls:
            _keep_to(Path.cwd(), job.walls)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        task(job, _reporter(sender, token))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _keep_to(folder: Path, walls: tuple[str, ...]) -> None:
    """Have this process write to `folder` alone; what was compiled before can be used, and not changed."""
    before = Path(os.environ.get("SIX_ENGINES_BUILD", ROOT / "build" / "extensions")).resolve()
    if sandbox.NAMESPACES in walls:
        sandbox.enclose(folder, root=sandbox.USER in walls)
    build = folder / "build"
    for library in before.glob("*/*.so"):
        link = build / library.relative_to(before)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(library)
    os.environ |= {"TMPDIR": str(folder), "HOME": str(folder), "SIX_ENGINES_BUILD": str(build)}
    tempfile.tempdir = None  # it was chosen before


class Leaver:
    """Has pytest leave root's rights when the tests are collected, which others may not read, and before one runs."""

    def __init__(self, user: int) -> None:
        self._user = user

    def pytest_collection_finish(self) -> None:
        sandbox.become_nobody(Path.cwd(), self._user)


def _judge(job: Job, send: Callable[[dict[str, object]], None], user: int) -> None:
    leaver = []
    if sandbox.USER in job.walls:
        job, leaver = replace(job, work=str(_copied(job))), [Leaver(user)]
    run(job, [Recorder(job, send), *leaver], ("-q", "-s", "--tb=short"))


def _copied(job: Job) -> Path:
    """A copy of the learner's files, where every user may read them."""
    work = Path("work").resolve()
    for exercise in [*job.lab.exercises, *_left_out()]:
        file, copy = (exercise.copy_in(folder) for folder in (Path(job.work), work))
        if file.is_file() and not file.is_symlink():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    return work


def _collect(job: Job, send: Callable[[dict[str, object]], None]) -> None:
    _run_tests(job, [Collector(send)], ("-q", "-s", "--collect-only"))


@cache
def _collected(letter: str, tests: tuple[str, ...]) -> list[tuple[str, str]]:
    """The tests of a lab, as `file::Class` and name, found by a process that runs the reference alone."""
    lines = supervise(start(Job(letter, "", tests, TEST_SECONDS), _collect))
    return [tuple(test) for line in lines if line["event"] == "collected" for test in line["tests"]]


def _end(child: int, patience: float) -> int:
    """Kill what is left of a job's processes; returns the exit status of its first.

    `patience`: seconds in which it may leave by itself, so that its status says how.
    """
    found, status, deadline = 0, 0, time.monotonic() + patience
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)
        found, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not found:
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _how_it_ended(status: int, log: BinaryIO) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
    lines = log.read().decode(errors="replace").strip().splitlines() or [""]
    killed_by = -status if status < 0 else status - 128 if status > 128 else 0  # above 128: as the sandbox passes it on
    if killed_by in set(signal.Signals):
        place = importlib.import_module("labs.native").crash_line(lines)
        return f"it took the process down ({signal.Signals(killed_by).name}{' at ' * bool(place)}{place})"
    return first_line(lines[-1]) if lines[-1] else ""


def main() -> None:
    """Judge the jobs in the standard input's first line, as JSON; it has one more line per job, its nonce."""
    sandbox.guard()
    lines = io.FileIO(sys.stdin.fileno(), closefd=False)  # without a buffer: what is not read yet is in no fork
    jobs = [Job(**job | {key: tuple(job[key]) for key in ("tests", "walls")}) for job in json.loads(lines.readline())]
    # Imported once, before the forks. Nothing is computed: a fork does not have its parent's threads.
    for letter in sorted({job.lab.letter for job in jobs}):
        for name in dict.fromkeys(e.module for e in all_exercises() if e.lab == letter and e.is_python):
            if not name.startswith("labs"):
                no_triton.import_module(name)
        no_triton.import_module(f"labs.tests.test_lab_{letter}")
    user = sandbox.nobody()
    gc.freeze()  # what is here already need not be looked at, and so not copied, in any fork
    for job in jobs:
        tests = [name for cls, name in _collected(job.lab.letter, job.tests) if cls in job.classes]
        child = start(job, partial(_judge, user=user))
        nonce = lines.readline().decode().strip()
        for line in chain([{"event": "expected", "tests": tests}], supervise(child)):
            print(json.dumps(line | {"job": job.key, "nonce": nonce}), flush=True)


def show(job: Job) -> int:
    """Judge in the foreground, with everything that the tests and the answer print, for a learner to look at."""
    recorder = Recorder(job, lambda line: None)
    return run(job, [recorder], ("-s", "--tb=short", "-q", "--no-header"))
