"""Ranks on several machines, started by torchrun: connect to rank 0, and detect a host that disappears.

Every process on the network that reaches torchrun's store can read it. So rank 0 opens a separate listener, puts its
address and key into the store, and sends its commands over these connections. Received data is never unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from stage_f_graph_tp.tensor_parallel import Build, Rendezvous, WorkerError, Workers
from stage_f_graph_tp.tensor_parallel.watch.rendezvous import START_SECONDS
from stage_f_graph_tp.tensor_parallel.watch.worker_loop import execute_commands

HOST_SECONDS = 5  # without a reply from another host until it counts as lost


@dataclass(frozen=True)
class HostsRendezvous(Rendezvous):
    """The store of the ranks that torchrun started, and this process's rank."""

    has_hosts: ClassVar[bool] = True

    @property
    def own_address(self) -> str:
        """The address at which other ranks reach this one: that of the interface with the route to rank 0's host."""
        master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        family, kind, *_, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: it only looks up the route
            return probe.getsockname()[0]

    def device(self, device: torch.device) -> torch.device:
        """Return this rank's device: the GPU with its local rank, or the CPU."""
        return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device.type == "cuda" else device

    def of_attempt(self, name: str) -> HostsRendezvous:
        """Prefix the ranks' keys with a name: torchrun's store still has keys of an earlier, failed attempt."""
        return replace(self, store=dist.PrefixStore(name, self.store))


def join_ranks(size: int, asked: str, build: Build) -> tuple[Rendezvous, Workers]:
    """Connect the processes that torchrun started. Returns on rank 0 only; the others execute its commands.

    Args:
        size, asked, build: as of stage F's `start_ranks`.

    Raises:
        ValueError: torchrun started another number of processes.
        WorkerError: one of them does not connect.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != size:
        raise ValueError(f"{asked}, but torchrun started {world_size} processes")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # The store usually belongs to torchrun, but some of its rendezvous backends only reserve the port for rank 0.
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=START_SECONDS)  # rank 0's host may have to download the model first
    store = dist.TCPStore(host, port, is_master=opens, wait_for_workers=False, timeout=timeout)
    rendezvous = HostsRendezvous(store, rank, size)
    if rank > 0:
        rendezvous, connection = connect_to_rank_0(rendezvous)
        execute_commands(connection, lambda: rendezvous, build)
    rendezvous, connections = accept_workers(rendezvous)
    return rendezvous, Workers(rendezvous, build, connections)


def accept_workers(rendezvous: HostsRendezvous) -> tuple[HostsRendezvous, dict[int, Connection]]:
    """Wait for the other ranks' processes to connect to rank 0.

    Connections without the key, which rank 0 puts into the store, are refused.

    Returns:
        the rendezvous of exactly these processes, and the connections, by rank.

    Raises:
        WorkerError: some did not connect within the time limit.
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
    if len(connections) < rendezvous.size - 1:
        for connection in connections.values():
            connection.close()
        raise WorkerError(f"the other ranks did not connect within {START_SECONDS:.0f} s")
    return rendezvous.of_attempt(key.hex()), connections


def connect_to_rank_0(rendezvous: HostsRendezvous) -> tuple[HostsRendezvous, Connection]:
    """Connect to rank 0. The store may still have the address of a failed rank 0.

    Returns:
        the rendezvous of the connected processes, and the connection.
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
    """Make a TCP connection break within seconds if the other host disappears, and send small messages at once.

    A host that loses power or network does not close its connections. So the kernel probes the other end of an idle
    connection every second, and gives up without a reply. (Nagle's algorithm would hold a small message back until the
    one before is acknowledged.)
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, 1),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_KEEPCNT, HOST_SECONDS),
            (socket.TCP_USER_TIMEOUT, 1000 * HOST_SECONDS),  # if sent data is not acknowledged
        ):
            same.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection
