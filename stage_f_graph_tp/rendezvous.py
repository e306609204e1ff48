"""Where the ranks of one engine find each other.

A `TCPStore` is a small table that all ranks can read and write. It listens on a free port that the operating system
picks, so that any number of engines live on one machine. Started by `torchrun`, the processes are there already,
possibly on several machines, and the store is torchrun's; everything else is the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one engine meet."""

    store: dist.TCPStore
    rank: int
    size: int
    is_torchrun: bool

    def device(self, device: torch.device) -> torch.device:
        """This rank's device: with GPUs, the one of its number on this machine."""
        if device.type != "cuda":
            return device
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) if self.is_torchrun else self.rank)

    def agree(self, key: str, value: int, check: Callable[[], None]) -> list[int]:
        """Wait until every rank has said its value under `key`; returns all of them, by rank.

        The store is asked and not the GPUs, where a rank that failed would leave the others waiting in a collective.
        `check` is called meanwhile, and ends the wait by raising.
        """
        self.store.set(f"{key}/{self.rank}", str(value))
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        while not self.store.check(keys):
            check()
            time.sleep(0.005)
        return [int(self.store.get(key)) for key in keys]


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def rendezvous(size: int) -> Rendezvous:
    """Meet under torchrun, or open a meeting place on this machine as rank 0.

    Raises:
        ValueError: torchrun started another number of processes.
    """
    if not started_by_torchrun():
        store = dist.TCPStore(LOOPBACK, 0, size, is_master=True, wait_for_workers=False)
        return Rendezvous(store, 0, size, False)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != size:
        raise ValueError(f"tensor_parallel_size={size}, but torchrun started {world_size} processes")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # The store is torchrun's own, but with some of its ways to meet it only reserves the port for rank 0.
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(host, port, is_master=opens, wait_for_workers=False)
    return Rendezvous(store, rank, size, True)
