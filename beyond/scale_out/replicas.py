"""Replicas: several whole engines behind one address, as a Ray Serve application.

    client ──HTTP──► Ray's proxy ──► Router ──handle──► Engine (a replica: the API of beyond/serving, and its engine)
                                                   └──► Engine …

Ray Serve starts the replicas, on this machine or on all that have joined with `ray start`, restarts those that die,
replaces them one by one when the application is deployed again, and has a router that keeps a session on its replica.
Our part is small: which requests belong to one session, and when a request may be sent a second time. An engine's API
is called directly as an ASGI application: its messages go over Ray's handle, one by one.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from itertools import groupby
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from beyond.scale_out.sessions import session_of
from beyond.serving.app import Api
from beyond.serving.async_llm import AsyncLLM, QueueFull
from beyond.serving.defaults import sampling_defaults
from beyond.serving.engine_process import EngineProcess
from beyond.serving.http_errors import error_response
from beyond.serving.protocol import Limits, RequestError
from beyond.serving.reasoning import ChatOptions
from beyond.serving.remote_engine import RemoteLLM, RemoteLoop

CPUS = 0.1  # per process, for Ray's accounting: more would not fit on a laptop, and 0 would put all on one machine
ATTEMPTS = 3  # replicas to try before a request fails
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


class Engine:
    """One replica: an engine with the API of `beyond/serving` around it.

    Args:
        engine: `module:class` of the engine.
        options: the engine's.
        max_queue, api_key: as in `beyond.serving.server.serve`.
        generation_config: as in `sampling_defaults`.
        release: a new number replaces all replicas.
        model, hosts, request_log: the model's name for clients, the server's host names and its log, as in `Api`.
        chat: settings for chats.
    """

    async def __init__(
        self,
        engine: str,
        options: dict[str, Any],
        max_queue: int,
        api_key: str | None,
        generation_config: str,
        release: int,
        model: str | None = None,
        hosts: Collection[str] = (),
        request_log: bool = True,
        chat: ChatOptions | None = None,
    ) -> None:
        llm = await asyncio.to_thread(lambda: RemoteLLM(EngineProcess(engine, options)))
        self.llm = AsyncLLM(llm, max_queue)
        assert isinstance(self.llm.engine_loop, RemoteLoop)
        self.llm.engine_loop.on_death = self._end_with_engine
        defaults = sampling_defaults(llm.source, generation_config)
        write = print if request_log else None  # into Ray's log
        self.api = Api(self.llm, model or llm.source.name, Limits(), api_key, defaults, hosts, write, chat)
        self.app = self.api.app()

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """Yield the ASGI messages of an answer. Close the generator to tell the API that the client has gone."""
        messages: asyncio.Queue[Any] = asyncio.Queue()  # None at the end
        unread, gone = [{"type": "http.request", "body": body}], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(self.app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            gone.set()
            await task

    async def metrics(self) -> tuple[str, str]:
        """Return this replica's name and its metrics; `EngineClosed` when it has ended."""
        text = await self.api.metrics_text()
        return serve.get_replica_context().replica_id.unique_id, text

    async def defaults(self) -> dict[str, float]:
        """Return the sampling parameters of requests that name none."""
        return self.api.defaults

    async def end(self, seconds: float) -> None:
        """Stop accepting requests, finish the running ones, and end those that remain after `seconds`."""
        await self.llm.drain(seconds)
        await self.llm.close()

    async def check_health(self) -> None:
        """Raise if the engine has failed and a trial step fails too; Ray then replaces the replica."""
        await self.llm.works()
        if (failure := self.llm.engine_loop.failure) is not None:
            raise failure

    def _end_with_engine(self) -> None:
        """End this process, because its engine has ended. Ray then starts another replica.

        No client has been told yet, so the router sends unanswered requests to another replica.
        """
        print(f"[replicas] {self.llm.engine_loop.failure}; this replica ends", file=sys.stderr, flush=True)
        os._exit(1)

    async def __del__(self) -> None:
        await self.llm.close()


