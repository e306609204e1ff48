"""Judges lab G. The parts are judged without a model; the whole server answers over a socket."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

import beyond.serving.async_llm as async_llm
import beyond.serving.engine_loop as engine_loop
import beyond.serving.event_stream as event_stream
import beyond.serving.sse as sse
from beyond.serving.server import serve
from labs.mutants import assert_catches
from labs.tests.support import request_of
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.llm import LLM


def read_events(body: str) -> list[str]:
    """The data of each event, as a browser reads them."""
    assert body.endswith("\n\n"), "an event ends with an empty line"
    events = []
    for block in body[:-2].split("\n\n"):
        lines = block.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        events.append("\n".join(line[5:].removeprefix(" ") for line in lines if line.startswith("data:")))
    return events


class TestFrame:
    @pytest.mark.parametrize("data", ["[DONE]", "", " indented", '{"text": "data: "}', "键值缓存", "a\u2028b\x0bc"])
    def test_one_line_comes_back_as_it_was(self, data):
        found = read_events(sse.frame(data).decode())
        assert found == [data], f"frame({data!r}) is one event with this data, got {found}"

    @pytest.mark.parametrize("data", ["a\nb", "a\n\nb", "\n", "a\r\nb", "a\rb", "end\n"])
    def test_lines_stay_one_event(self, data):
        found = read_events(sse.frame(data).decode())
        expected = [data.replace("\r\n", "\n").replace("\r", "\n")]
        assert found == expected, f"frame({data!r}) is one event, read as {expected}, got {found}"

    def test_events_that_follow_one_another_stay_apart(self):
        assert read_events((sse.frame("1") + sse.frame("2\n3") + sse.frame("4")).decode()) == ["1", "2\n3", "4"]


def refusal(llm: SimpleNamespace, num_requests: int) -> str:
    """Ask for more than there is room for, and return what is said."""
    before = llm.num_unfinished
    try:
        async_llm.AsyncLLM._admit(llm, num_requests)
    except async_llm.QueueFull as error:
        return str(error)
    pytest.fail(f"{before} of {llm.max_unfinished} are unfinished: a call of {num_requests} must raise QueueFull")


class TestAdmit:
    def test_the_last_place_is_given_and_no_more(self):
        llm = SimpleNamespace(num_unfinished=3, max_unfinished=5)
        async_llm.AsyncLLM._admit(llm, 2)
        assert llm.num_unfinished == 5
        refusal(llm, 1)
        assert llm.num_unfinished == 5, "who is refused must not be counted"

    def test_a_call_gets_in_whole_or_not_at_all(self):
        llm = SimpleNamespace(num_unfinished=0, max_unfinished=5)
        said = refusal(llm, 6)
        assert llm.num_unfinished == 0, "a call that is refused must not be counted, not even in part"
        assert "5" in said, f"the message names the limit, 5; got {said!r}"
        async_llm.AsyncLLM._admit(llm, 5)
        assert llm.num_unfinished == 5


class Aborts:
    """An engine that notes who is aborted, and that the books were in order then."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def abort(self, request_id: int) -> bool:
        self.ids.append(request_id)
        return True


class TestRemove:
    @pytest.fixture
    def loop(self):
        mine, other = engine_loop.Call([request_of([1])] * 3), engine_loop.Call([request_of([2])])
        mine.live = {4: mine.requests[0], 6: mine.requests[2]}  # the second has ended already
        other.live = {5: other.requests[0]}
        calls = {4: mine, 5: other, 6: mine}
        return SimpleNamespace(_calls=calls, _shared=Aborts(), mine=mine, other=other)

    def test_what_has_not_ended_is_aborted_and_nothing_else(self, loop):
        engine_loop.EngineLoop._remove(loop, loop.mine)
        assert sorted(loop._shared.ids) == [4, 6], "the engine must be told of both requests that run, once each"

    def test_the_call_is_forgotten_and_the_others_are_not(self, loop):
        engine_loop.EngineLoop._remove(loop, loop.mine)
        known = sorted(loop._calls)
        assert known == [5], f"of requests 4, 5 and 6 only 5 is another call's; self._calls has got {known}"
        assert loop.mine.live == {}, f"call.live must be empty afterwards, got {sorted(loop.mine.live)}"
        assert len(loop.other.live) == 1, "the other call's request runs on"

    def test_a_second_time_does_nothing(self, loop):
        for _ in range(2):
            engine_loop.EngineLoop._remove(loop, loop.mine)
        assert len(loop._shared.ids) == 2, f"two requests are aborted once each, got {loop._shared.ids}"


