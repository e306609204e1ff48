"""Programmatic dependent launch (PDL): start a kernel before the previous one has ended (Hopper and later).

Between two kernels of a stream the chip empties and fills again, which takes about a microsecond. A kernel launched
with `launch_pdl` may start as soon as every program of the previous kernel has called `start_next` (or has ended). It
sets itself up, loads data that was known before the step, and calls `wait_for_previous` before it touches anything that
the previous kernel wrote. That call returns when the previous kernel has ended and its writes are visible.

Two rules keep a whole chain of such kernels correct: a program waits before it writes anything, and some program of
every kernel waits. Then the end of a kernel implies that all earlier kernels have ended too, so one wait covers them
all. (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".)
"""

# `tl.extra.cuda` is there when a kernel is compiled.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs


@cache
def pdl_settings(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """Return launch settings for a kernel with a constant `PDL`: on from compute capability 9.0."""
    if (
        wanted
        and device.type == "cuda"
        and not knobs.runtime.interpret
        and torch.cuda.get_device_capability(device) >= (9, 0)
    ):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel of the stream start once all programs have called this."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()
