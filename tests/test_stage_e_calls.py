"""Calls in stage E: waking waiting threads, one reader at a time, its options, and its trace."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import ClassVar

import pytest
from contract.engines import ENGINES, GREEDY, Engine
from fake_model import CountedTokens, CountingRunner, make_calls, make_request

import stage_e_batching
from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.contract.outputs import Completion, Request
from stage_a_naive.contract.params import SamplingParams
from stage_e_batching.calls.mailbox import Mailbox, unread
from stage_e_batching.step import BatchSequence, ScheduledStep

pytestmark = pytest.mark.fast
ROOMY = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
STAGES = [engine for engine in ENGINES if engine.name in ("e", "f")]


class SlowRunner(CountingRunner):
    """A runner whose steps end when the test allows it."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def launch(self, step: ScheduledStep) -> CountedTokens:
        self.begun.set()
        assert self.may_end.wait(60)
        return super().launch(step)


def told_wait(mailbox: Mailbox) -> threading.Event:
    """An event that is set when a thread waits at the mailbox."""
    waits, wait_there = threading.Event(), mailbox.wait
    mailbox.wait = lambda seconds: waits.set() or wait_there(seconds)
    return waits


def num_woken_at_the_end_of_a_step(num_waiting: int, also_woken_by_another: bool = False) -> int:
    """How many of the threads that wait for another's step are woken at its end; the engine itself must not fail.

    Args:
        also_woken_by_another: while the first bell is rung, another thread rings all the others.
    """
    calls = make_calls(runner=SlowRunner(), **ROOMY)
    calls.longest_wait = 600  # seconds
    calls.add_request(make_request(0, [1, 2, 3], 5, ignore_eos=True))
    mailboxes = [calls.new_mailbox() for _ in range(num_waiting)]
    with ThreadPoolExecutor(1 + num_waiting) as threads:
        step = threads.submit(calls.step)
        assert calls.engine.runner.begun.wait(60)
        waiters = []
        for mailbox in mailboxes:
            waits = told_wait(mailbox)
            waiters.append(threads.submit(calls.advance, mailbox))
            assert waits.wait(60)
        if also_woken_by_another:
            ring = mailboxes[0].ring
            mailboxes[0].ring = lambda: ring() or calls.settle()
        calls.engine.runner.may_end.set()
        step.result(60)
        done, _ = wait(waiters, timeout=20)
        for mailbox in mailboxes:
            mailbox.ring()  # so that the test ends whatever the engine does
    return sum(waiter.exception() is None for waiter in done)


def test_a_thread_that_waits_for_anothers_step_is_woken_at_its_end():
    assert num_woken_at_the_end_of_a_step(1) == 1, "it would have waited ten minutes"


def test_two_threads_may_wake_up_those_that_wait():
    assert num_woken_at_the_end_of_a_step(3, also_woken_by_another=True) == 3


def test_what_a_step_brought_is_read_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch):
    calls = make_calls(**ROOMY)
    take, others = Mailbox.take, []

    def take_while_another_thread_steps(mailbox: Mailbox) -> list:
        if not others:
            others.append(threading.Thread(target=calls.step))
            others[0].start()
            others[0].join(0.2)  # time in which it must not get through
            others.append(others[0].is_alive())
        return take(mailbox)

    monkeypatch.setattr(Mailbox, "take", take_while_another_thread_steps)
    calls.step()
    others[0].join(60)
    assert others[1], "the other thread read while this one did"


def test_text_that_another_threads_step_adds_while_it_is_read_is_read_later():
    tokenizer = load_tokenizer(resolve("tutor"))

    class Busy(Completion):
        """Gets its next token, from another thread's step, as soon as its text has been looked at."""

        late: ClassVar[list[int]] = []

        def __getattribute__(self, name: str) -> object:
            found = super().__getattribute__(name)
            if name == "text" and self.late:
                self.append(self.late.pop())
            return found

    token_ids = tokenizer.encode("one two three four")
    request = Request(0, [1], SamplingParams(max_tokens=100), seed=0)
    sequence = BatchSequence(Busy(request, tokenizer, frozenset(), 4096), streams=True)
    for token_id in token_ids[:-1]:
        sequence.completion.append(token_id)
    Busy.late.append(token_ids[-1])
    first, second = unread(sequence), unread(sequence)
    assert [len(event.tokens) for event in (first, second)] == [len(token_ids) - 1, 1]
    assert first.text + second.text == "one two three four"


@pytest.mark.parametrize("engine", STAGES, ids=lambda engine: engine.name)
def test_a_trace_counts_the_blocks_of_the_step_that_it_describes(engine: Engine, tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    options = {"num_kvcache_blocks": 40, "kvcache_block_size": 2, "enable_prefix_caching": False, "max_num_seqs": 4}
    with engine.made(trace=str(path), **options) as llm:
        llm.generate([[5] * 7, [6] * 4, [7] * 9], GREEDY, False)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    decodes = [record for record in records if record["num_decodes"] == len(record["sequences"]) > 0]
    assert len(decodes) > 5
    for record in decodes:
        for entry in record["sequences"]:
            assert entry["blocks"] == -(-(entry["start"] + 1) // 2)
        assert record["used_blocks"] >= sum(entry["blocks"] for entry in record["sequences"])


def test_a_trace_file_that_cannot_be_written_is_named(tmp_path: Path):
    [engine, _] = STAGES
    with pytest.raises(OSError, match="trace cannot be written.*folder that exists.*nowhere"):
        engine.make(trace=tmp_path / "nowhere" / "trace.jsonl")
    with pytest.raises(ValueError, match="trace must be None or the path of a file, got 7"):
        engine.make(trace=7)


def test_several_ranks_are_refused_by_name():
    with pytest.raises(ValueError, match="this stage runs on one GPU"):
        stage_e_batching.LLM("random:qwen2-tiny", device="cpu", tensor_parallel_size=2)
