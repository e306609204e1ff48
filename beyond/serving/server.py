"""Start the server, and shut it down without losing answers in progress.

The first Ctrl-C or SIGTERM begins the shutdown: new requests get 503, and running answers are finished, for `deadline`
seconds; then the remaining ones get an error, and the server ends. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil
from types import FrameType
from typing import cast

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from beyond.serving.address import listen
from beyond.serving.app import Api
from beyond.serving.async_llm import HEALTH_SECONDS, AsyncLLM
from beyond.serving.connection import Connection
from beyond.serving.live_view import LiveView
from beyond.serving.protocol import Limits
from beyond.serving.reasoning import ChatOptions
from beyond.serving.remote_engine import EngineDied, RemoteLLM, RemoteLoop
from stage_e_batching.llm import LLM

CLOSING_SECONDS = 2  # for the last bytes of answers that are complete
HANDLER_SECONDS = 10  # for handlers without a connection; then uvicorn cancels them, and logs that as errors


class Server(uvicorn.Server):
    """uvicorn's server, which finishes running answers before it ends.

    Args:
        config: uvicorn's.
        llm: the engine.
        deadline: seconds for running answers.
        read_seconds: seconds for the head of a request to arrive.
    """

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, deadline: float, read_seconds: float) -> None:
        super().__init__(config)
        self._read_seconds = read_seconds
        self._llm, self._deadline = llm, deadline
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. It may arrive between any two lines of Python, so the event loop does the rest."""
        self._loop.call_soon_threadsafe(self.begin_end)

    def begin_end(self) -> None:
        """End when the running answers are complete; a second call ends at once."""
        if self._end is None:
            left = self._llm.num_unfinished
            say(f"[serving] ending; answers that are not complete yet: {left} (again to end at once)")
            self._end = asyncio.ensure_future(self._finish())
            self._end.add_done_callback(lambda _: self.end_now())  # also when it is cancelled before it has begun
        else:
            self._end.cancel()

    def end_now(self) -> None:
        """End without waiting for answers; incomplete ones get an error."""
        self._llm.draining = True
        self._llm.engine_loop.close()
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Check once a second whether clients or the engine are silent. uvicorn calls this ten times a second."""
        if counter % 10 == 0:
            self._llm.ask()
            for connection in list(self.server_state.connections):
                cast("Connection", connection).close_if_silent(time.perf_counter(), self._read_seconds)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections; those whose clients read nothing, after `CLOSING_SECONDS`."""
        cut = self._loop.call_later(CLOSING_SECONDS, self._cut_off)
        await super().shutdown(sockets)
        cut.cancel()

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # to its handler the client is gone

    async def _finish(self) -> None:
        if not await self._llm.drain(self._deadline):
            left = self._llm.num_unfinished
            say(f"[serving] answers that were not complete after {self._deadline:g} s: {left}")


def say(line: str) -> None:
    """Print a line. If that fails, discard all later output: Ctrl-C also ends the `tee` of `… | tee log`."""
    try:
        print(line, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Let web pages of these origins use `app` (CORS). Without origins, only its own pages and other programs can."""
    return CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]) if origins else app


async def serve(
    llm: LLM | RemoteLLM,
    *,
    host: str,
    port: int,
    model: str,
    max_queue: int = 256,
    limits: Limits | None = None,
    api_key: str | None = None,
    defaults: Mapping[str, float] | None = None,
    deadline: float = 30,
    page: bool = True,
    hosts: Collection[str] = (),
    max_connections: int = 4096,
    origins: Sequence[str] = (),
    write_log: Callable[[str], None] | None = None,
    chat: ChatOptions | None = None,
    tool_call_parser: str = "auto",
    health_seconds: float = HEALTH_SECONDS,
    on_ready: Callable[[Server, int], None] | None = None,
) -> None:
    """Serve an engine over HTTP until a signal ends it. The arguments not named here are those of `Api`.

    Args:
        host, port: where to listen; port 0 takes a free one.
        max_queue: the most waiting requests.
        deadline: seconds for running answers after the shutdown has begun.
        page: whether to serve the live page at `/`, whose buttons pause the engine for everybody.
        max_connections: the most open connections; further ones get 503.
        origins: web pages of these origins may use the API (CORS).
        health_seconds: that the engine may be silent for and still count as healthy.
        on_ready: called with the server and its port when it listens.

    Raises:
        OSError: see `listen`.
        EngineDied: the engine's process died, which ends the server.
    """
    listening = listen(host, port)  # before the engine's thread begins
    async_llm = AsyncLLM(llm, max_queue, health_seconds)
    parts = write_log, chat, tool_call_parser
    limits = limits or Limits()
    api = Api(async_llm, model, limits, api_key, defaults or {}, hosts, *parts)
    view = LiveView(api) if page else None
    config = uvicorn.Config(
        with_origins(api.app(view.routes() if view else ()), origins),
        http=Connection,
        ws="none",  # its protocol would be another class of connections
        timeout_keep_alive=ceil(limits.read_seconds),
        log_level="error",  # its warnings are about what clients send, which they are told
        access_log=False,
        lifespan="off",
        limit_concurrency=max_connections,
        proxy_headers=False,  # nobody asks who a client is
        timeout_graceful_shutdown=CLOSING_SECONDS + HANDLER_SECONDS,
    )
    server = Server(config, async_llm, deadline, limits.read_seconds)
    if isinstance(async_llm.engine_loop, RemoteLoop):
        async_llm.engine_loop.on_death = server.end_now
    if on_ready is not None:
        on_ready(server, listening.getsockname()[1])
    try:
        await server.serve([listening])
    finally:
        await async_llm.close()
    if isinstance(async_llm.engine_loop.failure, EngineDied):
        raise async_llm.engine_loop.failure
