"""One engine called from several threads, from its own callbacks, and in a forked child."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from contract.engines import GREEDY, PROMPTS, ask, finish, sampler, waiting_call
from stage_a_naive import SamplingParams


def test_threads_that_share_an_engine_get_the_answers_that_they_get_alone(llm, expected) -> None:
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda i: ask(llm, [PROMPTS[i % 5]])[0], range(8)))
    assert together == [expected[i % 5] for i in range(8)]


@pytest.mark.needs("calls in turn")
@pytest.mark.parametrize("inside", ["callback", "sampler"])
def test_a_call_from_inside_a_call_is_refused_and_changes_no_answer(llm, expected, inside: str) -> None:
    refused: list[str] = []

    def call_again(*_: object) -> None:
        with pytest.raises(RuntimeError, match="from inside a callback or sampler of the same engine") as caught:
            ask(llm, "inner")
        refused.append(str(caught.value))

    def choose(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        call_again()
        return logits.argmax(-1)

    with sampler(llm, choose if inside == "sampler" else None):
        assert ask(llm, PROMPTS[:1], GREEDY, call_again if inside == "callback" else None) == expected[:1]
    assert refused and not any("\n" in message for message in refused)
    assert ask(llm, PROMPTS[:1]) == expected[:1]


@pytest.mark.needs("side by side")
def test_a_callback_may_generate_and_a_sampler_is_refused(llm, expected) -> None:
    nested: list[list[int]] = []

    def call_again(index: int, piece: str) -> None:
        if len(nested) < 2:
            nested.extend(ask(llm, [PROMPTS[3]]))

    assert ask(llm, [PROMPTS[2]], GREEDY, call_again) == [expected[2]]
    assert nested == [expected[3]] * 2
    says = "called from inside one of its steps"
    with sampler(llm, lambda logits, params: ask(llm, [PROMPTS[3]])), pytest.raises(RuntimeError, match=says):
        ask(llm, [PROMPTS[2]])


def test_an_error_or_an_interrupt_lets_the_next_thread_in(llm, expected) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(llm, "abc", GREEDY, stop)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(ask, llm, PROMPTS[:1]).result(60) == expected[:1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("when", ["between calls", "while a call runs"])
def test_a_forked_child_is_refused(llm, expected, when: str) -> None:
    read_end, write_end = os.pipe()
    children: list[int] = []

    def fork(*_: object) -> None:
        if children:
            return
        children.append(os.fork())
        if children[0] == 0:
            try:
                llm.chat([{"role": "user", "content": "abc"}])
            except RuntimeError as error:
                os.write(write_end, str(error).encode())
            finally:
                os._exit(0)

    if when == "between calls":
        fork()
    assert ask(llm, PROMPTS[:1], GREEDY, fork) == expected[:1]
    os.waitpid(children[0], 0)
    os.close(write_end)
    with os.fdopen(read_end) as said:
        assert f"belongs to process {os.getpid()}" in said.read()


@pytest.mark.needs("calls in turn", "pool")
def test_another_threads_request_waits_for_the_call_that_runs_and_a_callbacks_own_does_not(llm, expected) -> None:
    threads: list[threading.Thread] = []
    finished: list[bool] = []

    def add_one_here_and_one_there(index: int, piece: str) -> None:
        if not threads:
            threads.append(threading.Thread(target=llm.add_request, args=(PROMPTS[1], GREEDY)))
            threads[0].start()
            threads[0].join(0.05)  # time in which it must not get through
            finished.append(llm.is_finished())
            llm.add_request(PROMPTS[0], GREEDY)
            finished.append(llm.is_finished())

    ask(llm, ["hello"], GREEDY, add_one_here_and_one_there)
    threads[0].join()
    assert finished == [True, False]
    assert sorted(finish(llm).values()) == sorted(expected[:2])


@pytest.mark.needs("side by side")
def test_threads_that_generate_stream_and_give_up_are_served_side_by_side(llm, expected) -> None:
    texts = [output["text"] for output in llm.generate(PROMPTS, GREEDY, False)]

    def call(i: int) -> None:
        which = i % len(PROMPTS)
        if i % 3 == 0:
            assert ask(llm, [PROMPTS[which], PROMPTS[0]]) == [expected[which], expected[0]]
        elif i % 3 == 1:
            assert "".join(piece for _, piece in llm.stream([PROMPTS[which]], GREEDY)) == texts[which]
        else:
            stream = llm.stream([PROMPTS[which]] * 2, GREEDY)
            next(stream)
            stream.close()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(call, range(24), timeout=120))


@pytest.mark.needs("side by side")
def test_a_stream_that_nobody_reads_holds_neither_the_engine_nor_its_lock(llm, expected) -> None:
    stream = llm.stream([PROMPTS[1]], GREEDY)
    pieces = [next(stream)[1]]
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(ask, llm, PROMPTS[:3]).result(60) == expected[:3]
    assert "".join(pieces + [piece for _, piece in stream]) == llm.tokenizer.decode(expected[1])


@pytest.mark.needs("side by side")
def test_a_short_call_beside_a_long_one_does_not_wait_for_its_end(llm, expected) -> None:
    with waiting_call(llm, PROMPTS[1]) as (long, go_on):
        assert ask(llm, [PROMPTS[2]]) == [expected[2]]
        go_on.set()
        assert long.result(60) == [expected[1]]
