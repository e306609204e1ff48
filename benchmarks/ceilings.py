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
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    copy_time = _best_time(lambda: target.copy_(source), device, repeats=20)
    del source, target
    size = 8192 if on_gpu else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    matmul_time = _best_time(lambda: left @ right, device, repeats=20)
    return Ceilings(2 * copy_bytes / copy_time, 2 * size**3 / matmul_time)


def _best_time(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start = synchronized_time(device)
        work()
        times.append(synchronized_time(device) - start)
    return min(times)
