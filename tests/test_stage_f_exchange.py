"""The small all-reduce: two ranks in two processes, the kernel in Triton's interpreter, memory that both can read.

On two GPUs the same kernel is tested with the engine, in test_stage_f_gpu.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

RANK = """
import sys
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

if rank == 0:  # nobody answers any more
    stop.fill_(1)
    _add_up_kernel[(1,)](
        x, x, buffers, flags, calls, stop, 8, RANK=rank, RANKS=ranks, PROGRAMS=PROGRAMS, CAPACITY=CAPACITY, ONTO=False,
        BLOCK=BLOCK,
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
        )  # fmt: skip
        for rank in range(2)
    ]
    for rank in ranks:
        said, complaints = rank.communicate(timeout=100)
        assert said.strip() == "right", complaints
