"""Rank 0's handle on the other ranks' processes: start them, send them commands, watch them, end them.

Rank 0 is the caller's process. It alone has the scheduler. For each step it sends every other rank the packed input of
the step and computes its own share; the collectives inside the model do the rest. Workers send nothing back, except a
report of what went wrong.

A rank that missed a command would run a step with another step's tensors. So every command has a number, the next one
after the last, and a rank that gets another one fails. And rank 0 leaves a step by its end, or has failed the engine
(`in_step`): an exception anywhere in between leaves the others waiting for it.

Each worker that rank 0 starts inherits one end of a socket pair. Nothing that is received is ever unpickled.

When a rank dies, or is stopped, the others wait for it: in a collective, in a launch behind a kernel that waits, in the
store. Rank 0's main thread may be blocked in any of these, so a second thread watches the workers from the moment they
start. When one dies, or rank 0 waits for too long (`awaited`), it ends the waits on the GPU (`end_waits_of`), finds out
which rank failed first, and ends all workers. The results of collectives are invalid from then on: `check` raises, and
every result is checked before it is returned.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch.distributed import TCPStore

from stage_a_naive.contract.errors import EngineBroken
from stage_f_graph_tp.tensor_parallel.watch.rendezvous import START_SECONDS, Rendezvous

SCRIPT = Path(__file__).with_name("worker_process.py")
ANSWER_SECONDS = 300.0  # that rank 0 waits for the others in a step
WATCH_INTERVAL = 0.2  # seconds between two looks at the processes
BLOCKED_SECONDS = 10.0  # for rank 0 to come back from a call when all waits have been ended
CAUSE_SECONDS = 0.5  # from the first sign of a failure until its cause is named: others may follow within that time
ADVICE = "the engine cannot go on, close it and make a new one"

Build = Callable[[Rendezvous, bytes], Callable[[bytes], None]]  # the first message -> what executes all others

NUMBER = struct.Struct("<q")  # what every message begins with: how many were sent before it
CAUSE, CONSEQUENCE = "cause", "consequence"  # a report's first line: an error of the rank's own, or `BrokenCollective`


class WorkerError(EngineBroken):
    """Another rank died or failed; the engine it belonged to cannot go on."""


class BrokenCollective(RuntimeError):
    """A collective ended without a result: another rank has ended, which this one only noticed."""


def check_number(found: int, expected: int) -> None:
    """Raise `RuntimeError` if what came belongs to another command than the one that a rank executes."""
    if found != expected:
        raise RuntimeError(f"the ranks are out of step: command {found} came where command {expected} was expected")


@dataclass
class Awaited:
    """What rank 0 is doing, which ends when the other ranks have done their part."""

    limit: float  # seconds
    seconds: float = 0.0  # so far


class Workers:
    """Rank 0's connections to the other ranks, and their processes if it started them itself.

    Args:
        rendezvous: rank 0's.
        build: a function of a module, which a worker imports by its name and calls with the first message.
        connections: to ranks whose processes exist already; without them, this starts the processes.
    """

    def __init__(self, rendezvous: Rendezvous, build: Build, connections: dict[int, Connection] | None = None) -> None:
        self._groups: list[Any] = []  # whose waits are ended when a rank fails
        self.rendezvous = rendezvous  # the ranks need its store, which ends with it
        self._size = rendezvous.size
        self._num_sent = 0  # messages
        self._is_midway = False  # a step has begun and not ended
        self._stepping = threading.RLock()  # held for a step
        self._processes: dict[int, subprocess.Popen] = {}  # by rank
        self._connections = connections or {}  # by rank
        self._owner = os.getpid()
        self._lock = threading.RLock()  # the engine may be collected, and so closed, in any thread
        self._failing = threading.Event()  # set before anything invalid can be seen
        self._failed = threading.Event()  # set when the reason is known
        self._reason = ""
        self._awaited: Awaited | None = None
        try:
            for rank in range(1, rendezvous.size) if connections is None else ():
                self._processes[rank], self._connections[rank] = _start_worker(rendezvous, rank, build)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, daemon=True).start()

    def end_waits_of(self, group: Any) -> None:
        """When a rank fails, call `group.stop_waiting()`: in the watching thread, so it must not block."""
        self._groups.append(group)

    def send(self, message: bytes) -> None:
        """Send a message of any length, with the next number, to every other rank."""
        self.check()
        numbered = NUMBER.pack(self._num_sent) + message
        self._num_sent += 1
        try:
            for connection in self._connections.values():
                connection.send_bytes(numbered)
        except OSError as error:
            self.explain()
            self.fail(f"a worker's connection broke: {error}")

    def check(self) -> None:
        """Raise `WorkerError` if another rank has failed or died, or the engine was closed."""
        if self._failing.is_set():
            self._failed.wait()
            raise WorkerError(self._reason)

    def explain(self) -> None:
        """After a collective broke: raise what happened to the other rank, if that comes to light within a second."""
        self._failing.wait(1)
        self.check()

    def fail(self, reason: str) -> NoReturn:
        """End the workers for a reason of rank 0's, and raise it."""
        self._give_up(lambda: f"{reason}; {ADVICE}")
        raise WorkerError(self._reason)

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """End the workers if the block raises or takes too long; what a rank's death breaks is raised as its error."""
        try:
            with self.awaited(START_SECONDS):
                yield
        except BaseException as error:
            try:
                if isinstance(error, RuntimeError):
                    self.explain()  # a collective that broke because a rank died is that rank's error
            finally:
                self.close()
            raise

    @contextlib.contextmanager
    def in_step(self, command: bytes | None) -> Iterator[None]:
        """Send a command and execute rank 0's part of it in the block, while Ctrl-C is held back.

        The block ends, or the engine has failed: the others still wait for what it would have done. If even the end of
        the engine is interrupted (a signal's handler may raise between any two lines), the next step fails.

        Args:
            command: None where the others know from an earlier one what to do.

        Raises:
            WorkerError: instead of anything that the block raises.
        """
        with self._stepping, interrupts_held(), self.awaited():
            self.check()
            if self._is_midway:
                self.fail("rank 0 left a step before its end")
            self._is_midway = True
            try:
                if command is not None:
                    self.send(command)
                yield
            except GeneratorExit:  # an exception in contextlib's own lines has left the block, and is on its way
                raise
            except BaseException as error:
                self.explain()
                self.fail(f"rank 0 could not run a step: {error!r}")
            self._is_midway = False

    @contextlib.contextmanager
    def awaited(self, limit: float | None = None) -> Iterator[None]:
        """End the workers if the block, for which rank 0 needs them, is not done within `limit` seconds.

        The end of a block in another one ends both limits: the others have answered.
        """
        try:
            self._awaited = Awaited(ANSWER_SECONDS if limit is None else limit)
            yield
        finally:
            self._awaited = None

    def close(self) -> None:
        """End the workers. A second call does nothing, and neither does one in a forked child of rank 0.

        A step of another thread ends with an error; it is waited for.
        """
        if not self.is_owner:
            return
        self._give_up(lambda: "the engine was closed")
        if self._stepping.acquire(timeout=BLOCKED_SECONDS):
            self._stepping.release()
        for process in self._processes.values():
            process.kill()
            process.wait()

    @property
    def is_owner(self) -> bool:
        """Whether this process is rank 0, and not a fork of it."""
        return os.getpid() == self._owner

    def _watch(self) -> None:
        while not self._failed.is_set():
            signs = wait(self._connections.values(), WATCH_INTERVAL)
            if self._failing.is_set():  # another thread ends the workers, or was interrupted while it did
                self._give_up(lambda: f"rank 0 was interrupted; {ADVICE}")
            elif signs or any(process.poll() is not None for process in self._processes.values()):
                self._give_up(self._find_cause)
            elif awaited := self._awaited:
                awaited.seconds += WATCH_INTERVAL  # counted: nobody is late while this process is stopped itself
                if awaited.seconds >= awaited.limit:
                    self._give_up(partial(self._find_silent, awaited.limit))
        if blocked := self._awaited:
            time.sleep(BLOCKED_SECONDS)
            if self._awaited is blocked:  # no error can be raised there
                print(f"error: {self._reason}; rank 0 has not come back from a call yet", file=sys.stderr, flush=True)

    def _give_up(self, find_reason: Callable[[], str]) -> None:
        """End every wait for the workers, note the reason, end the workers. Only one call does this to its end."""
        with self._lock:
            if self._failed.is_set():
                return
            self._failing.set()
            for group in self._groups:
                group.stop_waiting()
            self._reason = find_reason()
            self._groups.clear()  # they hold the device's memory
            for connection in self._connections.values():
                _shut_down(connection)  # a worker exits when its connection breaks
            for process in self._processes.values():
                process.kill()
            self._failed.set()

    def _find_cause(self) -> str:
        """Find what happened to which rank.

        When one has died, others may report broken connections before it is noticed. A rank that raised reports that
        before its connections break, so what it said can be read here when the others' reports of that can.
        """
        ranks = {connection: rank for rank, connection in self._connections.items()}
        reports: dict[int, str] = {}
        died: list[int] = []
        deadline = time.monotonic() + CAUSE_SECONDS
        while ranks and (seconds := deadline - time.monotonic()) > 0:
            for connection in cast("list[Connection]", wait(ranks, min(seconds, WATCH_INTERVAL))):
                try:
                    reports.setdefault(ranks[connection], connection.recv_bytes().decode(errors="replace"))
                except (EOFError, OSError):
                    died.append(ranks.pop(connection))
            ended = [rank for rank, process in self._processes.items() if process.poll() is not None]
            died += [rank for rank in ended if rank not in died]
        silent = [rank for rank in died if rank not in reports]
        if silent:
            return f"rank {silent[0]} of {self._size} died{self._exit_status(silent[0])}; {ADVICE}"
        rank, report = min(reports.items(), key=lambda item: item[1].startswith(CONSEQUENCE))
        summary, _, trace = report.partition("\n")[2].partition("\n")
        return f"rank {rank} of {self._size} failed: {summary}; {ADVICE}\n{trace}"

    def _find_silent(self, seconds: float) -> str:
        """Which rank keeps rank 0 waiting, where that can be seen."""
        stopped = [rank for rank, process in self._processes.items() if _is_stopped(process)]
        who = f"rank {stopped[0]} of {self._size} is stopped and" if stopped else "the other ranks"
        return f"{who} did not answer within {seconds:.0f} s; {ADVICE}"

    def _exit_status(self, rank: int) -> str:
        process = self._processes.get(rank)
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process is not None and (code := process.wait(1)) is not None:
                return f" ({signal.Signals(-code).name})" if code < 0 else f" (exit code {code})"
        return ""