def race(receive, work) -> object:
    """Run `unless_gone`, and check that it leaves no task behind."""

    async def run() -> object:
        try:
            return await event_stream.unless_gone(receive, work)
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task(), here}
            assert all(task.cancelling() for task in left), "a task runs on"

    async def bounded() -> object:
        nonlocal here
        here = asyncio.current_task()
        try:
            return await asyncio.wait_for(run(), 2)
        except TimeoutError:
            raise AssertionError("it still waits after 2 s, with the work or the connection at its end") from None

    here = None
    return asyncio.run(bounded())


async def never() -> None:
    await asyncio.Event().wait()


async def at_once() -> dict[str, str]:
    return {"type": "http.disconnect"}


class TestUnlessGone:
    def test_the_work_is_done_while_the_client_stays(self):
        async def work() -> str:
            await asyncio.sleep(0.01)
            return "done"

        assert race(never, work()) == "done"

    def test_a_client_that_goes_ends_the_work_and_it_can_clean_up(self):
        cleaned: list[str] = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                cleaned.append("yes")

        async def later() -> dict[str, str]:
            await asyncio.sleep(0.01)
            return await at_once()

        with pytest.raises(event_stream.ClientGone):
            race(later, work())
        assert cleaned == ["yes"], "wait for the work's end after cancelling it"

    def test_it_waits_without_looking_again_and_again(self):
        turns: list[object] = []

        async def work() -> None:
            loop = asyncio.get_running_loop()
            for name in ("call_soon", "call_at"):
                call = getattr(loop, name)
                setattr(loop, name, lambda *args, call=call, **kwargs: turns.append(args) or call(*args, **kwargs))
            await asyncio.sleep(0.4)

        race(never, work())
        assert len(turns) < 30, f"0.4 s of waiting took {len(turns)} turns of the event loop, a few expected"

    def test_the_works_error_is_its_own(self):
        async def work() -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            race(never, work())

    def test_an_answer_that_is_complete_counts_although_the_client_went_at_that_moment(self):
        async def work() -> str:
            return "done"

        assert race(at_once, work()) == "done"

    def test_the_work_ends_when_the_race_itself_is_cancelled(self):
        ended: list[str] = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("yes")

        async def run() -> None:
            task = asyncio.create_task(event_stream.unless_gone(never, work()))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait({task}, timeout=2)
            assert task.cancelled(), "when it is cancelled itself, it ends the work and is cancelled, within 2 s"
            left = asyncio.all_tasks() - {asyncio.current_task()}  # here: the loop's own end cancels what is left
            assert ended == ["yes"], "the work runs on after the race was cancelled"
            assert all(task.cancelling() for task in left), "a task runs on after the race was cancelled"

        asyncio.run(run())


class TestBreakIt:
    def test_your_test_tells_the_broken_server_from_the_reference(self):
        assert_catches("g")


class TestWholeStage:
    def test_the_tutor_answers_over_http_and_forgets_who_has_left(self):
        llm = LLM("tutor", device="cpu", max_num_seqs=2, num_kvcache_blocks=128)
        question = {"prompt": "What is a KV cache?", "temperature": 0, "max_tokens": 12}
        [expected] = llm.generate([question["prompt"]], SamplingParams(temperature=0, max_tokens=12), False)
        ready: list[tuple] = []
        options = {"host": "127.0.0.1", "port": 0, "model": "tutor", "max_queue": 1}
        server = threading.Thread(
            target=lambda: asyncio.run(serve(llm, on_ready=lambda *said: ready.append(said), **options))
        )
        server.start()
        wait_until(lambda: ready and ready[0][0].started)
        url = f"http://127.0.0.1:{ready[0][1]}/v1/completions"
        try:
            body = httpx.post(url, json=question | {"stream": True}, timeout=60).text
            *messages, done = read_events(body)
            text = "".join(json.loads(message)["choices"][0]["text"] for message in messages)
            assert (text, len(messages), done) == (expected["text"], 12, "[DONE]")
            endless = question | {"stream": True, "max_tokens": 4000, "ignore_eos": True, "n": 3}
            with httpx.stream("POST", url, json=endless, timeout=60) as response:
                lines = response.iter_lines()
                next(lines)
                assert httpx.post(url, json=question, timeout=60).status_code == 429
            wait_until(lambda: not llm.calls.has_unfinished())
            assert httpx.post(url, json=question, timeout=60).json()["choices"][0]["text"] == expected["text"]
        finally:
            ready[0][0].handle_exit(15, None)
            server.join(60)
        assert llm.calls.stats()["num_used_blocks"] == 0


def wait_until(happens, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
