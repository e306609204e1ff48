"""What a scattered read costs: every thread reads one number, neighbours or numbers further and further apart (GPU).

The memory delivers whole sectors of 32 bytes. Where the 32 threads of a warp read 32 neighbouring numbers of 4 bytes,
every byte that comes is wanted. With a number between two of them unread, half of the bytes are wanted; from a distance
of 32 bytes on, one number in eight of what comes. The same number of threads reads the same number of bytes each time.
"""

from __future__ import annotations

import statistics

import torch

from benchmarks.micro import timed
from benchmarks.timing import graph_seconds

NEEDS_GPU = True
STRIDES = (1, 2, 4, 8, 16, 32)  # in numbers of 4 bytes
WANTED = 2**26  # numbers that are read: 256 MB, more than the L2 cache holds
REPEATS = 20


def measure() -> dict:
    """Seconds for the same number of wanted bytes, by the distance of neighbouring threads' addresses."""
    from benchmarks.micro._kernels import BLOCK, strided_sums  # Triton, which not every system has

    source = torch.ones(WANTED * max(STRIDES), dtype=torch.float32, device="cuda")
    rows = []
    for stride in STRIDES:
        if not bool((strided_sums(source, stride, WANTED) == BLOCK).all()):
            raise RuntimeError(f"the sums at stride {stride} are wrong")
        samples = graph_seconds([lambda stride=stride: strided_sums(source, stride, WANTED)], REPEATS)
        rows.append(timed(samples, stride_bytes=4 * stride, wanted_bytes=4 * WANTED))
    return {"rows": rows}


TABLES = """
[coalescing]  # the picture's bars have their figures
note = "float32 numbers, 256 MB of them wanted; median of {REPEATS} samples"
"""


PICTURES = """
["stage_c_fused_mlp/coalescing.svg"]
kind = "columns"
title = "Scattered reads get 1/{rate(result, 0) / rate(result, -1):.0f} of the bandwidth ({device})"
text = "bandwidth against the distance of neighbouring threads' addresses"
x = "distance between the addresses of neighbouring threads"
y = "GB/s of wanted bytes"
at = "{stride_bytes} B"
value = "wanted_bytes / seconds / 1e9"
written = "{value:n}"
colour = "BLUE if stride_bytes == 4 else ORANGE"
"""


def rate(result: dict, place: int) -> float:
    row = result["rows"][place]
    return row["wanted_bytes"] / statistics.median(row["samples"])
