"""The all-reduce of a decode step: small tensors of several GPUs added up in one kernel.

A library's all-reduce is made for megabytes. A decode step adds up kilobytes, twice a layer, and there only latency
counts. Where the GPUs can read one another's memory (NVLink or PCIe, one machine), one kernel will do:

    rank 0   x ──► own buffer ─► "mine is there" ──►┐   ┌► wait ─► read both buffers, add ─► sum
                                                    ╳
    rank 1   x ──► own buffer ─► "mine is there" ──►┘   └► wait ─► read both buffers, add ─► sum

Every rank reads everything and adds in the order of the ranks, so all have the same sum, bit for bit. (That is the
"one-shot" all-reduce; for long tensors it is better that each rank adds up a part and hands that on, and NCCL does so.)

Programs of the kernel work on a piece each and know nothing of one another. "Mine is there" is a number in the other
rank's memory, a new one for each call, counted by each program for itself: nothing has to be reset, and a CUDA graph
can be replayed. Buffers come in pairs, used in turn. A rank can be one call ahead of another but not two, because it
has to wait in the call between; so what it overwrites has been read.

A kernel that waits for a rank that has died would wait for ever. `stop` ends it: a word that the waiting kernel looks
at as well.
"""

from __future__ import annotations

import pickle
import socket

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

CAPACITY = 2**21  # bytes of the longest tensor
BLOCK = 2048  # elements a program adds up
PROGRAMS = CAPACITY // BLOCK // 2  # of the smallest element, two bytes


@triton.jit
def _add_up_kernel(
    x,  # [count]
    out,  # [count]: where the sum goes
    buffers,  # [RANKS] addresses of the ranks' buffers: [2, CAPACITY] bytes
    flags,  # [RANKS] addresses of the ranks' flags: [RANKS: who says it, PROGRAMS]
    calls,  # [PROGRAMS] how often a program of this rank has run
    stop,  # [1]
    count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CAPACITY: tl.constexpr,  # in elements
    ONTO: tl.constexpr,  # add the sum to what is in out
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    columns = program * BLOCK + tl.arange(0, BLOCK)
    mask = columns < count
    element = x.dtype.element_ty
    call = tl.load(calls + program) + 1
    stopped = tl.load(stop)
    place = (call & 1) * CAPACITY + columns
    own = tl.load(x + columns, mask=mask, other=0.0)
    here = tl.multiple_of(tl.load(buffers + RANK).to(tl.pointer_type(element)), 16)
    tl.store(here + place, own, mask=mask)
    tl.debug_barrier()  # every thread has written, before one says so
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + RANK * PROGRAMS + program
            tl.atomic_xchg(theirs, call, mask=stopped == 0, sem="release", scope="sys")
    mine = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + program
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            waits = stopped == 0
            while waits:
                said = tl.atomic_add(mine + peer * PROGRAMS, 0, sem="acquire", scope="sys")
                stopped = tl.load(stop, volatile=True)
                waits = (said - call < 0) & (stopped == 0)  # a difference, because numbers run over some day
    tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            total += own.to(tl.float32)
        else:
            there = tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(element)), 16)
            total += tl.load(there + place, mask=mask & (stopped == 0), other=0.0, volatile=True).to(tl.float32)
    if ONTO:
        total += tl.load(out + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + columns, total.to(element), mask=mask)
    tl.store(calls + program, call)


class PeerExchange:
    """Buffers that the GPUs of one machine read directly.

    All ranks make one, then all `open` it.

    Args:
        store: where the ranks tell one another where their memory is.
        rank, size, device: this rank, how many there are, this rank's GPU.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._store = store
        self._memory = torch.zeros(2 * CAPACITY + 4 * size * PROGRAMS, dtype=torch.uint8, device=device)
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        self._stop = torch.zeros(1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32).pin_memory()
        torch.cuda.synchronize(device)  # the zeros are there before another rank writes

    def open(self) -> str | None:
        """Map the other ranks' memory. Returns None, or why it cannot be, the same on all ranks: nobody may use it."""
        try:
            mine: tuple | str = (socket.gethostname(), *self._share())
        except RuntimeError as error:
            mine = f"rank {self.rank} cannot share its memory: {error}"
        told = self._tell("memory", mine)
        reason = next((answer for answer in told if isinstance(answer, str)), None)
        if reason is None and len({host for host, *_ in told}) > 1:
            reason = "the ranks are on several machines"
        if reason is None:
            try:
                self._map([(offset, shared) for _, offset, shared in told])
            except RuntimeError as error:
                reason = f"rank {self.rank} cannot see another rank's memory: {error}"
        return next((answer for answer in self._tell("opened", reason) if answer is not None), None)

    def _tell(self, what: str, value: object) -> list:
        """What all ranks say, by rank."""
        self._store.set(f"{what}/{self.rank}", pickle.dumps(value))
        return [pickle.loads(self._store.get(f"{what}/{rank}")) for rank in range(self.size)]

    def _share(self) -> tuple[int, tuple]:
        return self._memory.storage_offset(), self._memory.untyped_storage()._share_cuda_()

    def _map(self, told: list[tuple[int, tuple]]) -> None:
        self._mapped, starts = [], []
        for rank, (offset, (_, *handle)) in enumerate(told):
            if rank != self.rank:  # mapped for this rank's GPU, wherever the memory is
                storage = torch.UntypedStorage._new_shared_cuda(self.device.index, *handle)
                self._mapped.append(storage)
                starts.append(storage.data_ptr() + offset)
            else:
                starts.append(self._memory.data_ptr())
        self._buffers = torch.tensor(starts, dtype=torch.int64, device=self.device)
        self._flags = self._buffers + 2 * CAPACITY

    def takes(self, x: Tensor) -> bool:
        return x.nbytes <= CAPACITY and x.numel() <= BLOCK * PROGRAMS and x.is_contiguous()

    def add_up(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The sum of all ranks' `x`, written over `x`; or, given a residual, added to it, in place."""
        out = x if residual is None else residual
        _add_up_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x, out, self._buffers, self._flags, self._calls, self._stop, x.numel(), RANK=self.rank, RANKS=self.size,
            PROGRAMS=PROGRAMS, CAPACITY=CAPACITY // x.element_size(), ONTO=residual is not None, BLOCK=BLOCK,
            num_warps=8,
        )  # fmt: skip
        return out

    def stop(self) -> None:
        """End kernels that wait, and those after them: nothing is exchanged any more."""
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            self._stop.copy_(self._one, non_blocking=True)
