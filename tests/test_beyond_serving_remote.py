"""Both ends of the pipes between the server and its engine's process, each with a test that plays the other one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection, Pipe

import pytest
import torch
from fake_model import CountingRunner, make_calls
from serving import until

import stage_e_batching
from beyond.serving import wire
from beyond.serving.engine_loop import Call, EngineClosed
from beyond.serving.metrics import engine_numbers
from beyond.serving.piped_loop import PipedLoop
from beyond.serving.remote_engine import EngineDied, RemoteLoop
from stage_a_naive.contract.errors import EngineBroken
from stage_a_naive.contract.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.calls import Calls
from stage_e_batching.calls.mailbox import Event, Token

pytestmark = pytest.mark.fast
BATCH = {"max_num_seqs": 8, "max_num_batched_tokens": 64}


def request(number: int, prompt_token_ids: list[int], **params: object) -> Request:
    return Request(number, prompt_token_ids, SamplingParams(**params), 0)


# ---- the server's end -----------------------------------------------------------------------------------------------


class PlayedProcess:
    """What `RemoteLoop` knows of an engine's process; the test has the other ends of its pipes."""

    def __init__(self) -> None:
        self.news, self.tell = Pipe(duplex=False)
        self.commanded, self.commands = Pipe(duplex=False)

    def end(self, seconds: float) -> str:
        return "exit code 3"

    async def next_commands(self) -> list[tuple]:
        return await asyncio.to_thread(self.commanded.recv)


def played(test: Callable) -> Callable[[], None]:
    """A test of a loop, its process, and a list to which all news are added."""

    async def run() -> None:
        process, told = PlayedProcess(), []
        loop = RemoteLoop(process, lambda now, news: told.extend(news))
        try:
            async with asyncio.timeout(60):
                await test(loop, process, told)
        finally:
            loop.close()

    return lambda: asyncio.run(run())


@played
async def test_a_command_that_is_larger_than_the_pipe_arrives_whole_and_so_does_the_next(loop, process, told):
    requests = [request(0, list(range(100_000)))]
    loop.submit(Call(requests))
    await asyncio.sleep(0)  # a part of it is written: a pipe holds 64 KiB
    loop.pause()
    await asyncio.sleep(0)
    assert await process.next_commands() == [("submit", requests)]
    assert await process.next_commands() == [("pause",)] and loop.paused
    loop.resume()
    assert await process.next_commands() == [("resume",)] and not loop.paused


@played
async def test_news_that_cross_with_the_end_of_their_call_are_left_aside(loop, process, told):
    left, stays = Call([request(0, [1]), request(1, [1])]), Call([request(0, [2])])
    loop.submit(left)
    loop.submit(stays)
    events = [Event(0, [Token(5, "a")], "a", {"text": "a"}), Event(2, [Token(6, "b")], "b")]
    news = [(stays, request(event.request_id, [1]), event) for event in events]
    process.tell.send_bytes(wire.pack_news(1.0, None, news))
    await until(lambda: len(told) == 2)
    loop.drop(left)
    for number in (1, 2):
        process.tell.send_bytes(wire.pack_news(2.0, None, [(stays, request(number, [1]), events[1])]))
    await until(lambda: len(told) == 3)
    assert [(call, given) for call, given, _ in told[1:]] == [(stays, stays.requests[0])] * 2
    commands = [await process.next_commands() for _ in range(2)]
    assert commands[1] == [("drop", 1)]  # the first of its requests that has not ended


@played
async def test_what_a_function_raises_in_the_engines_process_is_raised_here(loop, process, told):
    future, raised = loop.call(engine_numbers), Future()
    [(name, number, function)] = await process.next_commands()
    assert (name, function) == ("call", engine_numbers)
    raised.set_exception(KeyError("why"))
    process.tell.send_bytes(wire.pack_result(number, raised))
    with pytest.raises(KeyError, match="why"):
        await asyncio.wrap_future(future)


