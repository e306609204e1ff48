"""The small all-reduce: two ranks in two processes, the kernel in Triton's interpreter, memory that both can read.

On two GPUs the same kernel is tested with the engine, in test_stage_f_two_gpus.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("triton")
from stage_f_graph_tp.tensor_parallel.all_reduce import OneShotAllReduce
from stage_f_graph_tp.tensor_parallel.rendezvous import Rendezvous

RANK = """
import sys
import threading
import time
import numpy as np
import torch
import triton
import triton.language as tl
from stage_f_graph_tp.tensor_parallel import all_reduce as module

@triton.jit
def store(address, value):  # what PTX does on a GPU; a processor of this kind keeps the order of its writes
    tl.store(address.to(tl.pointer_type(tl.int32)), value)

@triton.jit
def load(address):
    return tl.load(address.to(tl.pointer_type(tl.int32)), volatile=True)

def load_and_wait(address):  # rank 1 reads a flag, and only later what the flag stands for
    flag = load(address)
    if turn % 5 == 1:
        time.sleep(0.05)
    return flag

rank, ranks, files, turn = int(sys.argv[1]), 2, sys.argv[2:], 0
module._store_release, module._load_acquire = store, load_and_wait if rank == 1 else load
PROGRAMS, SLICE = 3, 32
CAPACITY = PROGRAMS * SLICE
memories = [np.memmap(file, np.uint8, "r+") for file in files]
buffers = torch.tensor([memory.ctypes.data for memory in memories])
flags = buffers + 2 * CAPACITY
calls = torch.tensor([2**31 - 3] * PROGRAMS, dtype=torch.int32)  # the numbers run over in the middle of the test
stop, stopped = (torch.zeros(1, dtype=torch.int32) for _ in range(2))

def values(of_rank, count, turn):
    return torch.randint(-8, 8, (count,), generator=torch.Generator().manual_seed(1000 * turn + of_rank))

def all_reduce(x, out):
    module._all_reduce_kernel[(-(-x.nbytes // SLICE),)](
        x, out, buffers, flags, calls, stop, stopped, x.numel(), RANK=rank, RANKS=ranks, PROGRAMS=PROGRAMS,
        CAPACITY=CAPACITY, BLOCK=SLICE // x.element_size(), ONTO=out is not x, SPINS=4,
    )

lengths = torch.randint(1, 25, (60,), generator=torch.Generator().manual_seed(0)).tolist()
for turn, count in enumerate(lengths):  # in any mixture: a program is in some calls and not in others
    dtype = torch.float32 if turn % 3 else torch.float16
    x = values(rank, count, turn).to(dtype)
    out = torch.ones(count, dtype=dtype) if turn % 2 else x
    if turn % 7 == rank:
        time.sleep(0.01)  # the other rank runs ahead
    all_reduce(x, out)
    assert torch.equal(out, (values(0, count, turn) + values(1, count, turn) + turn % 2).to(dtype)), (turn, count)

if rank == 0:  # nobody answers any more: one call is told to stop while it waits, the next before it begins
    threading.Timer(0.5, stop.fill_, [1]).start()
    x = torch.zeros(8)
    all_reduce(x, x)
    stop.fill_(0)  # the call after it has to know without asking the host
    all_reduce(x, x)
print("right")
"""


def test_two_ranks_add_up_call_after_call_and_stop_when_told(tmp_path):
    first = (2**31 - 3).to_bytes(4, "little")
    files = [tmp_path / "memory 0", tmp_path / "memory 1"]
    for file in files:
        file.write_bytes(bytes(2 * 96) + first * 6)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *map(str, files)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said, complaints = rank.communicate(timeout=100)
        assert said.strip() == "right", complaints


class Peers(OneShotAllReduce):
    """What the ranks say to one another, without GPUs."""

    def __init__(self, rank, fails=None):
        self.rank, self.size, self.fails, self.mapped = rank, 3, fails, None

    def _share(self):
        if self.fails == "share":
            raise RuntimeError("no such thing here")
        return ["handle", self.rank]

    def _map(self, shared):
        if self.fails == "map":
            raise RuntimeError("too far away")
        self.mapped = shared

    def _test(self):
        return "rank 1 read wrong numbers" if self.fails == "test" else ""


def open_all(**fails):
    store = dist.HashStore()
    ranks = [Peers(rank, fails.get(f"rank{rank}")) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(
            lambda rank: rank.open(lambda key, text: Rendezvous(store, rank.rank, 3).gather(key, text, lambda: None)),
            ranks,
        )
        return ranks, list(found)


def test_every_rank_learns_where_the_others_memory_is():
    ranks, reasons = open_all()
    assert reasons == [None] * 3
    for rank in ranks:
        assert rank.mapped == [["handle", 0], ["handle", 1], ["handle", 2]]


@pytest.mark.parametrize(
    "what, message",
    [
        ("share", "rank 1 cannot share"),
        ("map", "rank 1 cannot see another"),
        ("test", "rank 1 read wrong numbers"),
    ],
)
def test_where_one_rank_cannot_no_rank_does(what, message):
    _, reasons = open_all(rank1=what)
    assert len(set(reasons)) == 1 and reasons[0].startswith(message)


def test_ranks_on_several_machines_do_not_try(monkeypatch):
    names = iter("abc")
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))
    ranks, reasons = open_all()
    assert reasons == ["the ranks are on several machines"] * 3
    assert [rank.mapped for rank in ranks] == [None] * 3
