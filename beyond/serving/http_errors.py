"""Errors for clients: the OpenAI API's error object, with an HTTP status."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from beyond.serving.async_llm import QueueFull
from beyond.serving.engine_loop import EngineClosed
from beyond.serving.protocol import RequestError
from beyond.serving.request_log import RequestLog, request_id
from stage_a_naive.contract.errors import PromptTooLong
from stage_a_naive.contract.params import RULES
from stage_a_naive.contract.structured_outputs import GrammarError

RETRY_SECONDS = 1  # clients wait longer by themselves after every refusal
OTHER_MODELS = ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/pooling", "/classify")
CLIENT_GONE = 499  # nginx's word for it


class ClientGone(Exception):
    """The client closed its connection before it was answered."""


def as_request_error(error: Exception) -> RequestError:
    """Turn an exception into an error for the client. Errors not caused by a request are logged and sent bare."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, GrammarError):  # one that was compiled, and got stuck in the middle of an answer
        return RequestError(str(error), param="structured_outputs", code="form_failed")
    if isinstance(error, QueueFull):
        return RequestError(str(error), 429, code="queue_full", retry_after=RETRY_SECONDS)
    if isinstance(error, EngineClosed):
        return RequestError(str(error), 503, code="shutting_down", retry_after=RETRY_SECONDS)
    if "is_logged" not in vars(error):  # a step that fails has one error for all its requests
        vars(error)["is_logged"] = True
        with suppress(OSError):  # nobody may read the log any more
            traceback.print_exception(error, file=sys.stderr)
    return RequestError(f"the server failed ({type(error).__name__}); its log says how", 500, code="internal_error")


def refused_prompt(error: ValueError, param: str, max_model_len: int) -> RequestError:
    """Turn the engine's error about a prompt or its parameters into an error about that field."""
    code, message = None, str(error).removeprefix("conversation 0: ")  # a request has one
    if isinstance(error, PromptTooLong):  # OpenAI's words: by them LiteLLM knows when to take a model with more room
        code = "context_length_exceeded"
        message = f"This model's maximum context length is {max_model_len} tokens: {message}"
    first = message.partition(" ")[0]
    return RequestError(message, param=first if first in RULES else param, code=code)


def error_body(error: Exception) -> dict[str, Any]:
    """Describe an exception as an error object. As in OpenAI's API, a wrong key or model is an invalid request too."""
    told = as_request_error(error)
    kind = "rate_limit_error" if told.status == 429 else "invalid_request_error"
    kind = "server_error" if told.status >= 500 else kind
    return {"error": {"message": str(told), "type": kind, "param": told.param, "code": told.code}}


def error_response(error: Exception) -> JSONResponse:
    """Answer with an exception."""
    told = as_request_error(error)
    wait = {} if told.retry_after is None else {"Retry-After": str(told.retry_after)}
    return JSONResponse(error_body(told), told.status, wait)


@dataclass(frozen=True)
class Endpoint:
    """A request handler as an ASGI application. An exception of the handler becomes an error response.

    Starlette's router calls this directly. It would wrap a function in three more for every request, and `send` in one
    more for every write.
    """

    handler: Callable[[HttpRequest], Awaitable[ASGIApp]]
    log: RequestLog

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive)
        name, begun = request_id(request.headers.get("x-request-id")), time.perf_counter()
        scope["request_id"], status, code = name, 200, ""
        try:
            response: ASGIApp | Any = await self.handler(request)
        except (ClientGone, ClientDisconnect):
            response, code = Response(status_code=CLIENT_GONE), "client_gone"  # nobody reads it
        except Exception as error:
            told = as_request_error(error)
            response, code = error_response(told), told.code or "invalid_request"
        if isinstance(response, Response):
            status = response.status_code
            response.headers["x-request-id"] = name
        await response(scope, receive, send)
        code = code or getattr(response, "code", "")  # of a stream, which may break off
        self.log.note(scope, status, code, time.perf_counter() - begun)


class App(Router):
    """Starlette's router without its middleware, because the endpoints handle errors themselves."""

    def __init__(self, routes: Sequence[BaseRoute], log: RequestLog) -> None:
        super().__init__(routes)
        self.log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        try:
            await super().__call__(scope, receive, send)
        except HTTPException as error:  # the router's own
            scope["request_id"] = request_id(None)
            self.log.note(scope, error.status_code, "no_such_path", 0)
            await _refused_by_router(scope, error)(scope, receive, send)


def _refused_by_router(scope: Scope, error: HTTPException) -> JSONResponse:
    """Answer requests that the router refuses: an unknown path, or a wrong method."""
    message, code = f"{scope['method']} {scope['path']}: {error.detail.lower()}", None
    if scope["path"] in OTHER_MODELS:
        message = (
            f"{scope['path']} needs a model for embeddings or ranking; this server's generates text, so ask another"
        )
        code = "unsupported_endpoint"
    response = error_response(RequestError(message, error.status_code, code=code))
    response.headers.update(error.headers or {})
    return response
