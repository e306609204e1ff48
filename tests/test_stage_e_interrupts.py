"""An exception at any moment of a step costs other calls nothing: no piece of text, no logprob and no end."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType

import pytest
from examples import examples
from fake_model import FakeRunner, check_books, make_calls, make_request
from hypothesis import given
from hypothesis import strategies as st
from interrupts import interrupt_after

from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.contract.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.calls import Calls
from stage_e_batching.calls.mailbox import Mailbox
from stage_e_batching.engine import Sampled
from stage_e_batching.llm import serve
from stage_e_batching.step import ScheduledStep

pytestmark = pytest.mark.fast
TOKENIZER = load_tokenizer(resolve("tutor"))
POOL = {"num_blocks": 24, "block_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 12}
LENGTHS = (5, 1, 9, 3, 7)  # of the prompts; together with the answers more than the pool holds


class ScoringRunner(FakeRunner):
    """The fake model, with log-probabilities that tell each position from every other."""

    def compute(self, step: ScheduledStep, on_device: int) -> Sampled:
        sampled = super().compute(step, on_device)
        ends = [e.start + e.num_tokens for e in step if e.samples]
        logprobs = [{token: -float(end)} for token, end in zip(sampled.token_ids, ends, strict=True)]
        return Sampled(sampled.token_ids, logprobs)


def engine_of(make: Callable[..., Calls]) -> Calls:
    return make(**POOL, runner_class=ScoringRunner, tokenizer=TOKENIZER)


def request(index: int) -> Request:
    prompt = [(7 * index + i) % 50 + 3 for i in range(LENGTHS[index])]
    params = SamplingParams(max_tokens=6 + index, ignore_eos=True, logprobs=0, stop=("zzz",) if index == 2 else ())
    return Request(index, prompt, params, seed=index)


def read_in_turn(calls: Calls) -> tuple[dict[int, str], dict[int, dict], set[int]]:
    """Read five streams in turn; returns their texts, their outputs, and which of them died of an interrupt."""
    streams = {i: serve(calls, [request(i)], streams=True) for i in range(len(LENGTHS))}
    texts = dict.fromkeys(streams, "")
    outputs, died = {}, set()
    while streams:
        for i, stream in list(streams.items()):
            try:
                _, event = next(stream)
            except StopIteration:
                del streams[i]
            except (KeyboardInterrupt, TimeoutError):
                del streams[i]
                died.add(i)
            else:
                texts[i] += event.text
                if event.output is not None:
                    outputs[i] = event.output
    return texts, outputs, died


def undisturbed(make: Callable[..., Calls]) -> tuple[dict[int, str], dict[int, dict], int]:
    """Texts and outputs, and how many lines of the engine's code they take."""
    with interrupt_after(0) as countdown:
        texts, outputs, died = read_in_turn(engine_of(make))
    assert not died and all(outputs[i]["text"] == texts[i] for i in texts) and any(texts.values())
    return texts, outputs, countdown.seen


def assert_only_the_dead_lost_something(calls: Calls, expected: tuple, found: tuple) -> None:
    texts, outputs, died = found
    assert len(died) <= 1
    for i in set(texts) - died:
        assert texts[i] == expected[0][i]
        for key in ("token_ids", "logprobs", "finish_reason", "text"):
            assert outputs[i][key] == expected[1][i][key]
    assert not calls.has_unfinished() and calls.stats()["num_used_blocks"] == 0
    check_books(calls)


@pytest.fixture(scope="module")
def expected() -> tuple:
    return undisturbed(make_calls)


@examples(20)
@given(part=st.floats(0, 1), error=st.sampled_from([KeyboardInterrupt, TimeoutError]), late=st.booleans())
def test_an_interrupt_at_any_line_costs_the_other_streams_nothing(expected, part, error, late):
    calls = engine_of(lambda **options: make_calls(late=late, **options))
    with interrupt_after(int(part * expected[2]), error):
        found = read_in_turn(calls)
    assert_only_the_dead_lost_something(calls, expected, found)


