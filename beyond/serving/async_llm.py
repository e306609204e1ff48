"""An engine for asyncio: many coroutines await answers, and one thread runs the steps.

    llm = AsyncLLM(LLM("tutor"))                       # inside a running event loop
    async for piece in llm.stream("What is a KV cache?", SamplingParams(temperature=0)):
        print(piece, end="")
    outputs = await llm.generate(["…", "…"])
    await llm.close()

The engine's queue is bounded. A queue without a bound turns overload into endless waiting for everybody;
a bounded one tells the caller at once to come back later (`QueueFull`; status 429 over HTTP).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, cast

from beyond.serving.engine_loop import Call, EngineClosed, EngineLoop, News, T
from beyond.serving.metrics import RequestMetrics, engine_numbers
from beyond.serving.remote_engine import RemoteLLM, RemoteLoop
from stage_a_naive.contract.logprobs import PromptLogprobs
from stage_a_naive.contract.outputs import GenerationOutput, Request, returned
from stage_a_naive.contract.requests import only_answer
from stage_a_naive.entrypoints.frontend import Prompts
from stage_a_naive.sampling import SamplingParams
from stage_d_paged.scoring import MOST_TOKENS, check_can_score
from stage_e_batching.calls import Calls
from stage_e_batching.calls.mailbox import Event
from stage_e_batching.llm import LLM
from stage_e_batching.scoring import score_prompts

TRIAL_SECONDS = 5  # for one token of an idle engine
ANSWER_SECONDS = 1.0  # for the engine's numbers, which it tells between two steps
HEALTH_SECONDS = 60.0  # an engine that has been silent for this long is not healthy


class QueueFull(Exception):
    """Too many requests are waiting."""


class Stream(Call):
    """The events of one call's requests as they arrive: use it in `with`, and iterate with `async for`.

    Each item is a list of all events since the last item, so a slow reader catches up at once. Leaving the `with` block
    early drops the requests that have not ended.
    """

    def __init__(self, requests: Sequence[Request], llm: AsyncLLM) -> None:
        super().__init__(requests)
        self.num_unfinished = len(requests)
        self._llm = llm
        self._news: list[tuple[Request, Event]] = []
        self._error: Exception | None = None  # what ended the engine's work; told behind the news that came before it
        self._arrived: asyncio.Future[None] | None = None  # while the reader waits

    def put(self, request: Request, event: Event) -> None:
        """Receive an event of a request."""
        self.num_unfinished -= event.output is not None or event.error is not None
        if event.output is None and self._error is None:
            self._error = event.error
        if self._error is None:  # what ends one request alone is told with its output
            self._news.append((request, event))
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._llm.forget(self)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[tuple[Request, Event]]:
        """Return the next events, also of failed requests. An error of the engine is raised after them."""
        while not self._news:
            if self._error is not None:
                raise self._error
            if not self.num_unfinished:
                raise StopAsyncIteration
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        news, self._news = self._news, []
        return news


def groups(prompts: list[list[int]], most: int = MOST_TOKENS) -> Iterator[list[list[int]]]:
    """Group prompts, in their order: at most `most` tokens, or one prompt that is longer.

    The engine computes one group for a caller before another caller's turn, or before the caller may cancel.
    """
    group: list[list[int]] = []
    for prompt in prompts:
        if group and sum(map(len, group)) + len(prompt) > most:
            yield group
            group = []
        group.append(prompt)
    yield group


class AsyncLLM:
    """An `LLM` of stage E, F or `beyond`, for the coroutines of one event loop. Make it inside the running loop.

    Other threads of the program may still call `llm.generate`: their requests join the same batches.

    Args:
        llm: the engine; it runs in a thread of this process or, as a `RemoteLLM`, in another process.
        max_queue: requests that may wait, in addition to those in batch slots.
        health_seconds: the engine counts as healthy if it has been silent for at most this long.
    """

    def __init__(self, llm: LLM | RemoteLLM, max_queue: int = 256, health_seconds: float = HEALTH_SECONDS) -> None:
        self.llm = llm
        self.health_seconds = health_seconds
        self.max_unfinished = llm.options.max_num_seqs + max_queue
        self.num_unfinished = 0
        self.draining = False
        self.metrics = RequestMetrics(llm.process.pid if isinstance(llm, RemoteLLM) else None)
        self._question: asyncio.Future[dict[str, float]] | None = None  # about the engine's numbers, asked last
        self._asked = 0.0  # when, in seconds on the monotonic clock
        self._numbers: dict[str, float] = {}  # the last answer
        self._loop = asyncio.get_running_loop()
        self._all_done = asyncio.Event()
        self._scoring = asyncio.Lock()  # a caller that gives up leaves little to be done
        if isinstance(llm, RemoteLLM):
            self.engine_name = llm.package
            self.engine_loop = RemoteLoop(llm.process, self._hand_out)
        else:
            self.engine_name = type(llm).__module__.removesuffix(".llm")
            self.engine_loop = EngineLoop(llm.calls, self._deliver)

    def submit(self, requests: Sequence[Request]) -> Stream:
        """Queue requests that `llm.requests` has checked, all of them or none.

        Raises:
            QueueFull: there is no room now.
            EngineClosed: the engine is closed.
        """
        self._check_open()
        self._admit(len(requests))
        stream = Stream(requests, self)
        self.engine_loop.submit(stream)
        return stream

    def _check_open(self) -> None:
        if self.draining:
            raise EngineClosed("the server is shutting down; send the request elsewhere, or again when it is back")

    def _admit(self, num_requests: int) -> None:
        """Count new requests; if there is no room, raise `QueueFull` and count none."""
        if self.num_unfinished + num_requests > self.max_unfinished:
            raise QueueFull(
                f"{self.num_unfinished} requests are waiting or running, and at most {self.max_unfinished} may; "
                "retry later"
            )
        self.num_unfinished += num_requests

    def forget(self, stream: Stream) -> None:
        """Drop the unfinished requests of a stream."""
        if stream.num_unfinished:
            self.metrics.count_aborted(time.perf_counter(), stream, stream.num_unfinished)
            self._count_out(stream.num_unfinished)
            stream.num_unfinished = 0
            self.engine_loop.drop(stream)

    async def generate(
        self, prompts: Prompts, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationOutput]:
        """Complete prompts, with the results and errors of `llm.generate`. Cancelling it drops the requests."""
        requests = await asyncio.to_thread(self.llm.requests, prompts, sampling_params)
        outputs: dict[int, GenerationOutput] = {}
        with self.submit(requests) as stream:
            async for news in stream:
                outputs |= {request.index: event.output for request, event in news if event.output is not None}
        return returned([outputs[request.index] for request in requests])

    async def stream(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[str]:
        """Complete one prompt, yielding pieces of text as they become known. Close it to drop the request."""
        request = only_answer(await asyncio.to_thread(self.llm.requests, [prompt], sampling_params))
        with self.submit([request]) as stream:
            async for news in stream:
                for _, event in news:
                    if event.text:
                        yield event.text
                    if event.error is not None:
                        raise event.error

    async def score(self, prompts: list[list[int]], count: int) -> list[PromptLogprobs]:
        """Compute the log-probability of every token of some prompts, and of the `count` likeliest at its position.

        Args:
            prompts: token ids that `llm.requests` has checked.

        Raises:
            QueueFull, EngineClosed: as `submit`.
            ValueError: the engine has several ranks.
        """
        check_can_score(self.llm.options)
        self._check_open()
        self._admit(len(prompts))
        scored: list[PromptLogprobs] = []
        try:
            for group in groups(prompts):
                function = cast("Callable[[Calls], Any]", partial(score_prompts, group, count))
                async with self._scoring:
                    scored += await self._call(function)
        finally:
            self._count_out(len(prompts))
        return scored

    async def works(self) -> bool:
        """Tell whether requests are accepted and steps succeed. An idle engine whose last step failed tries another."""
        if self.engine_loop.failure is not None and not self.num_unfinished and not self.draining:
            with suppress(Exception):  # the step's, which then is the new failure
                async with asyncio.timeout(TRIAL_SECONDS):
                    await self.generate([[0]], SamplingParams(max_tokens=1))
        self.ask()
        return not self.draining and self.engine_loop.failure is None and self.silence < self.health_seconds

    def ask(self) -> None:
        """Ask the engine for its numbers, unless an answer is still due. It answers between two steps.

        A server asks once a second, and so notices a stopped process or a kernel that never ends.
        """
        if self._question is None or self._question.done():
            self._asked = time.perf_counter()
            self._question = asyncio.ensure_future(self._call(engine_numbers))
            self._question.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be closed

    async def numbers(self) -> dict[str, float]:
        """Return the engine's gauges and totals; if it does not answer soon, the last known ones.

        Raises:
            EngineClosed: the engine is closed.
        """
        self.ask()
        assert self._question is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, ANSWER_SECONDS - self.silence)):
                self._numbers = await asyncio.shield(self._question)
        return self._numbers | {"engine_silent_seconds": self.silence}

    @property
    def silence(self) -> float:
        """Return for how many seconds an answer of the engine has been due; 0 if none is."""
        if self._question is None or self._question.done():
            return 0.0
        return time.perf_counter() - self._asked

    async def _call(self, function: Callable[[Calls], T]) -> T:
        return await asyncio.wrap_future(self.engine_loop.call(function))

    async def drain(self, seconds: float) -> bool:
        """Accept no new requests, and wait for the accepted ones; returns whether all ended in time."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.num_unfinished:
                    self._all_done.clear()
                    await self._all_done.wait()
        return self.num_unfinished == 0

    async def close(self) -> None:
        """End the engine's thread or process; unfinished requests get an error. A second call is a no-op."""
        self.draining = True
        self.engine_loop.close()
        await asyncio.to_thread(self.engine_loop.join)

    def _deliver(self, now: float, news: News) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._hand_out, now, news)

    def _hand_out(self, now: float, news: News) -> None:
        for stream, request, event in cast("list[tuple[Stream, Request, Event]]", news):
            if not stream.num_unfinished:  # its reader has gone
                continue
            stream.put(request, event)
            self.metrics.observe(now, stream, request, event)
            if event.output is not None or event.error is not None:
                self._count_out(1)

    def _count_out(self, num_requests: int) -> None:
        self.num_unfinished -= num_requests
        if not self.num_unfinished:
            self._all_done.set()
