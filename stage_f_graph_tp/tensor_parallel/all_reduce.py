"""One-shot all-reduce: a decode step's small tensors, added up by one kernel that reads the other GPUs' memory.

A library's all-reduce is made for megabytes. A decode step adds up kilobytes, twice per layer, and there only latency
counts. Where the GPUs can read one another's memory (NVLink or PCIe, one machine), one kernel will do:

    rank 0   x ──► own buffer ─► flag ──►┐   ┌► wait for flags ─► read all buffers, add ─► sum
                                         ╳
    rank 1   x ──► own buffer ─► flag ──►┘   └► wait for flags ─► read all buffers, add ─► sum

Every rank reads everything and adds in the order of the ranks, so all have the same sum, bit for bit. (For long tensors
it is better that each rank adds up a part and hands that on, and NCCL does so.)

Program p of the kernel always works on bytes [p * SLICE, (p + 1) * SLICE), whatever the tensor's dtype and length, and
counts its own calls. A flag is the number of the writer's call, so nothing has to be reset and a CUDA graph can be
replayed. Each slice has two buffers, used in turn. A rank can be one call ahead of another but not two, because it has
to wait for the other in the call between; so what it overwrites has been read. Calls of any dtypes and lengths may
follow each other, as long as all ranks make the same ones.

Flags are plain words, written with release and read with acquire semantics at system scope, which PCIe carries too:
atomic operations on another GPU's memory need NVLink.

A kernel that waits for a rank that has died would wait forever. `stop` ends the wait by a word in pinned host memory,
which waiting kernels read now and then; a kernel that has read it leaves a note in device memory, so that those after
it do not wait at all. The CPU writes the word without calling the driver, so it can do so from any thread, also while
another thread is blocked in a launch.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

CAPACITY = 2**21  # bytes of the longest tensor
SLICE = 4096  # bytes that a program adds up
PROGRAMS = CAPACITY // SLICE
# Times that a waiting program reads a flag before it reads the stop word: about 25 ms. Reading the host's memory takes
# about a microsecond per warp, one after another: with 256 spins (0.1 ms), a rank that waited for 512 programs' flags
# was itself milliseconds late for the next sum, where the other rank waited, and so on through the whole step.
SPINS = 2**16
TEST_SECONDS = 30.0  # for one sum of the test at the start: another rank may have to compile the kernel first


@triton.jit
def _store_release(address, value):
    """Write `value` after all that the program has written before. Once per program; the result says nothing."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first st.release.sys.global.u32 [$1], $2;
        mov.u32 $0, $2;
        }""",
        "=r,l,r",
        [address, value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_acquire(address):
    """Read a word before all that the program reads after."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _all_reduce_kernel(
    x,  # [count]
    out,  # [count]: where the sum goes
    buffers,  # int64 [RANKS], addresses of the ranks' buffers: [2, CAPACITY] bytes
    flags,  # int64 [RANKS], addresses of the ranks' flags: int32 [RANKS (who wrote it), PROGRAMS]
    calls,  # int32 [PROGRAMS]: how often a program of this rank has run
    stop,  # int32 [1], in host memory: not 0 when no kernel may wait any more
    stopped_before,  # int32 [1], in this rank's memory: an earlier call has read that
    count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CAPACITY: tl.constexpr,  # bytes
    BLOCK: tl.constexpr,  # elements in a slice
    ONTO: tl.constexpr,  # add the sum to what is in out
    SPINS: tl.constexpr,
):
    program = tl.program_id(0)
    element = x.dtype.element_ty
    offsets = tl.arange(0, BLOCK)
    columns = program * BLOCK + offsets
    mask = columns < count
    call = tl.load(calls + program) + 1
    stopped = tl.load(stopped_before, volatile=True)
    start = (call & 1) * CAPACITY + program * (CAPACITY // PROGRAMS)  # of the slice, in bytes
    own = tl.load(x + columns, mask=mask, other=0.0)
    here = tl.multiple_of((tl.load(buffers + RANK) + start).to(tl.pointer_type(element)), 16)
    tl.store(here + offsets, own, mask=mask)
    tl.debug_barrier()  # every thread has written, before one says so
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            _store_release(tl.load(flags + peer) + 4 * (RANK * PROGRAMS + program), call)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flag = tl.load(flags + RANK) + 4 * (peer * PROGRAMS + program)
            spins = 0
            behind = _load_acquire(flag) - call < 0  # a difference, because the numbers overflow some day
            while behind & (stopped == 0):
                behind = _load_acquire(flag) - call < 0
                spins += 1
                if spins % SPINS == 0:
                    stopped = tl.load(stop, volatile=True)
                    tl.store(stopped_before, stopped)
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            total += own.to(tl.float32)
        else:
            there = tl.multiple_of((tl.load(buffers + peer) + start).to(tl.pointer_type(element)), 16)
            total += tl.load(there + offsets, mask=mask & (stopped == 0), other=0.0, volatile=True).to(tl.float32)
    if ONTO:
        total += tl.load(out + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + columns, total.to(element), mask=mask)
    tl.store(calls + program, call)


class OneShotAllReduce:
    """The all-reduce of the GPUs of one machine, over buffers that each of them can read.

    Every rank creates one, then calls `open`; without that it cannot be used.

    Args:
        rank, size, device: this rank, the number of ranks, this rank's GPU.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._memory = torch.zeros(2 * CAPACITY + 4 * size * PROGRAMS, dtype=torch.uint8, device=device)
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        self._stop = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._stop_word = self._stop.numpy()
        self._stopped = torch.zeros(1, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # the zeros are there before another rank writes

    def open(self, gather: Callable[[str, str], list[str]]) -> str | None:
        """Map the other ranks' memory and test the sums.

        Args:
            gather: called with a key and this rank's text, returns the texts of all ranks.

        Returns:
            None, or why the all-reduce cannot be used, the same on all ranks.
        """
        try:
            mine = {"host": socket.gethostname(), "memory": self._share()}
        except RuntimeError as error:
            mine = {"error": f"rank {self.rank} cannot share its memory: {error}"}
        shared = [json.loads(text) for text in gather("memory", json.dumps(mine))]
        reason = next((rank["error"] for rank in shared if "error" in rank), "")
        if not reason and len({rank["host"] for rank in shared}) > 1:
            reason = "the ranks are on several machines"
        if not reason:
            try:
                self._map([rank["memory"] for rank in shared])
            except (RuntimeError, ValueError) as error:
                reason = f"rank {self.rank} cannot see another rank's memory: {error}"
        reason = _first_reason(gather("mapped", reason))
        return reason or _first_reason(gather("tested", self._test())) or None

    def _share(self) -> list:
        """PyTorch's handle of this rank's memory as JSON can write it: the handle's fields, bytes as hex digits."""
        handle = self._memory.untyped_storage()._share_cuda_()
        return [field.hex() if isinstance(field, bytes) else field for field in handle]

    def _map(self, shared: list[list]) -> None:
        self._mapped, starts = [], []
        for rank, handle in enumerate(shared):
            if rank == self.rank:
                starts.append(self._memory.data_ptr())
                continue
            _, *fields = (bytes.fromhex(field) if isinstance(field, str) else field for field in handle)
            storage = torch.UntypedStorage._new_shared_cuda(self.device.index, *fields)  # wherever the memory is
            self._mapped.append(storage)
            starts.append(storage.data_ptr())
        self._buffers = torch.tensor(starts, dtype=torch.int64, device=self.device)
        self._flags = self._buffers + 2 * CAPACITY

    def _test(self) -> str:
        """Add up numbers whose sums are known, of both dtypes and in both buffers. Returns what went wrong, or ""."""
        for dtype in (torch.bfloat16, torch.float32):
            for count in (16, CAPACITY // dtype.itemsize) * 2:
                ones = torch.arange(count, device=self.device, dtype=torch.int32) % 8
                x = (ones * (self.rank + 1)).to(dtype)
                self(x, None)
                if not self._finishes():
                    return f"rank {self.rank} waited {TEST_SECONDS:.0f} s for a sum of {count} numbers"
                if not torch.equal(x, (ones * (self.size * (self.size + 1) // 2)).to(dtype)):
                    return f"rank {self.rank} read wrong numbers in another rank's memory"
        return ""

    def _finishes(self) -> bool:
        """Wait for the GPU. False if it took too long; then its kernels have been told to stop."""
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + TEST_SECONDS
        while not done.query():
            if time.monotonic() > deadline:
                self.stop()
                return False
            time.sleep(0.0005)
        return True

    def supports(self, x: Tensor) -> bool:
        """Whether `x` fits into the buffers."""
        return x.nbytes <= CAPACITY and x.is_contiguous()

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The sum of all ranks' `x`, written over `x`; or, given a residual, added to it, in place."""
        out = x if residual is None else residual
        _all_reduce_kernel[(triton.cdiv(x.nbytes, SLICE),)](
            x, out, self._buffers, self._flags, self._calls, self._stop, self._stopped, x.numel(), RANK=self.rank,
            RANKS=self.size, PROGRAMS=PROGRAMS, CAPACITY=CAPACITY, BLOCK=SLICE // x.element_size(),
            ONTO=residual is not None, SPINS=SPINS, num_warps=8,
        )  # fmt: skip
        return out

    def stop(self) -> None:
        """End kernels that wait, and those after them; sums are invalid from now on. Any thread may call it."""
        self._stop_word[0] = 1


def _first_reason(reasons: list[str]) -> str:
    """The first that is not empty. All ranks see the same list, so all get the same."""
    return next(filter(None, reasons), "")
