"""Peak memory of a stretch of work, to print beside its time: a fast engine may just have bought its speed with memory.

On a GPU it is what PyTorch's allocator had handed out at most, weights and KV pool included; an engine with pages takes
its pool in advance, as large as it was allowed to. On a CPU it is the resident set of the process, PyTorch
itself included.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Counts from its creation to `read()`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_reset = device.type == "cuda" or _reset_resident_peak()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> dict[str, object]:
        """`bytes`, and `of`: what they are the peak of."""
        if self._device.type == "cuda":
            return {"bytes": torch.cuda.max_memory_allocated(self._device), "of": "device memory, this workload"}
        if self._is_reset:
            return {"bytes": _resident_peak(), "of": "resident set, this workload"}
        return {"bytes": _resident_peak(), "of": "resident set, the process so far"}


def _reset_resident_peak() -> bool:
    """Linux can forget a process's peak (proc(5), clear_refs); elsewhere it only ever grows."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _resident_peak() -> int:
    if _STATUS.is_file():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
