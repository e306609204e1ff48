"""The other ranks: how they are started, told what to do, watched, and ended.

Rank 0 is the caller's process. It alone has the scheduler; each step, it sends every other rank the step's packed input
and computes its own share, and the collectives inside the model do the rest. Workers never answer, except to report
what went wrong.

`Ranks` is rank 0's handle on the others. Messages are byte strings of any length over authenticated connections
(`multiprocessing.connection`), whose address is published where the ranks meet (`rendezvous.py`).

A worker whose connection breaks exits at once, even in the middle of a collective. Rank 0 looks at the connections
whenever it waits for the device, so a dead worker is an error within a second and not a hang.
"""

from __future__ import annotations

import contextlib
import os
import pickle
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
from multiprocessing.connection import Client, Connection, Listener
from typing import NoReturn

import torch
import torch.distributed as dist

from stage_f_graph_tp.rendezvous import LOOPBACK, Rendezvous

START_TIMEOUT = 120.0  # seconds for a worker to import PyTorch and connect


class WorkerError(RuntimeError):
    """Another rank died or failed; the engine it belonged to cannot go on."""


class Ranks:
    """Rank 0's connections to the other ranks, and the processes if it started them itself.

    Attributes:
        failure: why the ranks cannot be used any more; "" while they can.
        leave_group: called once, when that happens: a collective that one of the ranks will never join must end.
    """

    def __init__(self, meeting: Rendezvous) -> None:
        self._processes: list[subprocess.Popen] = []
        self._connections: dict[int, Connection] = {}  # by rank
        self.failure = ""
        self.leave_group: Callable[[], None] = do_nothing
        key = secrets.token_bytes(32)
        host = os.environ["MASTER_ADDR"] if meeting.is_torchrun else LOOPBACK
        with Listener((host, 0), backlog=meeting.size, authkey=key) as listener:
            meeting.store.set("control", pickle.dumps((listener.address, key)))
            try:
                if not meeting.is_torchrun:
                    self._processes = [_start(meeting, rank) for rank in range(1, meeting.size)]
                self._accept(listener, meeting.size - 1)
            except BaseException:
                self.close()
                raise

    def _accept(self, listener: Listener, count: int) -> None:
        """Wait for every worker to connect, noticing one that dies before it does."""

        given_up = False

        def accept() -> None:
            while len(self._connections) < count and not given_up:
                with contextlib.suppress(AuthenticationError, EOFError, OSError):  # a stranger's connection, or ours
                    connection = _without_delay(listener.accept())
                    self._connections[int(connection.recv_bytes())] = connection

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        deadline = time.monotonic() + START_TIMEOUT
        try:
            while thread.is_alive():
                thread.join(0.05)
                codes = [p.returncode for p in self._processes if p.poll() is not None]
                if codes:
                    raise WorkerError(f"a worker ended with exit code {codes[0]} before it connected; see above")
                if time.monotonic() > deadline:
                    raise WorkerError(f"the workers did not connect within {START_TIMEOUT:.0f} s")
        finally:
            given_up = True
            with contextlib.suppress(OSError):  # wakes the thread up; closing the listener alone would not
                socket.create_connection(listener.address, 1).close()
            thread.join(5)

    def send(self, message: bytes) -> None:
        """Send a message of any length to every other rank."""
        self.check()
        try:
            for connection in self._connections.values():
                connection.send_bytes(message)
        except OSError as error:
            self.check()
            self.fail(f"a worker's connection broke: {error}")

    def check(self) -> None:
        """Raise `WorkerError` if another rank has failed or died."""
        if self.failure:
            raise WorkerError(self.failure)
        for rank, connection in self._connections.items():
            try:
                if connection.poll():
                    self.fail(f"rank {rank} failed:\n{connection.recv_bytes().decode()}")
            except (EOFError, OSError):
                self.fail(f"rank {rank} of {len(self._connections) + 1} died")

    def explain(self) -> None:
        """After a collective broke: raise what happened to the other rank, if that comes to light within a second."""
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            self.check()
            time.sleep(0.01)

    def fail(self, message: str) -> NoReturn:
        """Give the ranks up."""
        self.failure = message + "\nthe engine cannot go on; close it and make a new one"
        self.leave_group()
        raise WorkerError(self.failure)

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        if not self.failure:
            self.failure = "the engine was closed; make a new one"
            self.leave_group()
        for connection in self._connections.values():
            connection.close()  # a worker ends when its connection does
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._connections, self._processes = {}, []


def _start(meeting: Rendezvous, rank: int) -> subprocess.Popen:
    """A worker process. It is not forked and does not import the caller's main module, which may have no guard."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    if torch.get_num_threads() > 1:  # CPU ranks share the cores
        environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // meeting.size))
    address = [LOOPBACK, str(meeting.store.port), str(rank), str(meeting.size)]
    start = "import sys; from stage_f_graph_tp.worker import main; main(sys.argv[1:])"
    return subprocess.Popen([sys.executable, "-c", start, *address], env=environment)


def serve(meeting: Rendezvous, build: Callable[[Rendezvous, object], Callable[[bytes], None]]) -> None:
    """A worker's life: build from the first message, then handle every further one, until rank 0 hangs up.

    Args:
        build: called with the first message, unpickled; returns what handles the others.
    """
    address, key = pickle.loads(meeting.store.get("control"))
    connection = _without_delay(Client(address, authkey=key))
    connection.send_bytes(str(meeting.rank).encode())
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                messages.put(connection.recv_bytes())
        os._exit(0)  # rank 0 is gone: leave now, even from the middle of a collective

    threading.Thread(target=receive, daemon=True).start()
    try:
        handle = build(meeting, pickle.loads(messages.get()))
        while True:
            handle(messages.get())
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send_bytes(traceback.format_exc().strip().encode())
        time.sleep(1)  # let rank 0 read it before the connection breaks
        os._exit(1)


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


def _without_delay(connection: Connection) -> Connection:
    """Switch Nagle's algorithm off: a small message must not wait for the acknowledgement of the one before."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def main(argv: list[str]) -> None:
    """Entry point of a worker process that rank 0 started."""
    from stage_f_graph_tp.rank import build_worker  # here: the model's modules import this one

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; what it ends is rank 0's to say
    host, port, rank, size = argv[0], *map(int, argv[1:])
    store = dist.TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=START_TIMEOUT))
    serve(Rendezvous(store, rank, size, False), build_worker)
