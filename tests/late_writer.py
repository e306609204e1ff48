"""A kernel that lets the next one begin and writes late: a kernel that does not wait reads the old values."""

import triton
import triton.language as tl

from stage_f_graph_tp.kernels.pdl import start_next, wait_for_previous


@triton.jit(do_not_specialize=["count", "waits"])
def write_late(first, second, where, what, count, waits, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """Write `what` at `where` of both tensors, after `waits` loads that depend on each other."""
    start_next(PDL)
    wait_for_previous(PDL)
    position = tl.load(where) * 0
    for _ in range(waits):
        position = tl.load(where + position, volatile=True) * 0
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        target = tl.load(where + at, mask=at < count, other=0) + position
        value = tl.load(what + at, mask=at < count, other=0.0)
        tl.store(first + target, value, mask=at < count)
        tl.store(second + target, value, mask=at < count)
