"""How the ranks of one engine find each other: through a key-value store in rank 0's process.

The store is PyTorch's `TCPStore`. All ranks can read and write it. It listens on the loopback address, on a free port
that the operating system picks, so that any number of engines run on one machine.

Every process that can connect to the store can write to it. Therefore its values are text and are never unpickled.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
START_SECONDS = 1800.0  # until all ranks have downloaded and loaded the model and recorded their graphs


class WatchedStore(dist.Store):
    """A store whose waits end when a rank dies: it calls `check` while it waits, which raises."""

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
        """Wait without a time limit: every live rank sets its keys."""
        while not self._store.check(keys):
            self._check()
            time.sleep(0.005)


@dataclass(frozen=True)
class Rendezvous:
    """The store of one engine, and this process's rank."""

    store: dist.Store
    rank: int
    size: int
    has_hosts: ClassVar[bool] = False  # whether a rank may be on another machine

    @property
    def own_address(self) -> str:
        """The address at which the other ranks reach this one."""
        return LOOPBACK

    def device(self, device: torch.device) -> torch.device:
        """Return this rank's device: the GPU with its number, or the CPU."""
        return torch.device("cuda", self.rank) if device.type == "cuda" else device

    def gather(self, key: str, value: str, check: Callable[[], None]) -> list[str]:
        """Publish this rank's value under `key` and wait for the other ranks' values; returns all of them, by rank.

        A collective on the GPUs would never end if a rank failed. Here `check` is called while waiting, and ends the
        wait by raising.
        """
        store = WatchedStore(self.store, check)
        store.set(f"{key}/{self.rank}", value)
        return [store.get(f"{key}/{rank}").decode() for rank in range(self.size)]


def open_rendezvous(size: int) -> Rendezvous:
    """Open a store on this machine, as rank 0 of `size`."""
    with socket.create_server((LOOPBACK, 0)) as server:  # by default the store would listen on every address
        port = server.getsockname()[1]
        store = dist.TCPStore(
            LOOPBACK, port, size, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(server.fileno())
        )
    return Rendezvous(store, 0, size)
