"""Where the ranks of one engine find each other.

A `TCPStore` is a small table that all ranks can read and write. It listens on the loopback address, on a free port that
the operating system picks, so that any number of engines live on one machine. Started by `torchrun`, the processes are
there already, possibly on several machines, and the store is torchrun's; everything else is the same.

Whoever reaches the store can write to it. So what is read from it is text, never unpickled.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"


class WatchedStore(dist.Store):
    """A store whose waits end when a rank has died: `check` is called meanwhile, and raises."""

    def __init__(self, store: dist.Store, check: Callable[[], None]) -> None:
        super().__init__()
        self._store = store
        self._check = check

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """However long it takes: a rank that lives will come."""
        while not self._store.check(keys):
            self._check()
            time.sleep(0.005)


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one engine meet."""

    store: dist.Store
    rank: int
    size: int
    is_torchrun: bool = False

    def device(self, device: torch.device) -> torch.device:
        """This rank's device: with GPUs, the one of its number on this machine."""
        if device.type != "cuda":
            return device
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) if self.is_torchrun else self.rank)

    def agree(self, key: str, value: str, check: Callable[[], None]) -> list[str]:
        """Wait until every rank has said its value under `key`; returns all of them, by rank.

        The store is asked and not the GPUs, where a rank that failed would leave the others waiting in a collective.
        `check` is called meanwhile, and ends the wait by raising.
        """
        store = WatchedStore(self.store, check)
        store.set(f"{key}/{self.rank}", value)
        return [store.get(f"{key}/{rank}").decode() for rank in range(self.size)]


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def rendezvous(size: int) -> Rendezvous:
    """Meet under torchrun, or open a store on this machine as rank 0.

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
        raise ValueError(f"tensor_parallel_size={size}, but torchrun started {world_size} processes")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # The store is torchrun's own, but with some of its ways to meet it only reserves the port for rank 0.
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(host, port, is_master=opens, wait_for_workers=False)
    return Rendezvous(store, rank, size, True)
