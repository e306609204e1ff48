"""The small all-reduce: one process per rank, the kernel in Triton's interpreter, memory that all ranks can write.

On two GPUs the same kernel is tested with the engine, in test_stage_f_two_gpus.py.
"""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")
from stage_f_graph_tp.kernels.rank_sum import PROGRAMS, SLOT
from stage_f_graph_tp.tensor_parallel.all_reduce import OneShotAllReduce
from stage_f_graph_tp.tensor_parallel.rank_group import SHORT, RankGroup
from stage_f_graph_tp.tensor_parallel.watch.rendezvous import Rendezvous
from stage_f_graph_tp.tensor_parallel.watch.workers import WorkerError

ROOT = Path(__file__).parent.parent

RANK = """
import sys
import threading
import time
import numpy as np
import torch
from stage_f_graph_tp.kernels import rank_sum
from stage_f_graph_tp.kernels.skinny_gemm import Tiles, product_add
from stage_f_graph_tp.tensor_parallel import all_reduce as module

rank, files, turn = int(sys.argv[1]), sys.argv[2:], 0
ranks = len(files)
look = rank_sum._look

def wait_and_look(*places):  # by then the other ranks have sent what they send next
    if turn % 5 == 1:
        time.sleep(0.05)
    return look(*places)

if rank == 1:
    rank_sum._look = wait_and_look
rank_sum.SPINS = module.tl.constexpr(4)
# small slices up to 32 bytes, large ones beyond, and several launches beyond 64
module.PROGRAMS, module.SLICE, module.SLOT, module.CAPACITY = module.tl.constexpr(2), 16, module.tl.constexpr(32), 64
mailboxes = [np.memmap(file, np.uint8, "r+") for file in files]
calls = torch.full((rank_sum.PROGRAMS.value,), 2**31 - 3, dtype=torch.int32)  # the numbers run over in the test
stop, note = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
own = [tensor.data_ptr() for tensor in (calls, stop, note)]
addresses = torch.tensor([mailbox.ctypes.data for mailbox in mailboxes] + own)
one_shot = module.OneShotAllReduce.__new__(module.OneShotAllReduce)
one_shot.rank, one_shot.size, one_shot.peers, one_shot._pdl = rank, ranks, rank_sum.Peers(addresses, rank, ranks), False

def values(of_rank, turn, *shape):
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(1000 * turn + of_rank))

def add_up(count, dtype, onto):
    x = values(rank, turn, count).to(dtype)
    total = one_shot(x, torch.ones(count, dtype=dtype) if onto else None)
    expected = sum(values(of_rank, turn, count) for of_rank in range(ranks)) + onto
    assert torch.equal(total, expected.to(dtype)), (turn, count)

counters = torch.zeros(8, dtype=torch.int32)

def multiply(tokens, splits, dtype):
    parts = [(values(r, turn, tokens, 48).to(dtype), values(r + 50, turn, 40, 48).to(dtype)) for r in range(ranks)]
    residual = torch.arange(40.0).to(dtype).repeat(tokens, 1)
    expected = residual + sum(x.float() @ weight.float().T for x, weight in parts)  # 16 bits hold them
    stream = product_add(*parts[rank], residual, counters, Tiles(16, splits), one_shot.peers)
    assert stream.x is residual and torch.equal(stream.x, expected.to(dtype)), (turn, tokens)
    assert torch.allclose(stream.squares.sum(0), expected.pow(2).sum(1))

lengths = torch.randint(1, 25, (60,), generator=torch.Generator().manual_seed(0)).tolist()
for turn, count in enumerate(lengths):  # in any mixture: a program is in some calls and not in others
    if turn % 7 == rank:
        time.sleep(0.01)  # the others run ahead
    if turn % 4 == 2:
        multiply(count, 1 + turn % 3 % 2, (torch.float32, torch.float16)[turn % 8 // 4])
    else:
        add_up(count, (torch.float16, torch.float32, torch.bfloat16)[turn % 3], bool(turn % 2))

no_numbers = torch.full((4,), -1, dtype=torch.int32)  # the bits of an empty place
for dtype in torch.float32, torch.float16, torch.bfloat16:
    assert one_shot(no_numbers.clone().view(dtype), None).isnan().all(), dtype
if rank == 0:
    assert (mailboxes[0] == 255).all(), "every part that was read is gone"

    # nobody answers any more, and rank 1 died in the middle of its part: one call is told to stop while it waits, the
    # next before it begins
    parts = mailboxes[0].reshape(2, ranks, rank_sum.PROGRAMS.value, rank_sum.SLOT.value)
    parts[:, 1, 0, :8] = parts[:, 2, 0, :16] = 0
    threading.Timer(0.5, stop.fill_, [1]).start()
    x, counted = torch.zeros(4), calls[0].item()
    one_shot(x, None)
    assert stop.item() == 1 and calls[0] == counted, "half a part is no part"
    stop.fill_(0)  # the call after it has to know without asking the host
    one_shot(x, None)
print("right")
"""


