"""One-shot all-reduce: one kernel sums a step's tensors by writing to the other GPUs' memory.

A library's all-reduce is made for megabytes, and takes tens of microseconds for any tensor, however small. If the GPUs
can write one another's memory, one of our kernels does it (`kernels/rank_sum.py` explains how). For a few tokens, the
skinny GEMM of a row-parallel linear contains the same sum (`product_add`).

Every rank sends its whole tensor to every other rank. Two ranks cannot send less, whatever the size. More than two
ranks send less if each sums a part for all of them, as the library does.

`stop` ends the wait for a dead rank. The CPU writes a word of pinned memory without calling the driver, so any thread
can do it, even while another thread is blocked in a launch.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage_f_graph_tp.kernels.pdl import pdl_settings, start_next, wait_for_previous
from stage_f_graph_tp.kernels.rank_sum import PROGRAMS, SLOT, Peers, sum_of_ranks

SLICE = 4096  # bytes that a program sums if PROGRAMS such slices are enough; otherwise SLOT
CAPACITY = PROGRAMS.value * SLOT.value  # bytes that a launch can sum
DTYPES = torch.float16, torch.bfloat16, torch.float32
TEST_SECONDS = 30.0  # for one sum of the start-up test: another rank may have to compile the kernel first


@triton.jit
def _all_reduce_kernel(
    x,  # [count]
    out,  # [count]: receives the sum
    peers,
    count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,  # elements in a slice
    ONTO: tl.constexpr,  # add the sum to the contents of out
    PDL: tl.constexpr,
):
    place = tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK + place
    inside = column < count
    start_next(PDL)
    wait_for_previous(PDL)
    own = tl.load(x + column, mask=inside, other=0.0)
    if ONTO:
        before = tl.load(out + column, mask=inside, other=0.0)
    total = sum_of_ranks(own, place, inside, tl.program_id(0), peers, RANK, RANKS)
    if ONTO:
        total += before.to(tl.float32)
    tl.store(out + column, total, mask=inside)


class OneShotAllReduce:
    """The all-reduce of the GPUs of one machine, over mailboxes that each of them can write.

    Every rank creates one, then must call `open`. `peers` lets another kernel sum over the ranks itself.

    Args:
        rank, size, device: this rank, the number of ranks, this rank's GPU.
        pdl: launch the kernel by PDL, if the GPU can.
    """

    def __init__(self, rank: int, size: int, device: torch.device, pdl: bool = True) -> None:
        self.rank, self.size, self.device, self._pdl = rank, size, device, pdl
        # An empty entry has all bits set.
        shape = 2, size, PROGRAMS.value, SLOT.value
        self._mailbox = torch.full(shape, 255, dtype=torch.uint8, device=device)
        self._calls = torch.zeros(PROGRAMS.value, dtype=torch.int32, device=device)
        self._stop = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._stop_word = self._stop.numpy()
        self._note = torch.zeros(1, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # the mailbox must be empty before another rank writes

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
                reason = f"rank {self.rank} cannot map another rank's memory: {error}"
        reason = _first_reason(gather("mapped", reason))
        return reason or _first_reason(gather("tested", self._test())) or None

    def _share(self) -> list:
        """Return PyTorch's handle of this rank's memory for JSON: the handle's fields, bytes as hex digits."""
        handle = self._mailbox.untyped_storage()._share_cuda_()
        return [field.hex() if isinstance(field, bytes) else field for field in handle]

    def _map(self, shared: list[list]) -> None:
        self._mapped, starts = [], []
        for rank, handle in enumerate(shared):
            if rank == self.rank:
                starts.append(self._mailbox.data_ptr())
                continue
            _, *fields = (bytes.fromhex(field) if isinstance(field, str) else field for field in handle)
            storage = torch.UntypedStorage._new_shared_cuda(self.device.index, *fields)  # on any device
            self._mapped.append(storage)
            starts.append(storage.data_ptr())
        own = [tensor.data_ptr() for tensor in (self._calls, self._stop, self._note)]
        addresses = torch.tensor(starts + own, dtype=torch.int64, device=self.device)
        self.peers = Peers(addresses, self.rank, self.size)

    def _test(self) -> str:
        """Sum known numbers, of two dtypes and twice. Returns the error, or ""."""
        for dtype in (torch.bfloat16, torch.float32):
            for count in (16, CAPACITY // dtype.itemsize) * 2:
                ones = torch.arange(count, device=self.device, dtype=torch.int32) % 8
                x = (ones * (self.rank + 1)).to(dtype)
                self(x, None)
                if not self._finishes():
                    return f"rank {self.rank} waited {TEST_SECONDS:.0f} s for a sum of {count} numbers"
                if not torch.equal(x, (ones * (self.size * (self.size + 1) // 2)).to(dtype)):
                    return f"rank {self.rank} got a wrong sum of {count} numbers"
        return ""

    def _finishes(self) -> bool:
        """Wait for the GPU. Returns False if it took too long; its kernels have then been stopped."""
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
        """Whether `x` is contiguous and has a dtype that float32 can sum."""
        return x.dtype in DTYPES and x.is_contiguous()

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Sum all ranks' `x`, written over `x`; or, given a residual (contiguous too), added to it, in place."""
        out = x if residual is None else residual
        slice_bytes = SLICE if x.nbytes <= PROGRAMS.value * SLICE else SLOT.value
        most = CAPACITY // x.element_size()
        for part, into in zip(x.view(-1).split(most), out.view(-1).split(most), strict=True):
            _all_reduce_kernel[(triton.cdiv(part.nbytes, slice_bytes),)](
                part,
                into,
                self.peers.addresses,
                part.numel(),
                RANK=self.rank,
                RANKS=self.size,
                BLOCK=slice_bytes // x.element_size(),
                ONTO=residual is not None,
                num_warps=8,
                **pdl_settings(x.device, self._pdl),
            )
        return out

    def stop(self) -> None:
        """End waiting kernels and all later ones; sums are invalid from now on. Any thread may call it."""
        self._stop_word[0] = 1


def _first_reason(reasons: list[str]) -> str:
    """Return the first reason that is not empty. All ranks see the same list, so all get the same reason."""
    return next(filter(None, reasons), "")
