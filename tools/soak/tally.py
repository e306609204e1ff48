"""Counts and samples of a soak, and the check for errors."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field
from pathlib import Path

HOST_GROWTH = 16 * 2**20  # bytes of resident memory that the allocator's own noise may add
DEVICE_GROWTH = 2**20  # the tables of the penalties double when more requests than ever before ask for one


@dataclass
class Sample:
    """The engine's memory at a moment when nothing runs."""

    seconds: float
    requests: int
    resident_bytes: int
    device_allocated_bytes: int
    device_reserved_bytes: int
    used_blocks: int


@dataclass
class Tally:
    """The events so far.

    Attributes:
        aborted: requests, or over HTTP clients that left before their answer was complete.
        errors: steps that failed on purpose.
        refused: over HTTP, bad requests and those beyond the queue's bound, refused with the right status.
        unexpected: what must never happen, in words.
    """

    finished: int = 0
    aborted: int = 0
    errors: int = 0
    refused: int = 0
    compared: int = 0
    different: int = 0
    unexpected: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


def resident_bytes(pid: int | None = None) -> int:
    """Resident memory of a process.

    Args:
        pid: None for this one, once its C library has given back what it only keeps for later.
    """
    try:
        if pid is None:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError as error:
        raise SystemExit(f"resident memory is read from /proc, which is not here: {error}") from error


def verdict(tally: Tally) -> list[str]:
    """What went wrong; empty if nothing did."""
    wrong = tally.unexpected[:3]
    if tally.different:
        wrong.append(f"{tally.different} of {tally.compared} answers differ from the answer alone")
    if any(sample.used_blocks for sample in tally.samples):
        wrong.append("blocks were in use while nothing ran")
    settled = tally.samples[len(tally.samples) // 4 :]
    grown = settled[-1].resident_bytes - settled[0].resident_bytes
    if grown > HOST_GROWTH:
        wrong.append(f"resident memory grew by {grown / 2**20:.1f} MiB after the first quarter")
    if settled[-1].device_allocated_bytes - settled[0].device_allocated_bytes > DEVICE_GROWTH:
        wrong.append("the device's allocated memory grew after the first quarter")
    return wrong
