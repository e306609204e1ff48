"""Kernels that start before the one in front of them has ended ("programmatic dependent launch", Hopper and later).

Between two kernels of a stream lies a microsecond in which the chip empties and fills again. A kernel launched with
`launch_pdl` may be brought in as soon as every block of the kernel in front has called `gdc_launch_dependents()` (or
ended): it sets itself up and loads what was known before, and calls `gdc_wait()` before it touches anything that the
kernel in front wrote. `gdc_wait` returns when that kernel has ended and its writes can be seen.

A program waits before it writes anything, and some program of every kernel waits. So a kernel that has ended means that
all kernels in front of it have ended too, and the next one's wait covers them all. (CUDA C++ Programming Guide,
"Programmatic Dependent Launch and Synchronization".)
"""

from __future__ import annotations

from functools import cache

import torch
from triton import knobs


@cache
def early_start(device: torch.device) -> dict[str, bool]:
    """A launch's settings, for kernels with a constant `EARLY`: on where the GPU can."""
    if device.type == "cuda" and not knobs.runtime.interpret and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
