"""Run answers, each in a separate process, and forward what they send.

`labs.grade` starts this as `python -I` and gives it one job after another, each a folder (`tree.py`). It has imported
PyTorch and similar packages, but none of this repository's engines. It forks for each job: the child has a separate
process group, limits of time, memory and output, the available isolation (`sandbox.py`), and one pipe. It imports the
driver from the job's folder, so that the reference's body of the judged function is neither in its memory nor in its
folder.

Nothing from the pipe is trusted: the grader compares it with the reference's values.
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
FILE_BYTES = 64 << 20  # bytes of each file that a job writes, its output included
REPORT_BYTES = 32 << 20  # that a job may send
TAIL_BYTES = 1 << 16  # bytes of a job's output in which the reason of its end is searched
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
    """The work of one process.

    Attributes:
        folder: has `tree`, from which the job imports, and `scratch`, to which it may write.
        letter: the lab whose driver runs.
        classes: of the driver; none runs `test_break.py` of the tree by pytest.
        seconds: in which something must come.
        walls: the means that isolate it (`sandbox.walls`).
        hidden: folders that it must not see, if there are namespaces.
    """

    folder: str
    letter: str
    classes: tuple[str, ...]
    seed: int
    seconds: float
    walls: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


def run(job: Job, shown: bool = False) -> None:
    """Run a job's driver in this process; it sends to descriptor 3, or prints if `shown`."""
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
    torch.manual_seed(job.seed)  # for modules that use random numbers when they are imported
    no_triton, name = importlib.import_module("labs.no_triton"), f"labs.tests.test_lab_{job.letter}"
    no_triton.import_module(name)
    driving.run(sys.modules[name], job.classes, job.seed, send)


def start(job: Job, user: int) -> tuple[int, int, BinaryIO]:
    """Fork for a job; return the process, the pipe from which its lines are read, and its output."""
    receiver, sender = os.pipe()
    log = (Path(job.folder) / "log").open("w+b")
    child = os.fork()
    if child == 0:
        _be_the_child(job, sender, log.fileno(), user)
    os.close(sender)
    return child, receiver, log


def supervise(job: Job, user: int) -> Iterator[dict[str, object]]:
    """Run a job; yield each line that it sends, and when all of its processes have ended, how it ended."""
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
        if has_left or (ready and not data):  # a process that it left behind may keep the pipe open
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
    """Let this process write only to its scratch folder; files compiled before can be used, but not changed."""
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
    """Kill a job's remaining processes; return the exit status of the first.

    `patience`: seconds in which it may exit by itself, so that its exit status is known.
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
    gc.freeze()  # the collector skips existing objects in forks, so their memory is not copied
    for text in iter(sys.stdin.readline, ""):
        for line in supervise(job_of(text), user):
            print(json.dumps(line), flush=True)


def job_of(text: str) -> Job:
    fields = json.loads(text)
    return Job(**fields | {key: tuple(fields[key]) for key in ("classes", "walls", "hidden")})


def show(text: str) -> None:
    """Run a job in the foreground with all of its output, for a learner."""
    job = job_of(text)
    run(job, shown=True)
    shutil.rmtree(job.folder, ignore_errors=True)
