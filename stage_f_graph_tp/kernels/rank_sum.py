"""Sum over the ranks inside a kernel: each program writes its part to the other GPUs, and waits for their parts.

A decode step sums kilobytes, twice per layer, so only latency counts. If the GPUs can write one another's memory
(NVLink or PCIe, one machine), a kernel can do this without a library:

    rank 0   own part ──► mailbox of rank 1        rank 0's mailbox ──► read until nothing is empty, add ──► sum
                      ╲ ╱
                      ╱ ╲
    rank 1   own part ──► mailbox of rank 0        rank 1's mailbox ──► read until nothing is empty, add ──► sum

There is no flag. An empty entry of a mailbox has all bits set, and a sent number never has: these bits are a NaN, and
such a NaN is sent with other bits. So each 16 or 32 bits of data act as a flag, in whatever order they arrive. That
takes one trip over the link; a flag, a request for the data and the data would take three.

Every rank adds in the order of the ranks, so all have the same sum, bit for bit.

Program p uses slot p of every mailbox, which has an entry for each rank's part, and counts its calls. After it has read
a part, it empties the entry. Each slot exists twice, and calls use the two in turn. A rank can be one call ahead of
another but not two, because in between it waits for the other's part. So every entry that it overwrites has been read
and emptied, and a CUDA graph can be replayed. Calls of any dtypes and lengths may follow each other, as long as all
ranks make the same calls.

A program sends before it waits, and waits only for programs with the same number. A GPU starts programs in the order of
their numbers, so a launch may have more programs than can run at once: the lowest number that is not done on all ranks
has started everywhere, or there is room for it.

A program that waits for a dead rank would wait forever. So waiting programs read a stop word in the host's memory from
time to time, and the CPU ends the wait by writing it. A program that has read it sets a mark in the GPU's memory, so
that later programs do not wait at all. Every warp of a program reads for itself, so some may find that the wait is
over, and others, a moment earlier, that it is not. They must not leave the loop one by one: those that stay would wait
at the loop's barrier for those that left. So a warp that found the word only counts none of its entries as empty, and
the maximum over all warps ends the loop.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = tl.constexpr(1024)  # at most, in a launch
SLOT = tl.constexpr(8192)  # bytes of a program's part, at most: a skinny GEMM's tile of 64 rows and 32 tokens, float32
# How often a waiting program reads its mailbox before it reads the stop word: about 25 ms. Reading the host's
# memory takes about a microsecond per warp, one after another: with 0.1 ms, a rank that waited for 512 programs' parts
# was itself milliseconds late for the next sum, where the other rank waited, and so on through the whole step.
SPINS = tl.constexpr(2**15)


class Peers(NamedTuple):
    """The arguments of a kernel that sums over the ranks.

    Attributes:
        addresses: int64 `[size + 3]`: every rank's mailbox, bytes `[2, size (the writer), PROGRAMS, SLOT]`; this rank's
            call counters, int32 `[PROGRAMS]`; the stop word, int32 in host memory; the mark that it has been read,
            int32 in GPU memory.
        rank, size: this rank, and how many there are.
    """

    addresses: Tensor
    rank: int
    size: int


@triton.jit
def _part_of(mailbox, sender: tl.constexpr, place, dtype: tl.constexpr):
    """Return the address of a rank's part in a mailbox; `mailbox` is the address of rank 0's part."""
    return tl.multiple_of((mailbox + sender * (PROGRAMS * SLOT)).to(tl.pointer_type(dtype)), 16) + place


@triton.jit
def _look(places, inside):
    """Read entries of the mailbox, bypassing caches that do not see other GPUs' writes."""
    return tl.load(places, mask=inside, other=0, volatile=True)


@triton.jit
def sum_of_ranks(own, place, inside, program, peers, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Add up the ranks' `own`, in float32. A program of a launch calls it once, after `wait_for_previous`.

    Args:
        own: this program's part of this rank's numbers, 16 or 32 bits each; any shape.
        place: each number's index in the slot.
        inside: whether there is a number.
        program: 0 to PROGRAMS - 1, the same on all ranks for the same part.
        peers: the addresses of `Peers`.
    """
    number: tl.constexpr = tl.int16 if own.dtype.primitive_bitwidth == 16 else tl.int32
    bits = own.to(number, bitcast=True)
    bits -= (bits == -1).to(number)  # -1 has all bits set, which means empty
    calls = tl.load(peers + RANKS).to(tl.pointer_type(tl.int32)) + program
    stop = tl.load(peers + RANKS + 1).to(tl.pointer_type(tl.int32))
    note = tl.load(peers + RANKS + 2).to(tl.pointer_type(tl.int32))
    call = tl.load(calls)
    slot = ((call & 1) * (RANKS * PROGRAMS) + program).to(tl.int64) * SLOT
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(_part_of(tl.load(peers + peer) + slot, RANK, place, number), bits, mask=inside)
    mailbox = tl.load(peers + RANK) + slot
    stopped = tl.load(note, volatile=True)
    total = tl.zeros(own.shape, tl.float32)
    spins = 0
    waits = True
    while waits:
        total = tl.zeros(own.shape, tl.float32)
        empty = tl.zeros(own.shape, tl.int1)
        for sender in tl.static_range(RANKS):
            part = bits if sender == RANK else _look(_part_of(mailbox, sender, place, number), inside)
            empty |= part == -1
            total += part.to(own.dtype, bitcast=True).to(tl.float32)
        waits = tl.max((empty & (stopped == 0)).to(tl.int32)) != 0
        spins += 1
        if spins == SPINS:
            spins = 0
            stopped = tl.load(stop, volatile=True)
            tl.store(note, stopped, mask=stopped != 0)
    for sender in tl.static_range(RANKS):
        if sender != RANK:
            nothing = tl.full(own.shape, -1, number)
            tl.store(_part_of(mailbox, sender, place, number), nothing, mask=inside)
    tl.store(calls, call + 1, mask=stopped == 0)
    return total
