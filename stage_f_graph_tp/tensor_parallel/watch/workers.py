"""Rank 0's handle on the other ranks' processes: start them, send them commands, watch them, end them.

Rank 0 is the caller's process, and only rank 0 has the scheduler. For each step it sends the packed input to every
other rank and computes its share; the collectives inside the model do the rest. Workers send nothing back except error
reports.

A rank that missed a command would run a step with another step's tensors. So commands are numbered in sequence, and a
rank that gets another number than the next fails. Rank 0 either completes a step or fails the engine (`in_step`): after
an exception in the middle the other ranks would wait for ever.

Each worker that rank 0 starts inherits one end of a socket pair. Nothing that is received is ever unpickled.

When a rank dies or is stopped, the others wait for it: in a collective, in a launch queued after a waiting kernel, or
in the store. Rank 0's main thread may be blocked in any of these, so a second thread watches the workers from their
start. When one dies, or rank 0 waits for too long (`awaited`), this thread ends the waits on the GPU
(`end_waits_of`), finds out which rank failed first, and ends all workers. The results of collectives are invalid
from then on: `check` raises, and every result is checked before it is returned.
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
ANSWER_SECONDS = 300.0  # longest wait of rank 0 for the others in a step
WATCH_INTERVAL = 0.2  # seconds between two checks of the processes
BLOCKED_SECONDS = 10.0  # for rank 0 to return from a call after all waits were ended
CAUSE_SECONDS = 0.5  # from the first sign of a failure to the search for its cause: more reports may come
ADVICE = "the engine cannot go on, close it and make a new one"

Build = Callable[[Rendezvous, bytes], Callable[[bytes], None]]  # the first message -> the function for all others

NUMBER = struct.Struct("<q")  # every message begins with the number of messages before it
CAUSE, CONSEQUENCE = "cause", "consequence"  # a report's first line: the rank's error, or a `BrokenCollective`


class WorkerError(EngineBroken):
    """Another rank died or failed; the engine it belonged to cannot go on."""


class BrokenCollective(RuntimeError):
    """A collective ended without a result, because another rank has ended."""


def check_number(found: int, expected: int) -> None:
    """Raise `RuntimeError` if a message belongs to another command than the current one."""
    if found != expected:
        raise RuntimeError(f"the ranks are out of step: command {found} came where command {expected} was expected")


@dataclass
class Awaited:
    """An operation of rank 0 that waits for the other ranks."""

    limit: float  # seconds
    seconds: float = 0.0  # so far


class Workers:
    """Rank 0's connections to the other ranks, and their processes if it started them itself.

    Args:
        rendezvous: rank 0's.
        build: a module-level function, which a worker imports by name and calls with the first message.
        connections: to ranks whose processes exist already; without it, the processes are started here.
    """

    def __init__(self, rendezvous: Rendezvous, build: Build, connections: dict[int, Connection] | None = None) -> None:
        self._groups: list[Any] = []  # their waits are ended when a rank fails
        self.rendezvous = rendezvous  # keeps the store alive for the ranks
        self._size = rendezvous.size
        self._num_sent = 0  # messages
        self._is_midway = False  # a step has begun and not ended
        self._stepping = threading.RLock()  # held during a step
        self._processes: dict[int, subprocess.Popen] = {}  # by rank
        self._connections = connections or {}  # by rank
        self._owner = os.getpid()
        self._lock = threading.RLock()  # the engine may be collected, and thus closed, in any thread
        self._failing = threading.Event()  # set before any invalid result is visible
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
        """Call `group.stop_waiting()` when a rank fails. The watching thread calls it, so it must not block."""
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
        """After a broken collective, raise the other rank's error, if it becomes known within a second."""
        self._failing.wait(1)
        self.check()

    def fail(self, reason: str) -> NoReturn:
        """End the workers for a reason on rank 0, and raise it."""
        self._give_up(lambda: f"{reason}; {ADVICE}")
        raise WorkerError(self._reason)

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """End the workers if the block raises or takes too long. An error caused by a dead rank names that rank."""
        try:
            with self.awaited(START_SECONDS):
                yield
        except BaseException as error:
            try:
                if isinstance(error, RuntimeError):
                    self.explain()  # if a rank's death broke the collective, raise that instead
            finally:
                self.close()
            raise

    @contextlib.contextmanager
    def in_step(self, command: bytes | None) -> Iterator[None]:
        """Send a command and execute rank 0's part of it in the block, with Ctrl-C delayed.

        The block must complete, or the engine fails, because the others wait for rank 0's part. If even that is
        interrupted (a signal handler may raise between any two lines), the next step fails.

        Args:
            command: None if an earlier command covers this step.

        Raises:
            WorkerError: replaces any exception from the block.
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
            except GeneratorExit:  # an exception inside contextlib has left the block and is propagating
                raise
            except BaseException as error:
                self.explain()
                self.fail(f"rank 0 could not run a step: {error!r}")
            self._is_midway = False

    @contextlib.contextmanager
    def awaited(self, limit: float | None = None) -> Iterator[None]:
        """End the workers if the block, which waits for them, is not done within `limit` seconds.

        The end of a nested block ends the outer limit too: the others have answered.
        """
        try:
            self._awaited = Awaited(ANSWER_SECONDS if limit is None else limit)
            yield
        finally:
            self._awaited = None

    def close(self) -> None:
        """End the workers. A second call is a no-op, and so is a call in a forked child of rank 0.

        A step in another thread ends with an error; this waits for it.
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
        """Whether this process is rank 0, not a fork of it."""
        return os.getpid() == self._owner

    def _watch(self) -> None:
        while not self._failed.is_set():
            signs = wait(self._connections.values(), WATCH_INTERVAL)
            if self._failing.is_set():  # another thread ends the workers, or was interrupted in that
                self._give_up(lambda: f"rank 0 was interrupted; {ADVICE}")
            elif signs or any(process.poll() is not None for process in self._processes.values()):
                self._give_up(self._find_cause)
            elif awaited := self._awaited:
                awaited.seconds += WATCH_INTERVAL  # counted, so it stands still while this process is stopped
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
            self._groups.clear()  # they hold device memory
            for connection in self._connections.values():
                _shut_down(connection)  # a worker exits when its connection breaks
            for process in self._processes.values():
                process.kill()
            self._failed.set()

    def _find_cause(self) -> str:
        """Find out which rank failed, and why.

        After a death, others may report broken connections before the death is noticed. A rank that raises reports its
        error before its connections break, so its report is readable before the reports of the others.
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
        """Name the rank that keeps rank 0 waiting, if that is visible."""
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
    """Start a worker without fork and without importing the caller's main module, which may lack a main guard."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    environment["TQDM_DISABLE"] = "1"  # rank 0 shows the progress
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
    """A handler that records Ctrl-C.

    Args:
        before: the handler that it replaces; if that is itself a leftover `HeldInterrupt`, the handler before it.
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
    """Whether a signal has stopped this child process, if the system can tell."""
    with contextlib.suppress(ChildProcessError):  # it has ended
        if hasattr(os, "waitid"):  # not on macOS
            return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _shut_down(connection: Connection) -> None:
    """Shut a connection down that another thread may be using; closing it would free its file number for reuse."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
