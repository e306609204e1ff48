"""The worker's side: connect to rank 0, build this rank's share from the first message, execute the others.

Commands are numbered; a command out of sequence ends the worker.

A worker exits as soon as its connection to rank 0 breaks, also in the middle of a collective.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NoReturn

import torch.distributed as dist

from stage_f_graph_tp.tensor_parallel.watch.rendezvous import LOOPBACK, START_SECONDS, Rendezvous
from stage_f_graph_tp.tensor_parallel.watch.workers import (
    CAUSE,
    CAUSE_SECONDS,
    CONSEQUENCE,
    NUMBER,
    BrokenCollective,
    Build,
    check_number,
)


def run_worker(build: Build, file_number: int, port: int, rank: int, size: int) -> NoReturn:
    """Execute rank 0's commands in a process that rank 0 started.

    Args:
        build: see `Workers`.
        file_number: of the inherited connection.
        port: of rank 0's store.
    """

    def join() -> Rendezvous:
        timeout = timedelta(seconds=START_SECONDS)
        return Rendezvous(dist.TCPStore(LOOPBACK, port, size, is_master=False, timeout=timeout), rank, size)

    execute_commands(Connection(file_number), join, build)


def execute_commands(connection: Connection, join: Callable[[], Rendezvous], build: Build) -> NoReturn:
    """Build from the first message, then execute every further one, until the connection ends."""
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while True:
                messages.put(connection.recv_bytes())
        except TimeoutError:
            print("error: no sign of life from rank 0's host", file=sys.stderr, flush=True)
            os._exit(1)
        except (EOFError, OSError):
            os._exit(0)  # rank 0 has ended: exit now, even in the middle of a collective

    def next_message() -> bytes:
        message = messages.get()
        [number] = NUMBER.unpack_from(message)
        check_number(number, next(numbers))
        return message[NUMBER.size :]

    numbers = itertools.count()
    threading.Thread(target=receive, daemon=True).start()
    try:
        execute = build(join(), next_message())
        while True:
            execute(next_message())
    except BaseException as error:
        summary = traceback.format_exception_only(error)[0].splitlines()[0]  # the last line may be advice: CUDA's is
        kind = CONSEQUENCE if isinstance(error, BrokenCollective) else CAUSE
        with contextlib.suppress(OSError):
            connection.send_bytes(f"{kind}\n{summary}\n{traceback.format_exc().strip()}".encode())
        time.sleep(2 * CAUSE_SECONDS)  # let rank 0 read the report before the connections break
        os._exit(1)