@pytest.mark.slow
def test_three_ranks_add_up_call_after_call_and_stop_when_told(tmp_path):
    files = [tmp_path / f"mailbox {rank}" for rank in range(3)]
    for file in files:
        file.write_bytes(b"\xff" * (2 * 3 * PROGRAMS.value * SLOT.value))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *map(str, files)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(3)
    ]
    try:
        for rank in ranks:
            said, complaints = rank.communicate(timeout=300)
            assert said.strip() == "right", complaints
    finally:
        for rank in ranks:
            rank.kill()  # one that fails leaves the others waiting


STOPPED_OFTEN = """
import time
import torch
from stage_f_graph_tp.kernels.rank_sum import Peers
from stage_f_graph_tp.tensor_parallel.all_reduce import CAPACITY, OneShotAllReduce

one_shot = OneShotAllReduce(0, 2, torch.device("cuda", 0))
nobody = torch.full_like(one_shot._mailbox, 255)  # the mailbox of a rank that never answers
places = [one_shot._mailbox, nobody, one_shot._calls, one_shot._stop, one_shot._note]
one_shot.peers = Peers(torch.tensor([place.data_ptr() for place in places], device="cuda"), 0, 2)
x = torch.zeros(CAPACITY // 2, dtype=torch.bfloat16, device="cuda")
for turn in range(200):
    one_shot(x, None)
    time.sleep(0.03 + turn % 50 / 2000)
    one_shot.stop()
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + 10
    while not done.query():
        assert time.monotonic() < deadline, f"a program still waits, turn {turn}"
        time.sleep(0.001)
    one_shot._stop_word[0] = 0
    one_shot._note.zero_()
print("right")
"""