@examples(20)
@given(part=st.floats(0, 1), calls_later=st.integers(0, 60))
def test_a_second_interrupt_while_the_first_is_dealt_with_costs_no_more(expected, part, calls_later):
    calls, left = engine_of(make_calls), calls_later
    calls.longest_wait = 0.001

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event == "call" and "stage_e_batching/" in frame.f_code.co_filename and countdown.seen >= countdown.lines:
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

    with interrupt_after(int(part * expected[2])) as countdown:
        sys.setprofile(interrupt)  # Python ends it at the exception, as it ends the trace at the first one
        try:
            texts, outputs, died = read_in_turn(calls)
        finally:
            sys.setprofile(None)
    assert len(died) <= 2
    for i in set(texts) - died:
        assert (texts[i], outputs[i]["logprobs"]) == (expected[0][i], expected[1][i]["logprobs"])
    assert not calls.has_unfinished() and calls.stats()["num_used_blocks"] == 0


def test_a_request_whose_arrival_breaks_off_keeps_nobody_waiting():
    lines = has_arrived = 0
    while not has_arrived:
        lines += 1
        calls = engine_of(make_calls)
        with suppress(KeyboardInterrupt), interrupt_after(lines):
            has_arrived = calls.add_request(request(1)) + 1
        while calls.has_unfinished():
            calls.step()
        assert calls.is_finished()
    assert lines > 15, "every line of an arrival"


@pytest.mark.parametrize("where", ["schedule", "launch", "postprocess"])
def test_a_stream_collected_in_the_middle_of_a_step_harms_nobody(expected, where):
    calls = engine_of(make_calls)
    holder = {"schedule": calls.engine.scheduler, "launch": calls.engine.runner, "postprocess": calls.engine}[where]
    method = getattr(holder, where)
    collections = iter([gc.collect])
    gc.disable()
    try:
        drop_in_a_cycle(serve(calls, [request(0)], streams=True))
        setattr(holder, where, lambda *args: (next(collections, int)(), method(*args))[1])
        output = [event.output for _, event in serve(calls, [request(3)], streams=True)][-1]
    finally:
        gc.enable()
    assert output["token_ids"] == expected[1][3]["token_ids"] and output["text"] == expected[0][3]
    assert calls.engine.counters.num_aborted == 1 and calls.engine.counters.num_finished == 1
    assert not calls.has_unfinished() and calls.stats()["num_used_blocks"] == 0


def drop_in_a_cycle(stream: Iterator) -> None:
    """Read a stream once, then leave it where only the garbage collector finds it."""
    next(stream)
    cycle: list[object] = [stream]
    cycle.append(cycle)


def test_a_request_that_ended_in_the_interrupted_step_still_tells_its_end(expected, monkeypatch):
    calls = engine_of(make_calls)
    mailbox = calls.new_mailbox()
    calls.add_request(request(1), mailbox)
    remove, put = calls.engine.scheduler.remove, Mailbox.put
    for holder, name, method in ((calls.engine.scheduler, "remove", remove), (Mailbox, "put", put)):
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(holder, name, lambda *args, method=method: method(*args) or throw())
            while not mailbox.has_news:
                calls.step()
    while calls.has_unfinished():
        calls.step()
    events = mailbox.take()
    assert "".join(event.text for event in events) == expected[0][1]
    assert [event.output["token_ids"] for event in events if event.output] == [expected[1][1]["token_ids"]]


def test_after_a_step_that_broke_off_a_request_counts_its_own_prompts_cached_tokens_only():
    """Started again, the second of two equal requests finds the first one's blocks, with tokens that both generated."""
    calls = make_calls(**POOL | {"num_blocks": 40}, fail_at=frozenset({9}))
    for index in range(2):
        calls.add_request(make_request(index, [5, 6, 7, 8, 9], 12, ignore_eos=True), streams=False)
    events = []
    with suppress(RuntimeError):
        while True:
            events += calls.step()
    while calls.has_unfinished():
        events += calls.step()
    assert [event.output["metrics"]["num_cached_tokens"] for event in events] == [0, 4]
    assert calls.engine.counters.num_cached_tokens == 4


def throw(*_: object) -> None:
    raise KeyboardInterrupt
