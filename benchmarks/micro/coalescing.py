"""The cost of scattered reads: threads read neighbouring numbers, or numbers further and further apart (GPU).

The memory delivers whole sectors of 32 bytes. If the 32 threads of a warp read 32 neighbouring numbers of 4 bytes,
every delivered byte is used. If they skip every second number, half of the bytes are used; from a distance of 32 bytes
on, one number in eight. The same number of threads reads the same number of numbers each time.
"""

from __future__ import annotations

import torch

from benchmarks.micro import timed
from benchmarks.timing import graph_seconds

NEEDS_GPU = True
STRIDES = (1, 2, 4, 8, 16, 32)  # in numbers of 4 bytes
WANTED = 2**26  # numbers that are read: 256 MB, more than the L2 cache holds
REPEATS = 20


def measure() -> dict:
    """Time the same number of useful bytes by the distance of neighbouring threads' addresses."""
    from benchmarks.micro._kernels import BLOCK, strided_sums  # Triton, which not every system has

    source = torch.ones(WANTED * max(STRIDES), dtype=torch.float32, device="cuda")
    rows = []
    for stride in STRIDES:
        if not bool((strided_sums(source, stride, WANTED) == BLOCK).all()):
            raise RuntimeError(f"the sums at stride {stride} are wrong")
        samples = graph_seconds([lambda stride=stride: strided_sums(source, stride, WANTED)], REPEATS)
        rows.append(timed(samples, stride_bytes=4 * stride, wanted_bytes=4 * WANTED))
    return {"rows": rows}
