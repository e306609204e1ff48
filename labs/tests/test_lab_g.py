"""Drives lab G. The parts run without a model; the whole server answers over a socket."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import httpx

import beyond.serving.async_llm as async_llm
import beyond.serving.engine_loop as engine_loop
import beyond.serving.event_stream as event_stream
import beyond.serving.sse as sse
from beyond.serving.server import serve
from labs.driving import Compared, error_of, numbers
from labs.tests.support import Values, request_of
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
    def test_one_event_comes_back_as_it_was(self) -> Values:
        cases = ["[DONE]", "", " indented", '{"text": "data: "}', "键值缓存", "a\u2028b\x0bc"]
        cases += ["a\nb", "a\n\nb", "\n", "a\r\nb", "a\rb", "end\n"]
        parts = ("a", " ", ":", "\n", "\r", "\r\n", "data: ", "é")
        for data in [*cases, *("".join(numbers.choices(parts, k=8)) for _ in range(100))]:
            yield (
                f"frame({data!r}) is one event with this data, as a browser reads it",
                read_events(sse.frame(data).decode()),
            )

    def test_events_that_follow_one_another_stay_apart(self) -> Values:
        yield "'1', '2\\n3' and '4'", read_events((sse.frame("1") + sse.frame("2\n3") + sse.frame("4")).decode())


class TestAdmit:
    def test_a_call_gets_in_whole_or_not_at_all(self) -> Values:
        for limit, before, calls in ((5, 3, [2, 1]), (5, 0, [6, 5]), (9, 2, [numbers.randint(1, 9) for _ in range(6)])):
            llm = SimpleNamespace(num_unfinished=before, max_unfinished=limit)
            for count in calls:
                given = f"{llm.num_unfinished} of {limit} are unfinished, a call of {count}"
                said: list[str] = []

                def admit(llm=llm, count=count, said=said) -> None:
                    try:
                        async_llm.AsyncLLM._admit(llm, count)
                    except async_llm.QueueFull as error:
                        said.append(str(error))
                        raise

                yield f"{given}: raises", error_of(admit, async_llm.QueueFull)
                yield f"{given}: unfinished afterwards; who is refused is not counted", llm.num_unfinished
                yield f"{given}: the message names the limit, {limit}", [str(limit) in text for text in said]


class Aborts:
    """An engine that records aborts, and that the bookkeeping was consistent then."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def abort(self, request_id: int) -> bool:
        self.ids.append(request_id)
        return True


class TestRemove:
    def removed(self, times: int) -> Values:
        first = numbers.randint(1, 50)
        mine, other = engine_loop.Call([request_of([1])] * 3), engine_loop.Call([request_of([2])])
        mine.live = {first: mine.requests[0], first + 2: mine.requests[2]}  # the second has ended already
        other.live = {first + 1: other.requests[0]}
        loop = SimpleNamespace(_calls={first: mine, first + 1: other, first + 2: mine}, _shared=Aborts())
        for _ in range(times):
            engine_loop.EngineLoop._remove(loop, mine)
        given = f"a call of requests {first} and {first + 2}, removed {times} times"
        yield f"{given}: the engine is told of those that run, once each", sorted(loop._shared.ids)
        yield f"{given}: self._calls knows another call's request alone", sorted(loop._calls)
        yield f"{given}: call.live is empty afterwards", sorted(mine.live)
        yield f"{given}: the other call's request runs on", len(other.live)

    def test_what_has_not_ended_is_aborted_and_nothing_else(self) -> Values:
        yield from self.removed(1)

    def test_a_second_time_does_nothing(self) -> Values:
        yield from self.removed(2)


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
    def test_the_work_is_done_while_the_client_stays(self) -> Values:
        value = numbers.randrange(10**6)

        async def work() -> int:
            await asyncio.sleep(0.01)
            return value

        yield f"work that returns {value}", race(never, work())

    def test_a_client_that_goes_ends_the_work_and_it_can_clean_up(self) -> Values:
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

        yield "the client goes: raises", error_of(lambda: race(later, work()), event_stream.ClientGone)
        yield "wait for the work's end after cancelling it: it has cleaned up", cleaned

    def test_it_waits_without_looking_again_and_again(self) -> Values:
        turns: list[object] = []

        async def work() -> None:
            loop = asyncio.get_running_loop()
            for name in ("call_soon", "call_at"):
                call = getattr(loop, name)
                setattr(loop, name, lambda *args, call=call, **kwargs: turns.append(args) or call(*args, **kwargs))
            await asyncio.sleep(0.4)

        race(never, work())
        yield "turns of the event loop in 0.4 s of waiting", Compared(len(turns), most=30)

    def test_the_works_error_is_its_own(self) -> Values:
        async def work() -> None:
            raise KeyError("mine")

        yield "the work raises a KeyError", error_of(lambda: race(never, work()), KeyError)

    def test_an_answer_that_is_complete_counts_although_the_client_went_at_that_moment(self) -> Values:
        value = numbers.randrange(10**6)

        async def work() -> int:
            return value

        yield f"work that has returned {value} when the client goes", race(at_once, work())

    def test_the_work_ends_when_the_race_itself_is_cancelled(self) -> Values:
        ended: list[str] = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("yes")

        async def run() -> list[object]:
            task = asyncio.create_task(event_stream.unless_gone(never, work()))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait({task}, timeout=2)
            left = asyncio.all_tasks() - {asyncio.current_task()}  # here: the loop's own end cancels what is left
            return [task.cancelled(), list(ended), sum(not task.cancelling() for task in left)]

        yield "the race is cancelled: it is so within 2 s, the work has ended, tasks that run on", asyncio.run(run())


class TestWholeStage:
    def test_the_tutor_answers_over_http_and_forgets_who_has_left(self) -> Values:
        llm = LLM("tutor", device="cpu", max_num_seqs=2, num_kvcache_blocks=128)
        question = {"prompt": "What is a KV cache?", "temperature": 0, "max_tokens": 12}
        [expected] = llm.generate([question["prompt"]], SamplingParams(temperature=0, max_tokens=12), False)
        yield "the engine's own answer", expected["text"]
        ready: list[tuple] = []
        options = {"host": "127.0.0.1", "port": 0, "model": "tutor", "max_queue": 1}
        server = threading.Thread(
            target=lambda: asyncio.run(serve(llm, on_ready=lambda *said: ready.append(said), **options))
        )
        server.start()
        wait_until(lambda: ready and ready[0][0].started)
        url, found = f"http://127.0.0.1:{ready[0][1]}/v1/completions", []
        try:
            *messages, done = read_events(httpx.post(url, json=question | {"stream": True}, timeout=60).text)
            text = "".join(json.loads(message)["choices"][0]["text"] for message in messages)
            found.append(("streamed: text, events, and the last one", [text, len(messages), done]))
            endless = question | {"stream": True, "max_tokens": 4000, "ignore_eos": True, "n": 3}
            with httpx.stream("POST", url, json=endless, timeout=60) as response:
                lines = response.iter_lines()
                next(lines)
                found.append(("the queue is full: the status", httpx.post(url, json=question, timeout=60).status_code))
            wait_until(lambda: not llm.calls.has_unfinished())
            again = httpx.post(url, json=question, timeout=60).json()["choices"][0]["text"]
            found.append(("when the client has gone, the next one's text", again))
        finally:
            ready[0][0].handle_exit(15, None)
            server.join(60)
        yield from found
        yield "blocks in use at the end", llm.calls.stats()["num_used_blocks"]


def wait_until(happens, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
