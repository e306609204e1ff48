"""What the device can do at best: copy bandwidth and matmul rate, measured, because data sheets promise more.

Both are measured on sizes that a cache cannot hold and a launch cannot dominate, and the best of several runs counts: a
ceiling that something else disturbed is no ceiling.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.floor import Ceilings
from stage_a_naive.outputs import synchronized_time


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Copy bandwidth (bytes read and written together) and matmul rate of `device` in `dtype`."""
    on_gpu = device.type == "cuda"
    copy_bytes = 2**31 if on_gpu else 2**27
    size = 8192 if on_gpu else 1024
    return Ceilings(
        2 * copy_bytes / _copy_seconds(copy_bytes, device), 2 * size**3 / _matmul_seconds(size, device, dtype)
    )


def _copy_seconds(num_bytes: int, device: torch.device) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return _best_time(lambda: target.copy_(source), device, repeats=20)


def _matmul_seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return _best_time(lambda: left @ right, device, repeats=20)


def _best_time(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start = synchronized_time(device)
        work()
        times.append(synchronized_time(device) - start)
    return min(times)