def _start_worker(rendezvous: Rendezvous, rank: int, build: Build) -> tuple[subprocess.Popen, Connection]:
    """Start a worker's process, not by fork and without importing the caller's main module, which may have no guard."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    environment["TQDM_DISABLE"] = "1"  # rank 0 shows the progress of all
    if torch.get_num_threads() > 1:  # CPU ranks share the cores
        environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // rendezvous.size))
    own, other = socket.socketpair()
    with own, other:
        store = cast("TCPStore", rendezvous.store)
        numbers = os.getpid(), other.fileno(), store.port, rank, rendezvous.size
        arguments = build.__module__, build.__name__, *map(str, numbers)
        process = subprocess.Popen(
            [sys.executable, "-P", SCRIPT, *arguments], env=environment, pass_fds=[other.fileno()]
        )
        return process, Connection(own.detach())


class HeldInterrupt:
    """A handler of Ctrl-C that notes it.

    Args:
        before: the handler in whose place it is; if that one was itself left behind, the one before it.
    """

    def __init__(self, before: Any) -> None:
        self.before = before.before if isinstance(before, HeldInterrupt) else before
        self.came = False

    def __call__(self, *_: object) -> None:
        self.came = True


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C until the block is done: rank 0 must not leave a step in which the others wait for it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    held = HeldInterrupt(signal.getsignal(signal.SIGINT))
    try:
        signal.signal(signal.SIGINT, held)
        yield
    finally:
        signal.signal(signal.SIGINT, held.before or signal.SIG_DFL)
        if held.came:
            signal.raise_signal(signal.SIGINT)


def _is_stopped(process: subprocess.Popen) -> bool:
    """Whether a signal has stopped one of this process's children, as far as the system tells."""
    with contextlib.suppress(ChildProcessError):  # it has ended
        if hasattr(os, "waitid"):  # not on macOS
            return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _shut_down(connection: Connection) -> None:
    """Break a connection that another thread may be using: closing it would free its number for another file."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
