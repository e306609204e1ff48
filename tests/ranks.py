"""What tests of several ranks share: forks as ranks, recorded steps on each of them, and watching of processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import RawArray
from pathlib import Path

import pytest
from contract.engines import GREEDY, PROMPTS
from stand_ins import EagerRecorder, forked_ranks

import stage_e_batching
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.calls import Calls
from stage_f_graph_tp.ranks import Job, Rank
from stage_f_graph_tp.tensor_parallel import WorkerError, Workers

SECONDS = 100  # an error must come much sooner than the ranks' limit of five minutes (`ANSWER_SECONDS`)
RANKS, MOST = 4, 64  # sizes of the counts of replays: ranks, and replayed rows
SHARING = [*PROMPTS, PROMPTS[4][:40] + [7, 8, 9]]  # two have a prefix in common
MIXED = [
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=2, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=10, seed=5, max_tokens=11, ignore_eos=True),
    GREEDY,
]


@contextmanager
def in_other_ranks(owner: object, name: str, act: Callable[[object], object]) -> Iterator[None]:
    """Let every forked rank do something before it runs a function of a module, or an object's method."""
    original, here = getattr(owner, name), os.getpid()

    def act_first(*arguments: object, **named: object) -> object:
        if os.getpid() != here:
            act(arguments[0])
        return original(*arguments, **named)

    with forked_ranks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, act_first)
        yield


def stop(*_: object) -> None:
    """Stop this process as a debugger does."""
    os.kill(os.getpid(), signal.SIGSTOP)


class SharedCounter(Counter):
    """The replays of one rank, kept where rank 0 can read them."""

    def __init__(self, counts: RawArray, rank: int) -> None:
        super().__init__()
        self.counts, self.rank = counts, rank

    def __setitem__(self, key: int | str, value: int) -> None:
        super().__setitem__(key, value)
        rows = key if isinstance(key, int) else int(key.removesuffix(" tokens"))
        self.counts[self.rank * MOST + rows] = sum(self[same] for same in (rows, f"{rows} tokens"))


@contextmanager
def recording_ranks(
    sizes: list[int], prefills: list[int], job: type[Job] = Job
) -> Iterator[Callable[[int], dict[int, int]]]:
    """Let forked ranks and this one record their steps when they are built, as on GPUs.

    Yields:
        a function: a rank's number -> how often it has replayed the steps of a number of rows or tokens.
    """
    counts, build = RawArray("i", RANKS * MOST), job.build

    def build_and_record(self: Job, rendezvous: object, *others: object) -> Rank:
        rank = build(self, rendezvous, *others)
        rank.runner.capture(EagerRecorder(SharedCounter(counts, rendezvous.rank)), sizes, prefills)
        return rank

    def replays_of(rank: int) -> dict[int, int]:
        own = counts[rank * MOST : (rank + 1) * MOST]
        return {rows: count for rows, count in enumerate(own) if count}

    with forked_ranks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "build", build_and_record)
        yield replays_of


def admit_whoever_fits(served: stage_e_batching.LLM | Calls) -> None:
    """Switch the watermark off: every request that fits is admitted, and in a small pool preempted again."""
    served.engine.scheduler.watermark = lambda sequence: 0


def children() -> set[int]:
    """This process's living children."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # ended meanwhile
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(stat.parent.name))
    return found


@contextmanager
def within_seconds() -> Iterator[None]:
    """Check that the block ends in much less time than the ranks' limit, and leaves no process."""
    start, before = time.monotonic(), children()
    yield
    while children() != before:  # one that was killed takes a moment to go
        assert time.monotonic() - start < SECONDS, "a process is left"
        time.sleep(0.01)
    assert time.monotonic() - start < SECONDS


@contextmanager
def killed_soon(process: int) -> Iterator[None]:
    """Kill a process in a moment."""
    timer = threading.Timer(0.3, os.kill, [process, signal.SIGKILL])
    timer.start()
    yield
    timer.join()


def error_of(ranks: Workers) -> str:
    """Wait until a rank's failure is known; returns the message."""
    with pytest.raises(WorkerError) as raised:
        for _ in range(SECONDS):
            ranks.explain()
    return str(raised.value)
