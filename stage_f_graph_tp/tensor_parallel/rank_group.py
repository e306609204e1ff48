"""The collectives of one engine's ranks: all-reduce, all-gather, all-to-all, broadcast.

If the GPUs can write one another's memory, our own kernel (`all_reduce.py`) does the small all-reduces of a decode
step, and all all-reduces of two ranks. NCCL does everything else, or gloo between CPU processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from stage_f_graph_tp.tensor_parallel.watch.rendezvous import Rendezvous, WatchedStore
from stage_f_graph_tp.tensor_parallel.watch.workers import BrokenCollective, Workers, check_number

if TYPE_CHECKING:  # only GPUs need Triton
    from stage_f_graph_tp.tensor_parallel.all_reduce import OneShotAllReduce

SHORT = 2**21  # bytes of a tensor; between more than two ranks, NCCL sends less than our kernel for longer ones
COLLECTIVE_TIMEOUT = timedelta(days=1)  # gloo requires one; `Workers.awaited` limits rank 0's waits
POLL_SECONDS = 0.0001  # between rank 0's polls of a collective on CPUs
CONNECT_TIMEOUT = timedelta(seconds=0.5)  # per attempt; gloo makes five, a second apart
ENQUEUE_SECONDS = 1.0  # how long an abort waits for a current launch, which may itself be blocked
ABORT_SECONDS = 10.0  # for NCCL to release its memory when the program ends


class RankGroup:
    """The ranks of one engine: NCCL between GPUs, gloo between CPU processes.

    The group is an object, not PyTorch's global default group, so that one process can have several engines. A CUDA
    graph that recorded collectives must be released before the group: NCCL waits for that.

    Args:
        rendezvous: where the ranks find each other.
        device: this rank's device.
        workers: rank 0's handle on the others, which reports dead ranks; None on the others.
        uses_one_shot: sum small tensors with our own kernel, if possible.
        pdl: launch that kernel by PDL, if the GPU can.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        device: torch.device,
        workers: Workers | None = None,
        uses_one_shot: bool = True,
        pdl: bool = True,
    ) -> None:
        self._uses_one_shot, self._pdl = uses_one_shot, pdl
        self.rank = rendezvous.rank
        self.size = rendezvous.size
        self.device = device
        self.one_shot: OneShotAllReduce | None = None
        self._rendezvous = rendezvous
        self._check: Callable[[], None] = lambda: None
        self._awaited: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._group: dist.ProcessGroupNCCL | dist.ProcessGroupGloo | None = None
        self._enqueuing = threading.Lock()
        self._released = False
        self._stopping = threading.Event()
        self._abort: threading.Thread | None = None
        self._is_watching = workers is not None
        # A connection to a host that has disappeared does not break: gloo would wait for a minute.
        self._may_lose_hosts = rendezvous.has_hosts and device.type == "cpu" and workers is not None
        if workers is not None:
            self._check = workers.check
            self._awaited = workers.awaited
            workers.end_waits_of(self)

    def gather(self, key: str, value: str = "") -> list[str]:
        """See `Rendezvous.gather`: through the store, before there are collectives."""
        return self._rendezvous.gather(key, value, self._check)

    def connect(self) -> None:
        """Connect to the other ranks. All ranks call it, once each of them is known to be ready."""
        if self.device.type == "cuda":
            self._group = _nccl_group(self._rendezvous)
            # The thread starts now, because a program that is ending cannot start one. It must end before the
            # interpreter: a thread that returns from NCCL after that aborts the process.
            self._abort = threading.Thread(target=self._abort_library, daemon=True)
            self._abort.start()
            weakref.finalize(self, _finish_abort, self._stopping, self._abort)
            finish_or_raise(self._connect_nccl, self._check)
            if self._uses_one_shot:
                self._open_one_shot()
        else:
            self._group = _gloo_group(self._rendezvous, self._check)

    def _connect_nccl(self) -> None:
        """Run a first collective, which opens NCCL's connections."""
        torch.cuda.set_device(self.device)  # of this thread
        self._run("allreduce", [torch.zeros(1, device=self.device)])
        torch.cuda.synchronize(self.device)

    def _open_one_shot(self) -> None:
        from stage_f_graph_tp.tensor_parallel.all_reduce import OneShotAllReduce  # here: only GPUs need Triton

        self.one_shot = OneShotAllReduce(self.rank, self.size, self.device, self._pdl)
        reason = self.one_shot.open(self.gather)
        if reason is not None:
            self.one_shot = None
            if self.rank == 0:
                print(f"one-shot all-reduce: not used, NCCL adds up small tensors too ({reason})", file=sys.stderr)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Sum all ranks' `x`, written over `x`; or, given a residual, added to it, in place."""
        is_one_shot = self.size == 2 or x.nbytes <= SHORT
        if self.one_shot is not None and is_one_shot and self.one_shot.supports(x):
            return self.one_shot(x, residual)
        self._run("allreduce", [x])
        return x if residual is None else residual.add_(x)

    def stack(self, x: Tensor) -> Tensor:
        """Gather all ranks' `x`, in the order of the ranks: `[size, *x.shape]`."""
        parts = x.new_empty(self.size, *x.shape)
        if self.one_shot is not None and parts.nbytes <= SHORT and self.one_shot.supports(parts):
            parts.zero_()  # adding zeros to another rank's part is exact
            parts[self.rank] = x
            return self.one_shot(parts, None)
        self._run("allgather", [list(parts.unbind(0))], [x.contiguous()])
        return parts

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather all ranks' `x [rows, columns]` side by side: `[rows, size * columns]`."""
        return self.stack(x).transpose(0, 1).flatten(1)

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows of `x` to the ranks, in their order, and return those that arrive, in the order of the ranks.

        Args:
            sent: rows for each rank; together all of `x`.
            received: rows from each rank.
        """
        arrived = x.new_empty(sum(received), *x.shape[1:])
        self._run("alltoall_base", arrived, x.contiguous(), received, sent)
        return arrived

    def broadcast(self, x: Tensor) -> None:
        """Overwrite `x` on all other ranks with rank 0's."""
        if self.size > 1:
            self._run("broadcast", x, 0)

    def agree_on(self, number: int) -> None:
        """Check that rank 0 executes the same command as this rank. CPU ranks do this first in every command.

        Between GPUs the message would cost launches, and a wait for its result.

        Raises:
            RuntimeError: it executes another command.
        """
        if self.size > 1 and self.device.type == "cpu":
            found = torch.tensor([number])
            self._run("broadcast", found, 0)
            check_number(int(found), number)

    def _run(self, collective: str, *args: Any) -> None:
        """Run a collective of the library: enqueue it on a GPU, wait for it on a CPU."""
        self._wait(self._start(collective, *args))

    def _start(self, collective: str, *args: Any) -> dist.Work:
        with self._enqueuing:
            if self._released:
                raise RuntimeError("the other ranks have been released")
            return getattr(self._group, collective)(*args)

    def _wait(self, work: dist.Work) -> None:
        if self.device.type == "cuda":
            work.wait()  # the device waits, not the host
            return
        with self._awaited():
            try:
                while self._is_watching and not work.is_completed():  # gloo's wait may outlast the ranks it waits for
                    self._check()
                    time.sleep(POLL_SECONDS)
            except BaseException:
                _never_free(work)  # gloo still runs it, and would free its tensors, perhaps after the interpreter
                raise
            try:
                work.wait()
            except RuntimeError as error:
                raise BrokenCollective(str(error)) from error

    def stop_waiting(self) -> None:
        """End all current and future waits for the other ranks; the results of all collectives are invalid.

        Any thread may call it, and it does not block. (On CPUs, `_wait` leaves them.)
        """
        if self.one_shot is not None:
            self.one_shot.stop()
        if self._may_lose_hosts and self._group is not None:
            _never_free(self._group)  # not even at the program's end: gloo would first wait for the lost host
        self._stopping.set()

    def _abort_library(self) -> None:
        """End NCCL's kernels once `stop_waiting` was called. Blocks until no CUDA graph holds NCCL's communicator."""
        self._stopping.wait()
        idle = self._enqueuing.acquire(timeout=ENQUEUE_SECONDS)  # NCCL must not free its memory while a call uses it
        self._released = True
        if idle:
            self._enqueuing.release()
        assert self._group is not None
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def wait_released(self, seconds: float) -> None:
        """Wait until NCCL has released its memory, after `stop_waiting`."""
        if self._abort is not None:
            self._abort.join(seconds)


