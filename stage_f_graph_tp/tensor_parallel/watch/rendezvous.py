"""How the ranks of one engine find each other: through a small table in rank 0's process that all can read and write.

The table is PyTorch's `TCPStore`. It listens on the loopback address, on a free port that the operating system picks,
so that any number of engines run on one machine. Under `torchrun` the processes exist already, possibly on several
machines, and the store is torchrun's; everything else is the same.

Every process that can connect to the store can write to it. Therefore its values are text and are never unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
START_SECONDS = 1800.0  # until all ranks have the model, have loaded it and recorded their graphs
HOST_SECONDS = 5  # without a sign of life from another host, until it counts as gone


class WatchedStore(dist.Store):
    """A store whose waits end when a rank has died: `check` is called while waiting, and raises."""

    def __init__(self, store: dist.Store, check: Callable[[], None]) -> None:
        super().__init__()
        self._store = store
        self._check = check

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait without a time limit: every rank that is alive sets its keys."""
        while not self._store.check(keys):
            self._check()
            time.sleep(0.005)


@dataclass(frozen=True)
class Rendezvous:
    """The store of one engine and this process's place among its ranks."""

    store: dist.Store
    rank: int
    size: int
    is_torchrun: bool = False

    @property
    def own_address(self) -> str:
        """The address at which the other ranks reach this one: of the interface that leads to rank 0's host."""
        if not self.is_torchrun:
            return LOOPBACK
        master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        family, kind, *_, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: it only looks up the route
            return probe.getsockname()[0]

    def device(self, device: torch.device) -> torch.device:
        """Return this rank's device: with GPUs, the one of its number on this machine."""
        if device.type != "cuda":
            return device
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) if self.is_torchrun else self.rank)

    def of_attempt(self, name: str) -> Rendezvous:
        """Give the same ranks keys of their own: torchrun's store still has those of ranks that failed before."""
        return replace(self, store=dist.PrefixStore(name, self.store))

    def gather(self, key: str, value: str, check: Callable[[], None]) -> list[str]:
        """Publish this rank's value under `key` and wait for the other ranks' values; returns all of them, by rank.

        A collective on the GPUs could do this too, but if a rank failed it would never end. Here `check` is called
        while waiting, and ends the wait by raising.
        """
        store = WatchedStore(self.store, check)
        store.set(f"{key}/{self.rank}", value)
        return [store.get(f"{key}/{rank}").decode() for rank in range(self.size)]


def started_by_torchrun() -> bool:
    """Tell whether `torchrun` started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def open_rendezvous(size: int, asked: str = "") -> Rendezvous:
    """Join the processes of torchrun, or open a store on this machine as rank 0.

    Args:
        size: the number of ranks.
        asked: the options that ask for them, as an error names them.

    Raises:
        ValueError: torchrun started another number of processes.
    """
    if not started_by_torchrun():
        with socket.create_server((LOOPBACK, 0)) as server:  # the store by itself would listen on every address
            port = server.getsockname()[1]
            store = dist.TCPStore(
                LOOPBACK, port, size, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(server.fileno())
            )
        return Rendezvous(store, 0, size)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != size:
        raise ValueError(f"{asked}, but torchrun started {world_size} processes")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # The store is torchrun's own, but with some of its rendezvous backends it only reserves the port for rank 0.
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=START_SECONDS)  # rank 0's host may have to download the model first
    store = dist.TCPStore(host, port, is_master=opens, wait_for_workers=False, timeout=timeout)
    return Rendezvous(store, rank, size, True)


def accept_workers(rendezvous: Rendezvous) -> tuple[Rendezvous, dict[int, Connection]]:
    """Wait for the processes that torchrun started to connect to rank 0.

    Connections without the key, which rank 0 puts into the store, are refused.

    Returns:
        the rendezvous of these processes alone, and the connections, by rank, of those that come within the time limit.
    """
    connections: dict[int, Connection] = {}
    key = secrets.token_bytes(32)
    with Listener((os.environ["MASTER_ADDR"], 0), backlog=rendezvous.size, authkey=key) as listener:
        rendezvous.store.set("control", json.dumps([*listener.address[:2], key.hex()]))
        deadline = time.monotonic() + START_SECONDS

        def accept() -> None:
            while len(connections) < rendezvous.size - 1 and time.monotonic() < deadline:
                with contextlib.suppress(AuthenticationError, EOFError, OSError, ValueError):
                    connection = watched(listener.accept())
                    connections[int(connection.recv_bytes())] = connection

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        thread.join(START_SECONDS)
    return rendezvous.of_attempt(key.hex()), connections


def connect_to_rank_0(rendezvous: Rendezvous) -> tuple[Rendezvous, Connection]:
    """As a process that torchrun started, connect to rank 0. The store may still have the address of one that failed.

    Returns:
        the rendezvous of the processes that are connected, and the connection.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        host, port, key = json.loads(rendezvous.store.get("control"))
        try:
            connection = watched(Client((host, port), authkey=bytes.fromhex(key)))
        except (AuthenticationError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
            continue
        connection.send_bytes(str(rendezvous.rank).encode())
        return rendezvous.of_attempt(key), connection


def watched(connection: Any) -> Connection:
    """Make a TCP connection break within seconds of the other host's disappearance, and send messages at once.

    A host that loses its power or its network closes nothing. So the kernel asks an idle connection's other end every
    second for a sign of life, and gives up when none comes. (Nagle's algorithm would hold a small message back until
    the one before is acknowledged.)
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, 1),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_KEEPCNT, HOST_SECONDS),
            (socket.TCP_USER_TIMEOUT, 1000 * HOST_SECONDS),  # where something was sent and not acknowledged
        ):
            same.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection
