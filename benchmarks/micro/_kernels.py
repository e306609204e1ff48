"""Triton kernels for single studies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def strided_sum_kernel(source, sums, stride, BLOCK: tl.constexpr):
    """Add up `BLOCK` numbers per program, `stride` apart; without the sum a compiler could drop the reads.

    Every thread reads one number, and neighbours read numbers `stride` apart.
    """
    program = tl.program_id(0)
    offsets = (program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)) * stride
    tl.store(sums + program, tl.sum(tl.load(source + offsets)))


@triton.jit
def add_one_kernel(x):
    """Add one to a number: the least work of a kernel."""
    tl.store(x, tl.load(x) + 1)


def strided_sums(source: torch.Tensor, stride: int, wanted: int) -> torch.Tensor:
    """Add up every `stride`-th number of `source`, `wanted` of them, in groups of `BLOCK`: `[wanted / BLOCK]`."""
    sums = torch.empty(wanted // BLOCK, dtype=source.dtype, device=source.device)
    strided_sum_kernel[(len(sums),)](source, sums, stride, BLOCK=BLOCK)
    return sums