@played
async def test_when_the_process_dies_all_who_wait_and_all_who_come_later_are_told(loop, process, told):
    deaths: list[None] = []
    loop.on_death = lambda: deaths.append(None)
    waits = loop.call(engine_numbers)
    loop.submit(Call([request(0, [1])]))
    process.tell.close()
    await until(lambda: deaths)
    loop.submit(Call([request(0, [1])]))
    await until(lambda: len(told) == 2)
    assert {str(event.error) for _, _, event in told} == {"the engine's process died (exit code 3)"}
    with pytest.raises(EngineDied):
        waits.result(0)
    with pytest.raises(EngineClosed):
        loop.call(engine_numbers).result(0)


# ---- the engine's end -----------------------------------------------------------------------------------------------


@contextmanager
def piped(calls: Calls) -> Iterator[tuple[PipedLoop, Connection, Connection]]:
    """An engine's loop, and the pipes for its commands and of its news."""
    commands_end, commands = Pipe(duplex=False)
    news, news_end = Pipe(duplex=False)
    loop = PipedLoop(calls, commands_end, news_end)
    try:
        yield loop, commands, news
    finally:
        commands.close()
        loop.join(60)
        assert "engine" not in [thread.name for thread in threading.enumerate()]


def receive(news: Connection) -> tuple:
    assert news.poll(60)
    return news.recv()


def test_requests_are_dropped_by_the_number_of_any_of_them_and_an_unknown_number_is_nobodys():
    with piped(make_calls(num_blocks=512, block_size=4, **BATCH)) as (_, commands, news):
        commands.send([("drop", 7)])  # they had ended when it was sent
        endless = {"max_tokens": 900, "ignore_eos": True}
        most = [{"max_tokens": 1}, endless, endless]
        commands.send([("submit", [request(number, [20], **params) for number, params in enumerate(most)])])
        ended: set[int] = set()
        while 0 not in ended:
            kind, _, _, rows = receive(news)
            ended |= {number for number, *said in rows if wire.unpack_event(number, *said).output}
        commands.send([("drop", 1), ("call", 3, engine_numbers)])
        while (message := receive(news))[0] != wire.RESULT:
            pass
        kind, number, numbers, error = message
        assert (number, error, numbers["num_requests_running"], numbers["kv_cache_usage_perc"]) == (3, None, 0, 0)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_whose_server_is_gone_ends_without_a_word():
    with piped(make_calls(num_blocks=16, block_size=4, **BATCH)) as (_, commands, news):
        news.close()
        commands.send([("submit", [request(0, [20])])])  # nobody reads what becomes of it


@pytest.mark.parametrize(
    ("error", "is_the_last"),
    [
        (EngineBroken("rank 1 of 2 died"), True),
        (torch.AcceleratorError("an illegal memory access"), True),
        (RuntimeError("out of memory"), False),
    ],
)
def test_a_loop_ends_with_the_first_error_that_no_later_step_survives(error, is_the_last):
    class Failing(CountingRunner):
        def launch(self, step):
            raise error

    with piped(make_calls(runner=Failing(), num_blocks=16, block_size=4, **BATCH)) as (loop, commands, news):
        commands.send([("submit", [request(0, [20])])])
        _, _, told, rows = receive(news)
        assert str(error) in str(told) and len(rows) == 1
        assert loop.is_broken == is_the_last
        if is_the_last:
            loop.join(60)
            assert loop.closed
        else:
            commands.send([("call", 3, engine_numbers)])
            assert receive(news)[0] == wire.RESULT


@pytest.mark.parametrize(("is_chunked", "longest"), [(True, 64 * 16), (False, 64)])
def test_the_longest_prompt_fits_the_pool_and_where_prefill_is_whole_a_step(is_chunked, longest):
    options = BATCH | {"num_kvcache_blocks": 64, "enable_chunked_prefill": is_chunked}
    with closing(stage_e_batching.LLM("tutor", device="cpu", **options)) as llm:
        assert wire.About.of(llm).longest_prompt == longest
