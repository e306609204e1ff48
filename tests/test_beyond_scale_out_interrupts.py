"""An exception at any line of a step of several ranks: correct tokens or an error within seconds, and never a hang.

One process survives an interrupt anywhere (`test_stage_e_interrupts.py`). Here the other ranks may be left waiting for
what rank 0 would have sent them, which is an error; they must never continue with another step's tensors.

A signal's handler may raise between any two lines, so every line of a call is a case. `EVERY_LINE=1` runs all of them
(an hour); else a sample of them.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from contract.engines import ids
from interrupts import interrupt_after
from ranks import forked_ranks

import stage_e_batching
import stage_f_graph_tp
from beyond import scale_out
from stage_a_naive.sampling import SamplingParams
from stage_f_graph_tp.tensor_parallel import WorkerError
from stage_f_graph_tp.tensor_parallel.watch import workers

TRACED = ("stage_d_paged/", "stage_e_batching/", "stage_f_graph_tp/", "beyond/scale_out/", "contextlib.py")
RANKS = (
    "stage_f_graph_tp/ranks.py",
    "/tensor_parallel/",
    "/scale_out/",
    "stage_f_graph_tp/runner.py",
    "stage_f_graph_tp/head.py",
    "stage_e_batching/engine.py",
    "contextlib.py",
)
SAMPLE = 12  # lines, of those with something to do with ranks, and a quarter as many of the others
SECONDS = 10  # much less than a rank that waits would take
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [13]]
PARAMS = [SamplingParams(temperature=0, max_tokens=4 + i, top_k=5 * (i == 1), ignore_eos=True) for i in range(3)]
OPTIONS = {
    "device": "cpu",
    "num_kvcache_blocks": 24,
    "kvcache_block_size": 2,
    "max_num_batched_tokens": 8,
    "max_num_seqs": 4,
}
ENGINES = {
    "two ranks": lambda: stage_f_graph_tp.LLM("tutor", tensor_parallel_size=2, **OPTIONS),
    "two stages": lambda: scale_out.LLM("tutor", pipeline_parallel_size=2, **OPTIONS),
    "three stages": lambda: scale_out.LLM("tutor", pipeline_parallel_size=3, **OPTIONS),
}

LLM = stage_e_batching.LLM


class Alarm(Exception):
    """What the handler of a signal raises."""


def answer(llm: LLM) -> list[list[int]]:
    return ids(llm.generate(PROMPTS, PARAMS, False))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return answer(stage_e_batching.LLM("tutor", **OPTIONS))


@pytest.fixture(params=["two ranks", "two stages", pytest.param("three stages", marks=pytest.mark.slow)])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], LLM]]:
    """Makes an engine on several ranks, which are forks; the last one is closed after the test."""
    monkeypatch.setattr(workers, "ANSWER_SECONDS", 2.0 * SECONDS)  # instead of waiting for ever
    made: list[LLM] = []

    def make_next() -> LLM:
        while made:
            made.pop().close()
        with forked_ranks():
            made.append(ENGINES[request.param]())
        ranks = made[0].runner.ranks.workers
        ranks.explain = ranks.check  # no rank dies of itself: nothing to wait for
        return made[0]

    yield make_next
    made.pop().close()


def lines_to_raise_at(llm: LLM) -> list[int]:
    """Numbers of lines of a call: for each line of the source its middle turn, all of them or a sample."""
    with interrupt_after(0, traced=TRACED) as countdown:
        answer(llm)
    turns: dict[str, list[int]] = {}
    for number, place in enumerate(countdown.places, 1):
        turns.setdefault(place, []).append(number)
    middles = {place: numbers[len(numbers) // 2] for place, numbers in turns.items()}
    if os.environ.get("EVERY_LINE"):
        return sorted(middles.values())
    ranks = [number for place, number in middles.items() if any(part in place for part in RANKS)]
    others = sorted(set(middles.values()).difference(ranks))
    chance = random.Random(len(middles))
    return sorted(chance.sample(ranks, SAMPLE) + chance.sample(others, SAMPLE // 4))


@pytest.mark.slow
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_at_any_line_of_a_step_gives_right_tokens_or_an_error_and_a_new_engine_answers(make, expected):
    handler = signal.getsignal(signal.SIGINT)
    llm = make()
    assert answer(llm) == expected
    wrong = []
    for number in lines_to_raise_at(llm):
        start, found, error = time.monotonic(), [], None
        try:
            with interrupt_after(number, Alarm, TRACED):
                found.append(answer(llm))
        except (Alarm, WorkerError) as raised:
            error = raised
        try:
            found.append(answer(llm))
        except WorkerError as failed:
            error = failed
            llm = make()
            found.append(answer(llm))
        if any(tokens != expected for tokens in found) or time.monotonic() - start > SECONDS:
            wrong.append((number, repr(error), time.monotonic() - start, found))
    assert not wrong
    assert signal.getsignal(signal.SIGINT) is handler, "Ctrl-C is what it was"
