"""One engine behind many clients: clients that leave, that read slowly, that are too many; and the engine's end."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import TextIO

import pytest
from interrupts import fail_at_token
from serving import (
    LONG,
    QUESTION,
    ask,
    assert_idle,
    get,
    messages,
    num_ended,
    running,
    served,
    streamed,
    until,
    wait_until,
)

from beyond.serving import AsyncLLM, event_stream
from beyond.serving.async_llm import QueueFull, Stream
from beyond.serving.engine_loop import Call, EngineClosed, EngineLoop
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.calls.mailbox import Event

GREEDY = SamplingParams(temperature=0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kvcache_blocks": 512}


@pytest.fixture(scope="module", params=["stage_e_batching", pytest.param("stage_f_graph_tp", marks=pytest.mark.slow)])
def llm(request):
    with closing(importlib.import_module(request.param).LLM("tutor", device="cpu", **OPTIONS)) as llm:
        yield llm


server = served(max_queue=4)


@pytest.fixture(autouse=True)
def nothing_stays_behind(llm):
    yield
    assert_idle(llm)


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port))


def post_bytes(body: dict) -> bytes:
    text = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


@contextmanager
def asked_without_reading(server, **body: object) -> Iterator[socket.socket]:
    """A client that reads nothing of an answer with more bytes than all buffers hold."""
    [listening] = server.server.servers[0].sockets
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections inherit it
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(post_bytes(LONG | {"logprobs": 20} | body))
        yield connection


@contextmanager
def paused(server) -> Iterator[EngineLoop]:
    loop = server.llm.engine_loop
    loop.pause()
    wait_until(lambda: loop.paused)
    try:
        yield loop
    finally:
        loop.resume()


def run_steps(server, llm, count: int) -> None:
    """Run this many steps of a paused engine, as soon as it has something to do."""
    wait_until(llm.calls.has_unfinished)
    for _ in range(count):
        before = llm.engine.counters.num_steps
        server.llm.engine_loop.single_step()
        wait_until(lambda before=before: llm.engine.counters.num_steps > before)


# ---- clients that leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False], ids=["streaming", "waiting for the whole answer"])
def test_a_client_that_leaves_frees_its_blocks_within_two_steps(server, llm, streams):
    steps = llm.engine.counters.num_steps
    with paused(server), connect(server) as connection:
        connection.sendall(post_bytes(LONG | {"stream": streams, "n": 2}))
        run_steps(server, llm, 3)
        assert llm.calls.stats()["num_used_blocks"] > 0 and server.llm.num_unfinished == 2
        connection.close()
        wait_until(lambda: llm.calls.stats()["num_used_blocks"] == 0)
    assert llm.engine.counters.num_steps <= steps + 3 + 2 and server.llm.num_unfinished == 0


def test_three_hundred_connections_that_are_dropped_at_random_leave_no_block_in_use(server, llm):
    long, short = post_bytes(LONG), post_bytes({"prompt": QUESTION, "max_tokens": 8})

    def drop(i: int) -> bool:
        """Be client number `i`; returns whether it left in the middle of a long answer."""
        chance = random.Random(i)
        with suppress(OSError), connect(server) as connection:
            data = long if i % 2 else short
            sent = chance.choice([0, 20, len(data) - 3, len(data), len(data), len(data)])
            connection.sendall(data[:sent])
            connection.settimeout(chance.choice([0.001, 0.01, 30 if sent == len(data) else 0.03]))
            came = connection.recv(chance.choice([20, 200, 2000]))  # 30 s: until something comes
            if i % 3 == 0:  # an abrupt end: the kernel sends a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            return data is long and b" 200 " in came
        return False

    aborted = num_ended(server.llm.metrics, "abort")
    with ThreadPoolExecutor(8) as pool:
        left = sum(pool.map(drop, range(300)))
    wait_until(lambda: server.llm.num_unfinished == 0)
    assert num_ended(server.llm.metrics, "abort") - aborted >= left > 9
    assert_idle(llm)
    assert ask(server).status_code == 200


@pytest.mark.parametrize("path", ["POST /v1/completions", "GET /live/events"])
def test_a_client_that_leaves_inside_its_body_is_no_failure(llm, capsys, path):
    with running(llm) as server:
        with connect(server) as connection:
            connection.sendall(post_bytes(LONG)[:-3].replace(b"POST /v1/completions", path.encode()))
            wait_until(lambda: server.server.server_state.tasks)
        wait_until(lambda: not server.server.server_state.tasks)
    assert "Traceback" not in capsys.readouterr().err


# ---- clients that read slowly, fail, or are too many ----------------------------------------------------------------


def test_a_slow_reader_holds_nobody_up_and_loses_nothing(llm):
    with running(llm) as server, asked_without_reading(server, max_tokens=200) as connection:
        received = connection.recv(1)  # it has begun
        assert ask(server, max_tokens=4).status_code == 200
        wait_until(lambda: not llm.calls.has_unfinished())  # its answer is computed, and its blocks are given back
        wait_until(lambda: len(server.server.server_state.tasks) == 1)  # but cannot be sent
        while b"data: [DONE]\n\n" not in received:
            received += connection.recv(1 << 16)
    assert received.count(b"data: {") == 200


def test_a_client_that_takes_nothing_in_is_left_and_one_that_waits_for_the_engine_is_not(llm, monkeypatch):
    monkeypatch.setattr(event_stream, "SEND_SECONDS", 0.1)
    with running(llm) as server:
        with asked_without_reading(server):
            wait_until(lambda: num_ended(server.llm.metrics, "abort") == 1)
        with paused(server), streamed(server, max_tokens=3) as response:
            run_steps(server, llm, 2)
            lines = (line for line in response.iter_lines() if line)
            assert next(lines).startswith("data: {")
            time.sleep(0.5)  # the engine takes longer than a client may
            server.llm.engine_loop.resume()
            assert [line[:7] for line in lines] == ["data: {", "data: {", "data: ["]


def test_beyond_the_queues_bound_a_request_is_sent_away_with_a_time_to_come_back(server):
    with ThreadPoolExecutor(2) as pool:
        with paused(server):
            accepted = [pool.submit(ask, server, max_tokens=2, n=4) for _ in range(2)]
            wait_until(lambda: server.llm.num_unfinished == 8)
            refused = ask(server, max_tokens=2)
        assert [answer.result(60).status_code for answer in accepted] == [200, 200]
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert ask(server, max_tokens=2, n=8).status_code == 200  # all that there is room for
    assert ask(server, max_tokens=2, n=9).status_code == 400  # will never fit


@contextmanager
def failing(llm, after: int, times: int = 1) -> Iterator[None]:
    """The device runs this many steps more, and then fails for some."""
    steps = iter([False] * after + [True] * times)

    def fail(*_) -> None:
        if next(steps, False):
            raise RuntimeError("the device is on fire: secret detail")

    hook = llm.runtime.model.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def test_what_breaks_a_step_off_is_told_and_the_next_request_is_answered(server, llm, capsys):
    with failing(llm, after=3, times=2):
        *tokens, last = messages(ask(server, **LONG).text)
        assert tokens and last["error"]["type"] == "server_error" and "secret" not in last["error"]["message"]
        assert "secret detail" in capsys.readouterr().err  # the log
        assert not llm.engine.scheduler.has_unfinished()  # already, and not only after the next step
        assert get(server, "/health").status_code == 503  # it has tried another step, which failed too
        wait_until(lambda: get(server, "/health").status_code == 200)  # and this one did not: nobody else need try
    assert ask(server, max_tokens=2).status_code == 200


def test_a_step_that_fails_is_logged_once_and_told_to_every_client(server, llm, capsys):
    with failing(llm, after=0), ThreadPoolExecutor(3) as pool:
        with paused(server):
            asked = [pool.submit(ask, server, n=2, stream=i == 0) for i in range(3)]
            wait_until(lambda: server.llm.num_unfinished == 6)
        answers = [answer.result(60) for answer in asked]
    assert [answer.status_code for answer in answers] == [200, 500, 500]
    assert all('"type":"server_error"' in answer.text for answer in answers)
    log = capsys.readouterr().err
    assert log.count("Traceback") == 1 and "requests that this ended: 6" in log


def test_a_programs_threads_and_the_servers_clients_share_the_engine(server, llm):
    [expected] = llm.generate([QUESTION], GREEDY, False)
    with ThreadPoolExecutor(8) as pool:
        http = pool.map(lambda _: ask(server, temperature=0, max_tokens=12).json()["choices"][0]["text"], range(6))
        threads = pool.map(lambda _: llm.generate([QUESTION], GREEDY, False)[0]["text"], range(6))
        assert {*http, *threads} == {expected["text"]}


# ---- a call and its requests ----------------------------------------------------------------------------------------


@pytest.fixture
def news():
    return SimpleQueue()


@pytest.fixture
def loop(llm, news):
    """A separate engine loop, which tells its `news`."""
    loop = EngineLoop(llm.calls, lambda now, what: news.put(what))
    yield loop
    loop.close()
    loop.join(30)


def test_a_call_may_be_dropped_when_some_of_it_has_ended_and_twice(llm, loop, news):
    call = Call(llm.requests([QUESTION] * 2, [replace(ENDLESS, max_tokens=1), ENDLESS]))
    loop.submit(call)
    while not any(event.output for _, _, event in news.get(timeout=30)):
        pass
    loop.drop(call)
    loop.drop(call)
    assert not loop.call(lambda engine: engine.has_unfinished()).result(30)


def test_of_a_call_a_request_that_the_engine_refuses_ends_and_the_others_are_answered(llm, loop, news):
    good, other = llm.requests([QUESTION] * 2, SamplingParams(max_tokens=1))
    loop.submit(Call([replace(other, prompt_token_ids=[7] * 100_000), good]))
    [(_, refused, event)] = news.get(timeout=30)
    assert len(refused.prompt_token_ids) == 100_000 and "100000" in str(event.error)
    [(_, answered, event)] = news.get(timeout=30)
    assert answered == good and event.output


def test_once_it_is_closed_a_loop_takes_no_call_although_its_thread_is_busy(llm, loop, news):
    go_on = threading.Event()
    busy = loop.call(lambda _: go_on.wait(30))
    loop.submit(Call(llm.requests([QUESTION])))
    loop.close()
    with pytest.raises(EngineClosed):
        loop.call(lambda _: None).result(0)  # nobody would be left to do it
    go_on.set()
    assert busy.result(30) and [type(event.error) for _, _, event in news.get(timeout=30)] == [EngineClosed]


def num_steps(loop) -> int:
    return loop.call(lambda calls: calls.engine.counters.num_steps).result(30)


def test_a_single_step_without_anything_to_do_is_not_kept_for_the_next_request(llm, loop):
    loop.pause()
    loop.single_step()
    call = Call(llm.requests([QUESTION]))
    loop.submit(call)
    steps = num_steps(loop)
    time.sleep(0.1)  # in which the thread would run a step
    assert num_steps(loop) == steps
    loop.single_step()
    wait_until(lambda: num_steps(loop) == steps + 1)
    loop.drop(call)


def test_all_that_was_asked_for_is_done_before_the_next_step(llm, loop):
    go_on, call = threading.Event(), Call(llm.requests([QUESTION]))
    loop.call(lambda _: go_on.wait(30))  # what follows is in the inbox when the thread looks
    loop.submit(call)
    steps = [loop.call(lambda calls: calls.engine.counters.num_steps) for _ in range(3)]
    loop.drop(call)
    go_on.set()
    assert len({future.result(30) for future in steps}) == 1


def test_what_arrives_after_its_reader_has_gone_is_counted_out_once(llm):
    async def use() -> None:
        many = AsyncLLM(llm)
        with many.submit(llm.requests([QUESTION], SamplingParams(max_tokens=1))):
            call = many.engine_loop.call
            wait_until(lambda: not call(lambda engine: engine.has_unfinished()).result(30))  # its end is out
        assert many.num_unfinished == 0
        await asyncio.sleep(0.01)  # and now it comes in
        assert many.num_unfinished == 0 and num_ended(many.metrics, "abort") == 1
        await many.close()

    asyncio.run(use())


def test_an_answer_that_fails_costs_no_other_its_choice(server, llm, monkeypatch, capsys):
    prompts = [QUESTION, "Why?", "What is prefill?"]
    answers = llm.generate(prompts, GREEDY, False)
    others = {*answers[0]["token_ids"], *answers[2]["token_ids"]}
    fail_at_token(monkeypatch, next(token for token in answers[1]["token_ids"][2:] if token not in others))
    asked = {"prompt": prompts, "temperature": 0, "max_tokens": GREEDY.max_tokens}
    expected = [answers[0]["text"], None, answers[2]["text"]]
    whole = ask(server, **asked).json()["choices"]
    assert [choice["finish_reason"] != "error" and choice["text"] for choice in whole] == [
        expected[0],
        False,
        expected[2],
    ]
    with streamed(server, **asked, ignore_eos=False) as response:
        chunks = messages(response.read().decode())
    told = [chunk["choices"][0] for chunk in chunks]
    for i in (0, 2):
        assert "".join(choice["text"] for choice in told if choice["index"] == i) == expected[i]
    [failed] = [choice for choice in told if choice["finish_reason"] == "error"]
    assert failed["index"] == 1 and failed["error"] == whole[1]["error"]
    assert failed["error"]["type"] == "server_error" and failed["error"]["code"] == "internal_error"
    alone = ask(server, **asked | {"prompt": prompts[1]})
    assert alone.status_code == 500 and alone.json()["error"] == failed["error"]
    assert ask(server, **asked | {"prompt": prompts[0]}).json()["choices"][0]["text"] == expected[0]
    assert "has no text" in capsys.readouterr().err

    async def use() -> None:
        many = AsyncLLM(llm)
        with pytest.raises(UnicodeError, match="has no text") as caught:
            await many.generate(prompts, GREEDY)
        assert [output["text"] for output in caught.value.outputs[::2]] == expected[::2]
        await many.close()

    asyncio.run(use())


def test_a_call_of_which_one_request_failed_ends_with_that_whatever_becomes_of_the_others():
    stream, first = Stream([None, None], None), KeyError("first")
    stream.put(None, before := Event(0, [], "a"))
    stream.put(None, Event(1, [], "", error=first))
    stream.put(None, Event(0, [], "b"))

    async def read() -> None:
        assert [event for _, event in await anext(stream)] == [before]
        for error in (RuntimeError("second"), None):
            with pytest.raises(KeyError, match="first"):
                await anext(stream)
            stream.put(None, Event(0, [], "c", error=error))

    asyncio.run(read())


# ---- asyncio --------------------------------------------------------------------------------------------------------


def test_asyncio_generates_streams_cancels_and_is_refused(llm):
    expected = llm.generate([QUESTION, "Why?"], GREEDY, False)

    async def use() -> None:
        many = AsyncLLM(llm, max_queue=2)
        outputs = await many.generate([QUESTION, "Why?"], GREEDY)
        assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in expected]
        pieces = [piece async for piece in many.stream(QUESTION, GREEDY)]
        assert "".join(pieces) == expected[0]["text"]

        async with aclosing(many.stream(QUESTION, ENDLESS)) as stream:
            assert await anext(stream)  # it has a batch slot; of the four that follow, one waits
            many.engine_loop.pause()
            cancelled = asyncio.create_task(many.generate([QUESTION] * 4, ENDLESS))
            await until(lambda: many.num_unfinished == 5)
            with pytest.raises(QueueFull, match="at most 6"):
                await many.generate([QUESTION] * 2)
            with pytest.raises(ValueError, match="empty"):
                await many.generate([""])
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert many.num_unfinished == 0 and num_ended(many.metrics, "abort") == 5

        left = asyncio.create_task(many.generate([QUESTION], ENDLESS))  # still paused: it will not end
        await until(lambda: many.num_unfinished)
        assert not await many.drain(0.01)
        await many.close()
        for ended in (left, many.generate([QUESTION])):
            with pytest.raises(EngineClosed):
                await ended

    asyncio.run(use())


# ---- the end --------------------------------------------------------------------------------------------------------


def test_at_the_end_running_answers_are_finished_and_new_ones_are_sent_away(llm):
    with running(llm, deadline=30) as server:
        with paused(server) as loop, streamed(server, max_tokens=20) as response:
            run_steps(server, llm, 2)
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            server.server.handle_exit(15, None)
            wait_until(lambda: server.llm.draining)
            refused = ask(server)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
            assert int(refused.headers["retry-after"]) >= 1 and get(server, "/health").status_code == 503
            loop.resume()
            *others, done = [line for line in lines if line]
            assert len(others) == 19 and done == "data: [DONE]"
        wait_until(lambda: not server.thread.is_alive())


def test_what_takes_longer_than_the_deadline_is_told_so(llm):
    with running(llm, deadline=0.05) as server, ThreadPoolExecutor(1) as pool:
        server.llm.engine_loop.pause()
        answer = pool.submit(ask, server, **LONG)
        wait_until(lambda: llm.calls.has_unfinished())
        server.server.handle_exit(15, None)
        [told] = messages(answer.result(60).text)
    assert told["error"]["code"] == "shutting_down"


def test_a_client_that_takes_nothing_in_does_not_keep_the_server_and_is_no_error(llm, capsys):
    with running(llm) as server, asked_without_reading(server, max_tokens=200):
        wait_until(lambda: num_ended(server.llm.metrics, "length") == 1)
        server.server.handle_exit(15, None)
        wait_until(lambda: not server.thread.is_alive())
    assert "ERROR" not in capsys.readouterr().err


@contextmanager
def unread() -> Iterator[TextIO]:
    """An output whose reader has gone: nothing can be written to it."""
    reader, writer = os.pipe()
    os.close(reader)
    output = os.fdopen(writer, "w", buffering=1)
    try:
        yield output
    finally:
        with suppress(BrokenPipeError):
            output.close()


def test_a_server_ends_although_nobody_reads_what_it_prints_any_more(llm):
    with unread() as output, running(llm) as server, redirect_stdout(output):
        server.server.handle_exit(15, None)
        wait_until(lambda: not server.thread.is_alive())


def test_a_client_is_told_of_a_failure_although_nobody_reads_the_log_any_more(server, llm):
    with failing(llm, after=0), unread() as output, redirect_stderr(output):
        response = ask(server, max_tokens=2)
    assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"


def test_a_second_signal_ends_the_server_at_once_also_when_both_come_together(llm):
    async def signals(server) -> bool:
        """Two of them, before the event loop does anything else; returns whether requests are refused from then on."""
        server.server.begin_end()
        server.server.begin_end()
        while not server.server.should_exit:
            await asyncio.sleep(0)
        return server.llm.draining

    with running(llm, deadline=3600) as server:
        server.llm.engine_loop.pause()
        with streamed(server) as response:
            assert asyncio.run_coroutine_threadsafe(signals(server), server.loop).result(20)
            [told] = messages(response.read().decode())
        wait_until(lambda: not server.thread.is_alive())
    assert told["error"]["code"] == "shutting_down"