@pytest.mark.gpu
def test_a_stop_ends_the_wait_of_a_thousand_programs():
    """The stop comes after 30 to 55 ms: programs begin to read the stop word at 25 ms."""
    told = subprocess.run(
        [sys.executable, "-c", STOPPED_OFTEN], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert told.stdout.strip() == "right", told.stderr


class Peers(OneShotAllReduce):
    """What the ranks say to one another, without GPUs; the sums are right but for one fault of a rank.

    Args:
        fails: the part that fails, or the number of the call whose last number is `wrong` or that is `endless`.
    """

    def __init__(self, rank: int, size: int = 3, **fails: object) -> None:
        self.rank, self.size, self.device = rank, size, torch.device("cpu")
        self.fails, self.mapped, self.calls = fails, None, 0

    def _share(self):
        if "share" in self.fails:
            raise RuntimeError("no such thing here")
        return ["handle", self.rank]

    def _map(self, shared):
        if "map" in self.fails:
            raise RuntimeError("too far away")
        self.mapped = shared

    def __call__(self, x, residual):
        self.calls += 1
        x *= sum(range(1, self.size + 1)) / (self.rank + 1)  # ones of rank 0, twos of rank 1
        x[-1] += self.calls == self.fails.get("wrong")

    def _finishes(self):
        return self.calls != self.fails.get("endless")


def open_all(size: int = 3, **fails: object) -> tuple[list[Peers], list[str | None]]:
    """Open all ranks' all-reduces; rank 1's has a fault."""
    store = dist.HashStore()
    ranks = [Peers(rank, size, **fails if rank == 1 else {}) for rank in range(size)]

    def open_one(rank: Peers) -> str | None:
        rendezvous = Rendezvous(store, rank.rank, size)
        return rank.open(lambda key, text: rendezvous.gather(key, text, lambda: None))

    with ThreadPoolExecutor(size) as pool:
        return ranks, list(pool.map(open_one, ranks))


def test_every_rank_learns_where_the_others_memory_is():
    ranks, reasons = open_all()
    assert reasons == [None] * 3
    for rank in ranks:
        assert rank.mapped == [["handle", 0], ["handle", 1], ["handle", 2]]


@pytest.mark.parametrize(
    "fails, message",
    [
        ({"share": True}, "rank 1 cannot share"),
        ({"map": True}, "rank 1 cannot map another"),
        *(({"wrong": call}, "rank 1 got a wrong sum of ") for call in range(1, 9)),
        *(({"endless": call}, "rank 1 waited 30 s for a sum of ") for call in range(1, 9)),
    ],
    ids=str,
)
def test_where_one_rank_cannot_no_rank_does(fails, message):
    _, reasons = open_all(size=2, **fails)
    assert len(set(reasons)) == 1 and reasons[0].startswith(message)


def test_sums_are_tested_before_they_are_used():
    ranks, _ = open_all(size=2)
    assert [rank.calls for rank in ranks] == [8, 8], "two dtypes, short and long, twice"


def test_ranks_on_several_machines_do_not_try(monkeypatch):
    names = iter("abc")
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))
    ranks, reasons = open_all()
    assert reasons == ["the ranks are on several machines"] * 3
    assert [rank.mapped for rank in ranks] == [None] * 3


def test_numbers_that_a_kernel_cannot_add_up_in_float32_are_left_to_the_library():
    one_shot = Peers(0)
    for dtype in torch.float16, torch.bfloat16, torch.float32:
        assert one_shot.supports(torch.zeros(4, dtype=dtype))
    for dtype in torch.int32, torch.int16, torch.float64:
        assert not one_shot.supports(torch.zeros(4, dtype=dtype)), dtype
    assert not one_shot.supports(torch.zeros(4, 2).t())


class Noted(RankGroup):
    """A group without other ranks that records whether our kernel or the library gets a sum."""

    def __init__(self, size):
        self.rank, self.size, self.one_shot, self.done = 0, size, self, []

    supports = OneShotAllReduce.supports

    def __call__(self, x, residual):
        self.done.append("ours")
        return x

    def _run(self, collective, *args):
        self.done.append(collective)


@pytest.mark.parametrize("size, long_sum", [(2, "ours"), (3, "allreduce")])
def test_more_than_two_ranks_leave_what_is_long_to_the_library(size, long_sum):
    group, short = Noted(size), torch.zeros(SHORT // 4)
    for x in short, torch.cat([short, short[:1]]), torch.zeros(4, dtype=torch.int32):
        group.all_reduce(x)
    assert group.done == ["ours", long_sum, "allreduce"]


class Running:
    """A collective that gloo still runs, with the tensors that it holds."""

    def is_completed(self):
        return False


def test_a_collective_that_gloo_still_runs_is_never_freed():
    """Gloo's thread would free its tensors, and abort the process if the interpreter has ended before."""

    def dead_rank():
        raise WorkerError("rank 1 of 2 died")

    group, work = RankGroup(Rendezvous(dist.HashStore(), 0, 2), torch.device("cpu")), Running()
    group._is_watching, group._check, still = True, dead_rank, weakref.ref(work)
    with pytest.raises(WorkerError):
        group._wait(work)
    del work
    gc.collect()
    assert still() is not None


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_gathered_is_only_added_up_where_it_is_short_and_exact(size):
    group = Noted(size)
    for x in torch.zeros(4), torch.zeros(SHORT // 4), torch.zeros(4, dtype=torch.int64):
        group.stack(x)
    assert group.done == ["ours", "allgather", "allgather"]
