"""The ranks of one engine and what they do together: add tensors up, gather them, hand one out.

Small sums, those of decode steps, are made by a kernel of our own where the GPUs can read one another's memory
(`exchange.py`); all else is NCCL's, or gloo's between CPU processes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from stage_f_graph_tp.rendezvous import LOOPBACK, Rendezvous, WatchedStore
from stage_f_graph_tp.worker import do_nothing, finish_or_raise

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
CONNECT_TIMEOUT = timedelta(seconds=0.5)  # of an attempt of gloo's, which makes five, a second apart
ENQUEUE_SECONDS = 1.0  # how long an abort waits for a launch under way, which may itself be what is blocked


class RankGroup:
    """The ranks of one engine: NCCL between GPUs, gloo between CPU processes.

    The group is an object and not PyTorch's global default group, so that several engines fit into one process. A CUDA
    graph that recorded collectives has to be released before the group is: NCCL waits for it.

    Args:
        rendezvous: where the ranks find each other.
        device: this rank's device.
        check: called while waiting for the other ranks, and ends the wait by raising.
    """

    def __init__(self, rendezvous: Rendezvous, device: torch.device, check: Callable[[], None] = do_nothing) -> None:
        self.rank = rendezvous.rank
        self.size = rendezvous.size
        self.device = device
        self.exchange = None
        self._rendezvous = rendezvous
        self._check = check
        self._group: dist.ProcessGroupNCCL | dist.ProcessGroupGloo | None = None
        self._enqueuing = threading.Lock()
        self._released = False
        self._abort: threading.Thread | None = None

    def connect(self) -> None:
        """Make the connections; all ranks call it, when each is there."""
        if self.device.type == "cuda":
            self._group = finish_or_raise(partial(_nccl_group, self._rendezvous, self.device), self._check)
            self._open_exchange()
        else:
            self._group = _gloo_group(self._rendezvous, self._check)

    def _open_exchange(self) -> None:
        from stage_f_graph_tp.exchange import PeerExchange  # imports Triton, which is not everywhere

        self.exchange = PeerExchange(self.rank, self.size, self.device)
        reason = self.exchange.open(partial(self._rendezvous.agree, check=self._check))
        if reason is not None:
            self.exchange = None
            if self.rank == 0:
                print(f"one-shot all-reduce: not used, NCCL adds up small tensors too ({reason})", file=sys.stderr)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum of all ranks' `x`, written over `x`; or, given a residual, added to it, in place."""
        if self.exchange is not None and self.exchange.takes(x):
            return self.exchange.add_up(x, residual)
        self._run("allreduce", [x])
        return x if residual is None else residual.add_(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x [rows, columns]` side by side: `[rows, size * columns]`."""
        parts = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        self._run("allgather", [list(parts.unbind(0))], [x.contiguous()])
        return parts.transpose(0, 1).flatten(1)

    def broadcast(self, x: Tensor) -> None:
        """Rank 0's `x`, written over everybody else's."""
        self._run("broadcast", x, 0)

    def _run(self, collective: str, *args: object) -> None:
        """Run one of the library's collectives: on a GPU enqueue it, on a CPU wait for it."""
        with self._enqueuing:
            if self._released:
                raise RuntimeError("the other ranks have been released")
            work = getattr(self._group, collective)(*args)
        work.wait()

    def stop_waiting(self) -> None:
        """End all waits for the other ranks, now and from now on; what collectives return is invalid.

        Any thread may call it, and it does not block. (gloo's waits end when the other ranks' processes do.)
        """
        if self.exchange is not None:
            self.exchange.stop()
        if self.device.type == "cuda" and self._group is not None and self._abort is None:
            self._abort = threading.Thread(target=self._abort_library, daemon=True)
            self._abort.start()

    def _abort_library(self) -> None:
        """Tell NCCL's kernels to end. NCCL returns when no CUDA graph holds its communicator any more."""
        idle = self._enqueuing.acquire(timeout=ENQUEUE_SECONDS)  # it may not be freed in the middle of a call
        self._released = True
        if idle:
            self._enqueuing.release()
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def wait_released(self, seconds: float) -> None:
        """Wait until NCCL has let its memory go, after `stop_waiting`."""
        if self._abort is not None:
            self._abort.join(seconds)


def _gloo_group(rendezvous: Rendezvous, check: Callable[[], None]) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = CONNECT_TIMEOUT
    if rendezvous.is_torchrun:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    else:
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    store = WatchedStore(dist.PrefixStore("group", rendezvous.store), check)
    group = dist.ProcessGroupGloo(store, rendezvous.rank, rendezvous.size, options)
    group._set_default_timeout(COLLECTIVE_TIMEOUT)
    return group


def _nccl_group(rendezvous: Rendezvous, device: torch.device) -> dist.ProcessGroupNCCL:
    # PyTorch would end the whole process when a collective fails; here that is an error of one engine.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    torch.cuda.set_device(device)  # of this thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = COLLECTIVE_TIMEOUT
    store = dist.PrefixStore("group", rendezvous.store)
    group = dist.ProcessGroupNCCL(store, rendezvous.rank, rendezvous.size, options)
    group.allreduce([torch.zeros(1, device=device)]).wait()  # makes the connections
    torch.cuda.synchronize(device)
    return group
