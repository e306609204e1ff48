"""The other ranks: how they are started, told what to do, watched, and ended.

Rank 0 is the caller's process. It alone has the scheduler; each step, it sends every other rank the step's packed input
and computes its own share, and the collectives inside the model do the rest. Workers never answer, except to report
what went wrong.

`Ranks` is rank 0's handle on the others. Each worker that it starts inherits one end of a socket pair. Under torchrun,
whose processes may be on other machines, workers connect over TCP instead, with a key that rank 0 puts into torchrun's
store. Who can read that store could send commands too, but nothing that is received is ever unpickled.

A rank that dies leaves the others waiting: in a collective, in the launch of a kernel behind it, in the store. The main
thread may be blocked in any of these, so a thread of its own watches the workers from their first moment. On a death
it ends the waits on the GPU (`stop_waiting`), finds out which rank failed first, and ends all workers. What the
collectives return from then on is invalid: `check` raises, and every result is checked before it is handed on. A
worker, for its part, exits at once when its connection breaks, even in the middle of a collective.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from stage_f_graph_tp.rendezvous import LOOPBACK, Rendezvous

SCRIPT = Path(__file__).with_name("worker_process.py")
CONNECT_TIMEOUT = 120.0  # seconds for a process of torchrun's to import PyTorch and connect
WATCH_INTERVAL = 0.2  # seconds between two looks at the processes
CAUSE_SECONDS = 0.5  # from the first sign of a failure until its cause is named: others may follow within that time

ADVICE = "the engine cannot go on, close it and make a new one"

Build = Callable[[Rendezvous, bytes], Callable[[bytes], None]]  # from the first message, what handles all others


class WorkerError(RuntimeError):
    """Another rank died or failed; the engine it belonged to cannot go on."""


class Ranks:
    """Rank 0's connections to the other ranks, and the processes if it started them itself.

    Attributes:
        stop_waiting: ends this rank's waits for the others; called from the watching thread, and may not block.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.stop_waiting: Callable[[], None] = do_nothing
        self._size = rendezvous.size
        self._processes: dict[int, subprocess.Popen] = {}  # by rank
        self._connections: dict[int, Connection] = {}  # by rank
        self._owner = os.getpid()
        self._lock = threading.RLock()  # the engine may be collected, and so closed, in any thread
        self._failing = threading.Event()  # set before anything invalid can be seen
        self._failed = threading.Event()  # set when the reason is known
        self._reason = ""
        try:
            if rendezvous.is_torchrun:
                self._connections = _accept_workers(rendezvous)
            else:
                for rank in range(1, rendezvous.size):
                    self._processes[rank], self._connections[rank] = _start_worker(rendezvous, rank)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send a message of any length to every other rank."""
        self.check()
        try:
            for connection in self._connections.values():
                connection.send_bytes(message)
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
        """Give the ranks up."""
        self._give_up(lambda: f"{reason}; {ADVICE}")
        raise WorkerError(self._reason)

    def close(self) -> None:
        """End the workers. A second call does nothing, and neither does one in a forked child of rank 0."""
        if os.getpid() != self._owner:
            return
        self._give_up(lambda: "the engine was closed")
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _watch(self) -> None:
        while not self._failing.is_set():
            signs = wait(self._connections.values(), WATCH_INTERVAL)
            if signs or any(process.poll() is not None for process in self._processes.values()):
                self._give_up(self._find_cause)

    def _give_up(self, find_reason: Callable[[], str]) -> None:
        """End every wait for the workers, note the reason, end the workers. Only the first call does anything."""
        with self._lock:
            if self._failing.is_set():
                return
            self._failing.set()
            try:
                self.stop_waiting()
                self._reason = find_reason()
            finally:
                self._failed.set()
                for connection in self._connections.values():
                    _hang_up(connection)  # a worker exits when its connection breaks
                for process in self._processes.values():
                    process.kill()

    def _find_cause(self) -> str:
        """What happened to which rank: when one has died, others may report broken connections before it is noticed."""
        ranks = {connection: rank for rank, connection in self._connections.items()}
        reports: dict[int, str] = {}
        died: list[int] = []
        deadline = time.monotonic() + CAUSE_SECONDS
        while ranks and (seconds := deadline - time.monotonic()) > 0:
            for connection in wait(ranks, min(seconds, WATCH_INTERVAL)):
                try:
                    reports.setdefault(ranks[connection], connection.recv_bytes().decode(errors="replace"))
                except (EOFError, OSError):
                    died.append(ranks.pop(connection))
            ended = [rank for rank, process in self._processes.items() if process.poll() is not None]
            died += [rank for rank in ended if rank not in died]
        silent = [rank for rank in died if rank not in reports]
        if silent:
            return f"rank {silent[0]} of {self._size} died{self._exit_status(silent[0])}; {ADVICE}"
        rank, report = next(iter(reports.items()))
        return f"rank {rank} of {self._size} failed; {ADVICE}\n{report}"

    def _exit_status(self, rank: int) -> str:
        process = self._processes.get(rank)
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process is not None and (code := process.wait(1)) is not None:
                return f" ({signal.Signals(-code).name})" if code < 0 else f" (exit code {code})"
        return ""


def _start_worker(rendezvous: Rendezvous, rank: int) -> tuple[subprocess.Popen, Connection]:
    """A worker process. It is not forked and does not import the caller's main module, which may have no guard."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    if torch.get_num_threads() > 1:  # CPU ranks share the cores
        environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // rendezvous.size))
    own, other = socket.socketpair()
    with own, other:
        arguments = map(str, (os.getpid(), other.fileno(), rendezvous.store.port, rank, rendezvous.size))
        process = subprocess.Popen(
            [sys.executable, "-P", SCRIPT, *arguments], env=environment, pass_fds=[other.fileno()]
        )
        return process, Connection(own.detach())