def _never_free(thing: object) -> None:
    """Keep an object that threads of the library use, which may outlast the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _finish_abort(stopping: threading.Event, abort: threading.Thread) -> None:
    """Let NCCL release its memory before the program ends."""
    stopping.set()
    if abort is not threading.current_thread():  # which may have had the last reference to the group
        abort.join(ABORT_SECONDS)


def _gloo_group(rendezvous: Rendezvous, check: Callable[[], None]) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue] (missing in its stubs)
    options._timeout = CONNECT_TIMEOUT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=rendezvous.own_address)]
    store = WatchedStore(dist.PrefixStore("group", rendezvous.store), check)
    group = dist.ProcessGroupGloo(store, rendezvous.rank, rendezvous.size, options)
    group._set_default_timeout(COLLECTIVE_TIMEOUT)
    return group


def _nccl_group(rendezvous: Rendezvous) -> dist.ProcessGroupNCCL:
    # PyTorch would end the whole process when a collective fails; here that is an error of one engine.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = COLLECTIVE_TIMEOUT
    store = dist.PrefixStore("group", rendezvous.store)
    return dist.ProcessGroupNCCL(store, rendezvous.rank, rendezvous.size, options)


def finish_or_raise(work: Callable[[], None], check: Callable[[], None]) -> None:
    """Run `work` in a separate thread, because it may block forever if a rank has died.

    `check` is called while waiting, and ends the wait by raising; the thread is then abandoned.
    """
    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            work()
            outcome.put(None)
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=run, daemon=True).start()
    while True:
        with contextlib.suppress(queue.Empty):
            error = outcome.get(timeout=0.02)
            break
        check()
    if error is not None:
        raise error
