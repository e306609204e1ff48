"""The small all-reduce: two ranks in two processes, the kernel in Triton's interpreter, memory that both can read.

On two GPUs the same kernel is tested with the engine, in test_stage_f_gpu.py.
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
from stage_f_graph_tp.exchange import PeerExchange

RANK = """
import sys
import threading
import numpy as np
import torch
from stage_f_graph_tp.exchange import _add_up_kernel

rank, ranks, files = int(sys.argv[1]), 2, sys.argv[2:]
PROGRAMS, BLOCK, CAPACITY = 3, 8, 24
memories = [np.memmap(file, np.uint8, "r+") for file in files]
buffers = torch.tensor([memory.ctypes.data for memory in memories])
flags = buffers + 2 * CAPACITY * 4
calls = torch.tensor([2**31 - 3] * PROGRAMS, dtype=torch.int32)  # the numbers run over in the middle of the test
stop = torch.zeros(1, dtype=torch.int32)

def values(of_rank, count, turn):
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * turn + of_rank))

for turn, count in enumerate([3, 24, 8, 9, 1, 24, 17, 24]):
    x = values(rank, count, turn)
    onto = torch.ones(count) if turn % 2 else None
    out = x if onto is None else onto
    programs = -(-count // BLOCK)
    _add_up_kernel[(programs,)](
        x, out, buffers, flags, calls, stop, count, RANK=rank, RANKS=ranks, PROGRAMS=PROGRAMS, CAPACITY=CAPACITY,
        ONTO=onto is not None, BLOCK=BLOCK,
    )
    expected = values(0, count, turn) + values(1, count, turn) + (turn % 2)
    torch.testing.assert_close(out, expected)

if rank == 0:  # nobody answers any more: one call is told to stop while it waits, the next before it begins
    threading.Timer(0.5, stop.fill_, [1]).start()
    for _ in range(2):
        _add_up_kernel[(1,)](
            x, x, buffers, flags, calls, stop, 8, RANK=rank, RANKS=ranks, PROGRAMS=PROGRAMS, CAPACITY=CAPACITY,
            ONTO=False, BLOCK=BLOCK,
        )
print("right")
"""


def test_two_ranks_add_up_call_after_call_and_stop_when_told(tmp_path):
    first = (2**31 - 3).to_bytes(4, "little")
    files = [tmp_path / "memory 0", tmp_path / "memory 1"]
    for file in files:
        file.write_bytes(bytes(2 * 24 * 4) + first * 6)
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


class Peers(PeerExchange):
    """What the ranks say to one another, without GPUs."""

    def __init__(self, store, rank, fails=None):
        self.rank, self.size, self._store, self.fails, self.mapped = rank, 3, store, fails, None

    def _share(self):
        if self.fails == "share":
            raise RuntimeError("no such thing here")
        return 64 * self.rank, ("handle", self.rank)

    def _map(self, told):
        if self.fails == "map":
            raise RuntimeError("too far away")
        self.mapped = told


def open_all(**fails):
    store = dist.HashStore()
    ranks = [Peers(store, rank, fails.get(f"rank{rank}")) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        return ranks, list(pool.map(lambda rank: rank.open(), ranks))


def test_every_rank_learns_where_the_others_memory_is():
    ranks, reasons = open_all()
    assert reasons == [None] * 3
    for rank in ranks:
        assert rank.mapped == [(0, ("handle", 0)), (64, ("handle", 1)), (128, ("handle", 2))]


@pytest.mark.parametrize("what, message", [("share", "rank 1 cannot share"), ("map", "rank 1 cannot see another")])
def test_where_one_rank_cannot_no_rank_does(what, message):
    _, reasons = open_all(rank1=what)
    assert len(set(reasons)) == 1 and reasons[0].startswith(message)


def test_ranks_on_several_machines_do_not_try(monkeypatch):
    names = iter("abc")
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))
    ranks, reasons = open_all()
    assert reasons == ["the ranks are on several machines"] * 3
    assert [rank.mapped for rank in ranks] == [None] * 3
