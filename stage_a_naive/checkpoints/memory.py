"""Check whether a model's weights fit into a device's memory before loading them, which may take minutes."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

import torch
from torch import nn

MEMINFO = Path("/proc/meminfo")
# The memory limit of a container in cgroups 2 and 1; "max", or more than any machine has, means no limit.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_room(described: nn.Module, device: torch.device) -> None:
    """Raise `MemoryError` with both numbers if a model's weights need more memory than the device has free.

    Args:
        described: the model on PyTorch's `meta` device, where tensors have a shape and a dtype but take no memory.
    """
    if device.type == "meta":  # a model that is built only for its shapes
        return
    tensors = list(chain(described.parameters(), described.buffers()))
    needed, free = sum(tensor.numel() * tensor.element_size() for tensor in tensors), free_memory(device)
    if needed > free:
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        raise MemoryError(
            f"the weights take {needed} bytes ({needed / 2**30:.1f} GiB, in {dtype}), and {device} has {free} bytes "
            f"({free / 2**30:.1f} GiB) free; take a smaller model, a shorter dtype such as bfloat16, or another device"
        )


def free_memory(device: torch.device) -> int:
    """Return the bytes of free memory: on a CPU what Linux reports as available, on other systems all memory."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # PyTorch caches it
        return torch.cuda.mem_get_info(device)[0] + unused
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    if MEMINFO.is_file():
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    limits = [file.read_text().strip() for file in LIMITS if file.is_file()]
    return min(found + [int(limit) for limit in limits if limit.isdigit()])
