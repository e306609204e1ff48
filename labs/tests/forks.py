"""Ranks as forks of this process: they start at once, and inherit its changed modules."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import threading
from multiprocessing.connection import Connection

from stage_f_graph_tp.tensor_parallel import Build, Rendezvous
from stage_f_graph_tp.tensor_parallel.watch.worker_loop import run_worker
from stage_f_graph_tp.tensor_parallel.watch.worker_process import end_with


class Fork(multiprocessing.get_context("fork").Process):
    """A process with the interface of `subprocess.Popen`."""

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.join(timeout)
        return self.exitcode


def fork_worker(rendezvous: Rendezvous, rank: int, build: Build) -> tuple[Fork, Connection]:
    """Start a rank; replaces `workers._start_worker`."""
    own, other = socket.socketpair()
    parent = os.getpid()

    def run() -> None:
        gc.freeze()  # garbage belongs to the parent: a group would wait for threads that the fork does not have
        gc.enable()
        own.close()
        threading.Thread(target=end_with, args=(parent,), daemon=True).start()
        run_worker(build, other.detach(), rendezvous.store.port, rank, rendezvous.size)

    process = Fork(target=run, daemon=True)
    gc.disable()  # in the fork too, where libraries' hooks run before `run`
    try:
        with other:
            process.start()
    finally:
        gc.enable()
    return process, Connection(own.detach())