class Router:
    """Sends each request to the replica of its session, and to another one if that dies before it answers.

    Args:
        engines: a handle on the replicas.
    """

    def __init__(self, engines: DeploymentHandle) -> None:
        self.engines = engines

    async def __call__(self, request: Request) -> Response:
        if request.url.path == "/metrics":
            return await self.metrics()
        names = ("type", "http_version", "method", "path", "raw_path", "query_string", "headers", "scheme")
        scope = {name: request.scope[name] for name in names if name in request.scope} | {"asgi": {"version": "3.0"}}
        body = await read_body(request, Limits().body_bytes)
        session = request.headers.get("x-session-id") or session_of(body)
        for left in reversed(range(ATTEMPTS)):
            engine = self.engines.options(method_name="answer", stream=True, session_id=session)
            messages = engine.remote(scope, body)
            try:
                # Nothing has been sent to the client yet, so nothing is lost if a replica dies before this point.
                start, first = await anext(messages), await anext(messages)
                break
            except BackPressureError:
                return error_response(QueueFull("all replicas are full, and as many requests wait as may; retry later"))
            except DeploymentUnavailableError as error:
                return error_response(RequestError(f"no replica serves: {error.message}", 503))
            except RayActorError as error:
                if not left:
                    return error_response(RequestError(f"{ATTEMPTS} replicas died before they answered: {error}", 503))
        response = StreamingResponse(_bodies(first, messages), start["status"])
        response.raw_headers = list(start["headers"])
        return response

    async def metrics(self) -> Response:
        """Return the metrics of all live replicas, each line with its replica's name."""
        found = await self.engines.broadcast("metrics").results_async(return_exceptions=True)
        texts = dict(each for each in found if not isinstance(each, BaseException))
        return PlainTextResponse(merge_metrics(texts), media_type="text/plain; version=0.0.4")

    async def defaults(self) -> dict[str, float]:
        """Return the sampling parameters of requests that name none, which all replicas read from the same model."""
        found = await self.engines.broadcast("defaults").results_async(return_exceptions=True)
        return next(each for each in found if not isinstance(each, BaseException))

    async def end(self, seconds: float) -> None:
        """End all replicas: see `Engine.end`."""
        with suppress(DeploymentUnavailableError):  # there are none
            await self.engines.broadcast("end", seconds).results_async(return_exceptions=True)


async def _bodies(first: dict[str, Any], messages: Any) -> AsyncIterator[bytes]:
    """Yield the parts of a response. If the client disconnects, the generator is closed and the replica notified."""
    try:
        yield first.get("body", b"")
        async for message in messages:
            yield message.get("body", b"")
    finally:
        with suppress(Exception):
            messages.cancel()


async def read_body(request: Request, limit: int) -> bytes:
    """Read a request's body, and stop just past the limit: the API then refuses it."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            break
    return bytes(body)


def merge_metrics(texts: dict[str, str]) -> str:
    """Merge several replicas' metrics into one text: the samples of one metric stay together, as Prometheus asks."""
    families: dict[str, list[str]] = {}  # by their HELP and TYPE lines
    for replica, text in texts.items():
        head = ""
        for is_comment, lines in groupby(text.splitlines(), lambda line: line.startswith("#")):
            if is_comment:
                head = "\n".join(lines)
            else:
                families.setdefault(head, []).extend(with_label(line, f'replica="{replica}"') for line in lines)
    return "".join(f"{head}\n" + "".join(f"{line}\n" for line in lines) for head, lines in families.items())


def with_label(sample: str, label: str) -> str:
    """Add a label to a sample, which may have none yet: `name value`, or `name{labels} value`."""
    name, brace, rest = sample.partition("{")
    if brace:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"


def application(
    engine: str,
    options: dict[str, Any],
    *,
    replicas: int,
    gpus: int = 0,
    max_queue: int = 256,
    api_key: str | None = None,
    generation_config: str = "auto",
    deadline: float = 30,
    release: int = 0,
    has_room: bool = True,
    model: str | None = None,
    hosts: Collection[str] = (),
    request_log: bool = True,
    chat: ChatOptions | None = None,
) -> serve.Application:
    """Make the application, for `serve.run`.

    Args:
        engine, options, max_queue, api_key, generation_config, release, model: as in `Engine`.
        hosts, request_log, chat: as in `Engine`.
        replicas: engines.
        gpus: of each replica.
        deadline: seconds for a replica's running answers when it is replaced.
        has_room: whether one more replica fits while they are replaced. If so, a new replica starts before an old one
            ends; otherwise afterwards.
    """
    room = options["max_num_seqs"] + max_queue  # of a replica
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    engines = serve.deployment(Engine).options(
        name="Engine",
        num_replicas=replicas,
        max_ongoing_requests=room,
        max_queued_requests=replicas * room,  # waiting in the router; fewer would refuse a burst
        graceful_shutdown_timeout_s=deadline,
        graceful_shutdown_wait_loop_s=0.2,  # how often a replica that is being replaced checks for running answers
        health_check_period_s=1,
        max_constructor_retry_count=1,  # a wrong option stays wrong
        max_surge_percent=1 if has_room else 0,  # rounded up to a replica
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        ray_actor_options={"num_cpus": CPUS, "num_gpus": gpus, "runtime_env": {"env_vars": {"PYTHONPATH": path}}},
    )
    router = serve.deployment(Router).options(
        name="Router",
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=deadline,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": CPUS, "runtime_env": {"env_vars": {"PYTHONPATH": path}}},
    )
    given = engine, options, max_queue, api_key, generation_config, release, model, list(hosts), request_log, chat
    return router.bind(engines.bind(*given))
