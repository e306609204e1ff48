"""Judge answers: the tests of a lab run on the reference with one function exchanged for the learner's.

`labs.grade` starts this as `python -I` with nothing but this repository on the path, and hands it a list of jobs on its
standard input. It imports PyTorch, the reference and the tests, and then forks one process per job: its own process
group, with a limit of time and memory, and a pipe of its own for results. In that process the learner's function is
compiled into the reference's module (`install`) and the exercise's tests run. The process that reports to the grader
never runs a line of a submission, so whatever an answer does costs its own exercise.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from labs.exercises import all_exercises
from labs.job import Job
from labs.recorder import Recorder
from labs.submission import Answer, Unusable, read_answer

WORK_VARIABLE = "SIX_ENGINES_LAB_WORK"  # the environment variable that says where the learner's copies are
MEMORY = 12 << 30  # bytes of data that a job may have


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


def run(job: Job, plugins: list[Recorder], options: tuple[str, ...], audited: bool) -> int:
    """Judge in this process; returns pytest's exit status."""
    os.environ[WORK_VARIABLE] = job.work
    answers = [read_answer(exercise, Path(job.work), audited) for exercise in job.exercises]
    for answer in answers:
        if answer is None:
            raise Unusable("a function of the lab is missing")
        if answer.exercise.is_python:
            install(answer)
        else:
            importlib.import_module("labs.native").use(answer, whole=job.key == job.lab.letter)
    files = [str(Path(folder) / f"test_lab_{job.lab.letter}.py") for folder in job.tests]
    always = ["-p", "no:cacheprovider", "--import-mode=importlib", "-c", "/dev/null", "--rootdir", job.tests[0]]
    return int(pytest.main([*options, *always, *filter(os.path.exists, files)], plugins=plugins))


def supervise(job: Job) -> Iterator[dict[str, object]]:
    """Run a job in a process of its own; yields what it reports, and at last how it ended."""
    receiver, sender = os.pipe()
    log = os.memfd_create("log")
    child = os.fork()
    if child == 0:
        os.close(receiver)
        _be_the_child(job, sender, log)
    os.close(sender)
    ended = f"ran longer than {job.seconds:.0f} s: an endless loop?"
    deadline, rest = time.monotonic() + job.seconds, b""
    done = False
    while time.monotonic() < deadline and not done:
        ready, _, _ = select.select([receiver], [], [], 0.5)
        data = os.read(receiver, 1 << 16) if ready else b""
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            deadline = time.monotonic() + job.seconds
            found = json.loads(line)
            done |= found["event"] == "done"
            yield found
        if ready and not data:
            ended = ""
            break
    status = _end(child, patience=0.0 if done else 0.5)
    os.close(receiver)
    if not ended:
        ended = _how_it_ended(status, log)
    os.close(log)
    yield {"event": "ended", "job": job.key, "reason": ended}


def _be_the_child(job: Job, sender: int, log: int) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for stream, fd in ((sys.stdin, os.open(os.devnull, os.O_RDONLY)), (sys.stdout, log), (sys.stderr, log)):
        os.dup2(fd, stream.fileno())
    try:
        recorder = Recorder(job, lambda line: os.write(sender, json.dumps(line).encode() + b"\n"))
        run(job, [recorder], ("-q", "-s", "--tb=short"), audited=True)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _end(child: int, patience: float) -> int:
    """Kill what is left of a job's process group; returns the exit status of its first process.

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


def _how_it_ended(status: int, log: int) -> str:
    os.lseek(log, 0, os.SEEK_SET)
    with os.fdopen(os.dup(log), "rb") as file:
        lines = file.read().decode(errors="replace").strip().splitlines() or [""]
    if status < 0:
        place = importlib.import_module("labs.native").crash_line(lines)
        return f"it took the process down ({signal.Signals(-status).name}{' at ' * bool(place)}{place})"
    return lines[-1]


def main() -> None:
    order = json.load(sys.stdin)
    jobs = [Job(**job | {"tests": tuple(job["tests"])}) for job in order]
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # Imported once, before the forks. Nothing is computed: a fork does not have its parent's threads.
    for letter in sorted({job.lab.letter for job in jobs}):
        for name in dict.fromkeys(e.module for e in all_exercises() if e.lab == letter and e.is_python):
            if not name.startswith("labs"):
                importlib.import_module(name)
        importlib.import_module(f"labs.tests.test_lab_{letter}")
    gc.freeze()  # what is here already need not be looked at, and so not copied, in any fork
    for job in jobs:
        for line in supervise(job):
            out.write(json.dumps(line) + "\n")
            out.flush()


def show(job: Job) -> int:
    """Judge in the foreground, with everything that the tests and the answer print, for a learner to look at."""
    recorder = Recorder(job, lambda line: None)
    return run(job, [recorder], ("-s", "--tb=short", "-q", "--no-header"), audited=False)


if __name__ == "__main__":
    main()
