"""Run answers, each in a process of its own, and hand on what they send.

`labs.grade` starts this as `python -I` and gives it one job after another, each a folder (`tree.py`). It has imported
PyTorch and its like, and nothing of this repository's engines. For a job it forks: the child has its own process group,
limits of time, memory and output, what walls there are (`sandbox.py`), and one pipe. It imports the driver from the
job's folder, so that the reference's body of the judged function is neither in its memory nor in its folder.

Nothing that comes out of the pipe is believed: the grader compares it with what the reference gives.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from labs import sandbox

MEMORY = 12 << 30  # bytes of data that a job may have
FILE_BYTES = 64 << 20  # that a file which a job writes may have, what it prints included
REPORT_BYTES = 32 << 20  # that a job may send
TAIL_BYTES = 1 << 16  # of what a job has printed, where the reason of its end is looked for
MOST_SILENCES = 10  # a job has this many times the seconds in which something must come
HUNG = "ran longer than"  # how the reason begins
SPOKE = "not allowed: it wrote more than its values"
WARM = (
    "numpy",
    "torch",
    "torch.utils._python_dispatch",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.auto.modeling_auto",
    "tokenizers",
    "safetensors.torch",
    "triton.language",
)


@dataclass(frozen=True)
class Job:
    """What runs in one process.

    Attributes:
        folder: has `tree`, which is imported from, and `scratch`, which may be written to.
        letter: the lab whose driver runs.
        classes: of the driver; none runs `test_break.py` of the tree by pytest.
        seconds: in which something must come.
        walls: what it is kept apart by (`sandbox.walls`).
        hidden: folders that it must not see where there are namespaces.
    """

    folder: str
    letter: str
    classes: tuple[str, ...]
    seed: int
    seconds: float
    walls: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


def run(job: Job, shown: bool = False) -> None:
    """Run a job's driver in this process, which sends to descriptor 3, or shows where `shown`."""
    tree = Path(job.folder, "tree")
    for name in [name for name in sys.modules if name.split(".")[0] in ("labs", "stage_a_naive")]:
        del sys.modules[name]
    sys.path[0] = str(tree)
    driving = importlib.import_module("labs.driving")

    def send(line: dict[str, object]) -> None:
        if not shown:
            os.write(3, f"{json.dumps(line)}\n".encode())
        elif "seconds" not in line:
            print(*(f"{key}: {value}" for key, value in line.items() if value not in ({}, [])), sep="  ")

    if not job.classes:
        driving.run_pytest(tree / "test_break.py", send)
        return
    torch = importlib.import_module("torch")
    torch.manual_seed(job.seed)  # for modules that draw numbers when they are imported
    no_triton, name = importlib.import_module("labs.no_triton"), f"labs.tests.test_lab_{job.letter}"
    no_triton.import_module(name)
    driving.run(sys.modules[name], job.classes, job.seed, send)


def start(job: Job, user: int) -> tuple[int, int, BinaryIO]:
    """Fork for a job; returns the process, the end of the pipe where its lines come, and what it prints."""
    receiver, sender = os.pipe()
    log = (Path(job.folder) / "log").open("w+b")
    child = os.fork()
    if child == 0:
        _be_the_child(job, sender, log.fileno(), user)
    os.close(sender)
    return child, receiver, log


def supervise(job: Job, user: int) -> Iterator[dict[str, object]]:
    """Run a job; yields each line that it sends, and at last how it ended, when nothing of it runs any more."""
    child, receiver, log = start(job, user)
    begin = last = time.monotonic()
    ended, rest, size = f"{HUNG} {job.seconds:.0f} s: an endless loop?", b"", 0
    while time.monotonic() < min(last + job.seconds, begin + MOST_SILENCES * job.seconds):
        has_left = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        ready, _, _ = select.select([receiver], [], [], 0 if has_left else 0.5)
        data = os.read(receiver, 1 << 16) if ready else b""  # as much as a pipe holds
        size += len(data)
        *lines, rest = (rest + data).split(b"\n")
        if size > REPORT_BYTES:
            ended = SPOKE
            break
        for line in lines:
            last = time.monotonic()
            yield {"line": line.decode(errors="replace")}
        if has_left or (ready and not data):  # a process that it has left behind may keep the pipe open
            ended = ""
            break
    status = _end(child, patience=0.5)
    sandbox.end_children()
    os.close(receiver)
    with log:
        yield {"ended": ended or _how_it_ended(status, log)}


def _be_the_child(job: Job, sender: int, log: int, user: int) -> None:
    try:
        os.setsid()
        sandbox.die_with_parent()
        os.dup2(sender, 3)
        for stream, fd in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(fd, stream)
        for fd in map(int, os.listdir("/dev/fd")):
            if fd > 3:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(fd)
        _keep_to(job, user)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sandbox.limit_processes()
        run(job)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _keep_to(job: Job, user: int) -> None:
    """Have this process write to its scratch folder alone; what was compiled before can be used, and not changed."""
    scratch = Path(job.folder, "scratch")
    os.chdir(scratch)
    if sandbox.USER in job.walls:
        sandbox.give(Path(job.folder), user)
    if sandbox.NAMESPACES in job.walls:
        sandbox.enclose(scratch, root=sandbox.USER in job.walls, hidden=job.hidden)
    if not job.walls:
        return
    build, before = scratch / "build", Path(os.environ["SIX_ENGINES_BUILD"])
    for library in before.glob("*/*.so"):
        link = build / library.relative_to(before)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(library)
    os.environ |= {"TMPDIR": str(scratch), "HOME": str(scratch), "SIX_ENGINES_BUILD": str(build)}
    if sandbox.USER in job.walls:
        sandbox.become_nobody(scratch, user)


def _end(child: int, patience: float) -> int:
    """Kill what is left of a job's processes; returns the exit status of its first.

    `patience`: seconds in which it may leave by itself, so that its status says how.
    """
    found, status, deadline = 0, 0, time.monotonic() + patience
    while not found and time.monotonic() < deadline:
        time.sleep(0.002)
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
        from labs.native import crash_line

        place = crash_line(lines)
        return f"it took the process down ({signal.Signals(killed_by).name}{' at ' * bool(place)}{place})"
    return lines[-1].strip()


def main() -> None:
    """Run the jobs that come in the standard input, a line of JSON each."""
    sandbox.guard()
    for name in WARM:
        with contextlib.suppress(ImportError):  # without Triton
            importlib.import_module(name)
    user = sandbox.nobody()
    gc.freeze()  # what is here already need not be looked at, and so not copied, in any fork
    for text in iter(sys.stdin.readline, ""):
        for line in supervise(job_of(text), user):
            print(json.dumps(line), flush=True)


def job_of(text: str) -> Job:
    fields = json.loads(text)
    return Job(**fields | {key: tuple(fields[key]) for key in ("classes", "walls", "hidden")})


def show(text: str) -> None:
    """Run a job in the foreground, with everything that it prints, for a learner to look at."""
    job = job_of(text)
    run(job, shown=True)
    shutil.rmtree(job.folder, ignore_errors=True)
