"""Streamed answers, which a client may leave at any time: server-sent events, and detecting a disconnect.

For every answer the server waits for two things at once: the answer, and the end of the connection. If the client
disconnects first, the work is cancelled. This leaves the `with stream` block, which drops the requests, and the engine
frees their blocks before its next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from beyond.serving.answers import Answer, as_json
from beyond.serving.async_llm import Stream
from beyond.serving.http_errors import ClientGone, as_request_error, error_body
from beyond.serving.sse import DONE, START, frame
from stage_a_naive.contract.outputs import GenerationOutput, Request
from stage_e_batching.calls.mailbox import Event

SEND_SECONDS = 60  # a client that takes in nothing for this long is treated as gone
T = TypeVar("T")


async def unless_gone(receive: Callable[[], Awaitable[object]], work: Awaitable[T]) -> T:
    """Await `work`, but cancel it when the client closes its connection.

    Args:
        receive: of a connection whose body has been read, so its next message is the end.

    Raises:
        ClientGone: the connection ended first.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


class EventStream:
    """A response that sends tokens as server-sent events, one event per token.

    Attributes:
        code: code of the error that ended it early; else empty.
    """

    def __init__(self, stream: Stream, answer: Answer, include_usage: bool) -> None:
        self._stream, self._answer, self._include_usage = stream, answer, include_usage
        self._outputs: dict[int, GenerationOutput] = {}  # of the answers that have ended
        self._num_begun = self._num_sent = 0  # writes
        self.code = "client_gone"  # until it is complete

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone, OSError), self._stream:  # nobody is left to tell
            await asyncio.sleep(0)  # requests that came at the same moment go to the engine before any answer begins
            await unless_gone(partial(self._gone, receive), self._send_all(scope, send))

    async def _gone(self, receive: Receive) -> None:
        """Return when the connection has ended, or when the client has read nothing for `SEND_SECONDS`.

        Looking from time to time costs nothing. A timeout for every write would cost more than the write.
        """
        before = -1
        while self._num_begun == self._num_sent or self._num_begun != before:
            before = self._num_begun
            with suppress(TimeoutError):
                async with asyncio.timeout(SEND_SECONDS):
                    await receive()
                    return

    async def _send_all(self, scope: Scope, send: Send) -> None:
        name = scope.get("request_id", "").encode()
        await send(START | {"headers": [*START["headers"], (b"x-request-id", name)]})

        async def send_on(body: bytes, more: bool = True) -> None:
            self._num_begun += 1
            await send({"type": "http.response.body", "body": body, "more_body": more})
            self._num_sent += 1

        try:
            async for news in self._stream:
                if self._answer.constrains_calls and any(event.output is not None for _, event in news):
                    news = await asyncio.to_thread(self._checked, news)
                frames = list(self._frames(news))
                errors = [output["error"] for output in self._outputs.values() if "error" in output]
                if len(errors) == self._answer.num_choices:
                    await send_on(b"".join(frames))
                    raise errors[0]
                has_ended = len(self._outputs) == self._answer.num_choices
                if has_ended:
                    frames += self._last_frames()
                await send_on(b"".join(frames), more=not has_ended)  # one write, however many tokens have come
            self.code = ""
        except OSError:
            raise
        except Exception as error:  # the status is sent already, so the stream itself has to say it
            self.code = as_request_error(error).code or "invalid_request"
            await send_on(frame(as_json(error_body(error))) + DONE, more=False)

    def _checked(self, news: list[tuple[Request, Event]]) -> list[tuple[Request, Event]]:
        """Return the news, with errors for complete answers whose calls are invalid."""
        checked = []
        for request, event in news:
            if event.output is not None:
                output = self._answer.checked(event.output)
                event = event._replace(output=output, error=output.get("error"))
            checked.append((request, event))
        return checked

    def _frames(self, news: list[tuple[Request, Event]]) -> Iterator[bytes]:
        """Yield a server-sent event for every token; the last one of an answer has its finish reason.

        The end may arrive after the last token was read, because another thread runs the steps; then it is a separate
        event. The end of a failed answer has the error; if it is the only answer, the error ends the stream.
        """
        for request, event in news:
            index, tokens, ended, error = request.index, event.tokens, None, None
            if event.output is not None:
                self._outputs[index] = event.output
            if event.output is not None and (event.error is None or self._answer.num_choices > 1):
                ended = event.output
                error = event.error and error_body(event.error)
                *tokens, last = tokens or [None]
            for token in tokens:
                yield frame(self._answer.chunk(index, token))
            if ended is not None:
                yield frame(self._answer.chunk(index, last, ended, error))

    def _last_frames(self) -> Iterator[bytes]:
        if self._include_usage:
            yield frame(self._answer.usage_chunk([self._outputs[i] for i in sorted(self._outputs)]))
        yield DONE