def _accept_workers(rendezvous: Rendezvous) -> dict[int, Connection]:
    """Wait until the processes that torchrun started have connected; strangers without the key are turned away."""
    connections: dict[int, Connection] = {}
    key = secrets.token_bytes(32)
    with Listener((os.environ["MASTER_ADDR"], 0), backlog=rendezvous.size, authkey=key) as listener:
        rendezvous.store.set("control", json.dumps([*listener.address[:2], key.hex()]))
        deadline = time.monotonic() + CONNECT_TIMEOUT

        def accept() -> None:
            while len(connections) < rendezvous.size - 1 and time.monotonic() < deadline:
                with contextlib.suppress(AuthenticationError, EOFError, OSError, ValueError):
                    connection = _without_delay(listener.accept())
                    connections[int(connection.recv_bytes())] = connection

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        thread.join(CONNECT_TIMEOUT)
    if len(connections) < rendezvous.size - 1:
        raise WorkerError(f"the other ranks did not connect within {CONNECT_TIMEOUT:.0f} s")
    return connections


def work_for_torchrun(rendezvous: Rendezvous, build: Build) -> NoReturn:
    """The life of a process that torchrun started and that is not rank 0."""
    host, port, key = json.loads(rendezvous.store.get("control"))
    connection = _without_delay(Client((host, port), authkey=bytes.fromhex(key)))
    connection.send_bytes(str(rendezvous.rank).encode())
    _work(connection, lambda: rendezvous, build)


def work_for_parent(file_number: int, port: int, rank: int, size: int, build: Build) -> NoReturn:
    """The life of a worker that rank 0 started, with an inherited connection and the port of rank 0's store."""

    def join() -> Rendezvous:
        timeout = timedelta(seconds=CONNECT_TIMEOUT)
        return Rendezvous(dist.TCPStore(LOOPBACK, port, size, is_master=False, timeout=timeout), rank, size)

    _work(Connection(file_number), join, build)


def _work(connection: Connection, join: Callable[[], Rendezvous], build: Build) -> NoReturn:
    """Build from the first message, then handle every further one, until rank 0 hangs up."""
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                messages.put(connection.recv_bytes())
        os._exit(0)  # rank 0 is gone: leave now, even from the middle of a collective

    threading.Thread(target=receive, daemon=True).start()
    try:
        handle = build(join(), messages.get())
        while True:
            handle(messages.get())
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send_bytes(traceback.format_exc().strip().encode())
        time.sleep(2 * CAUSE_SECONDS)  # let rank 0 read it before the connections break
        os._exit(1)


def finish_or_raise(work: Callable[[], object], check: Callable[[], None]) -> object:
    """What `work` returns. It may block for ever where a rank has died, so it has a thread of its own.

    `check` is called meanwhile, and ends the wait by raising; the thread is then left to itself.
    """
    outcome: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    while True:
        with contextlib.suppress(queue.Empty):
            result, error = outcome.get(timeout=0.02)
            break
        check()
    if error is not None:
        raise error
    return result


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the block is done: rank 0 may not leave a step in which the others wait for it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if interrupted.is_set():
            signal.raise_signal(signal.SIGINT)


def do_nothing() -> None:
    """What stands where there is nobody to ask and nothing to end."""


def _hang_up(connection: Connection) -> None:
    """Break a connection that another thread may be using: closing it would free its number for another file."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


def _without_delay(connection: Connection) -> Connection:
    """Switch Nagle's algorithm off: a small message must not wait for the acknowledgement of the one before."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
