"""The HTTP API: access, endpoints, answers and errors.

    request -> [key? small enough? JSON?] -> protocol.py -> AsyncLLM.submit -> events -> answers.py -> HTTP

Every error is `{"error": {"message", "type", "param", "code"}}` with the fitting status. While an answer is
computed, the server also waits for the end of its connection (`unless_gone`), so it notices at any point that a client
has disconnected.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
import tomllib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from beyond.serving.answers import Answer, text_of, without_tokens
from beyond.serving.async_llm import AsyncLLM
from beyond.serving.engine_loop import EngineClosed
from beyond.serving.event_stream import EventStream, unless_gone
from beyond.serving.http_errors import App, Endpoint, error_body, error_response, refused_prompt
from beyond.serving.messages import routes as message_routes
from beyond.serving.metrics import exposition
from beyond.serving.openapi import HEADERS, describe_api, docs_page
from beyond.serving.protocol import (
    TOKENIZE_FIELDS,
    Ask,
    Limits,
    RequestError,
    boolean,
    chat_tools,
    check_fields,
    conversation,
    parse_chat,
    parse_completion,
    template_kwargs,
)
from beyond.serving.reasoning import ChatOptions
from beyond.serving.request_log import RequestLog
from beyond.serving.responses import routes as response_routes
from beyond.serving.tools import tool_format
from stage_a_naive.contract.errors import shown
from stage_a_naive.contract.logprobs import PromptLogprobs
from stage_a_naive.contract.outputs import GenerationOutput, Request, returned
from stage_a_naive.contract.params import as_integer
from stage_a_naive.contract.structured_outputs import GrammarError
from stage_e_batching.calls.mailbox import Token

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
VERSION = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["version"]
AT_ONCE = 2000  # characters or token ids: checking and encoding more takes longer than handing it to another thread


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


READ_JSON = json.JSONDecoder(parse_constant=_refuse_constant).decode  # made once: json.loads would make one per request
Handler = Callable[..., Awaitable[ASGIApp]]


class Api:
    """The endpoints.

    Args:
        llm: the engine.
        model: the model's name for clients.
        limits: the limits of one request.
        api_key: what clients must send as `Authorization: Bearer …`; None admits everybody.
        defaults: sampling parameters that a request leaves out.
        hosts: host names, besides `localhost` and numbers, that requests may use if there is no key.
        write_log: called with a line about every request; None writes none.
        chat: options of chats.
        tool_call_parser: name of the parser of tool calls, see `tools.py`; `auto` looks into the chat template.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        model: str,
        limits: Limits,
        api_key: str | None,
        defaults: Mapping[str, float],
        hosts: Collection[str] = (),
        write_log: Callable[[str], None] | None = None,
        chat: ChatOptions | None = None,
        tool_call_parser: str = "auto",
    ) -> None:
        self.llm = llm
        self.model = model
        self.limits = limits
        self.defaults = dict(defaults)
        self.chat = chat or ChatOptions()
        self._key, self._hosts = api_key, {"localhost", *(host.lower() for host in hosts)}
        self._tool_format = tool_format(llm.llm.tokenizer, tool_call_parser)
        self._log = RequestLog(llm.metrics, write_log)
        self._created = int(time.time())

    def app(self, more_routes: Sequence[Route] = ()) -> App:
        """Make the application for a web server."""
        routes = [
            # The router tries one after the other, so the most frequent come first.
            Route("/v1/chat/completions", self.post(self.chat_completions), methods=["POST"]),
            Route("/v1/completions", self.post(self.completions), methods=["POST"]),
            Route("/v1/models", self.guarded(self.models), methods=["GET"]),
            Route("/v1/models/{model:path}", self.guarded(self.one_model), methods=["GET"]),
            Route("/tokenize", self.post(self.tokenize), methods=["POST"]),
            Route("/detokenize", self.post(self.detokenize), methods=["POST"]),
            Route("/tokenizer_info", self.guarded(self.tokenizer_info), methods=["GET"]),
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/docs", self.docs, methods=["GET"]),
            *message_routes(self),
            *response_routes(self),
            *more_routes,
        ]
        return App(routes, self._log)

    # ---- access and bodies --------------------------------------------------------------------------------------

    def guarded(self, handler: Handler) -> Endpoint:
        """Make an endpoint that only serves clients with the key."""

        async def answer(request: HttpRequest) -> ASGIApp:
            self._check_key(request)
            return await handler(request)

        return Endpoint(answer, self._log)

    def post(self, handler: Handler) -> Endpoint:
        """Make a guarded endpoint whose `handler` gets the body's JSON and is cancelled when the client disconnects."""

        async def read_and_answer(request: HttpRequest) -> ASGIApp:
            body = await self._read_json(request)
            if isinstance(body, dict) and body.get("stream"):  # `EventStream` watches the connection itself
                return await handler(body)
            return await unless_gone(request.receive, handler(body))

        return self.guarded(read_and_answer)

    def _check_key(self, request: HttpRequest) -> None:
        if self._key is None:
            self._check_host(request.headers.get("host", ""))
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if not scheme:  # Anthropic's clients have a header of their own
            scheme, given = "bearer", request.headers.get("x-api-key", "")
        # Header bytes come as Latin-1. The comparison takes equally long wherever the two differ.
        right = hmac.compare_digest(given.encode("latin-1"), self._key.encode())
        if scheme.lower() != "bearer" or not right:
            raise RequestError("send the server's key: Authorization: Bearer …", status=401, code="invalid_api_key")

    def _check_host(self, host: str) -> None:
        """Refuse an unknown host name: another site may let its name resolve to this machine.

        The browser then takes that site's page for one of this server (DNS rebinding), but still sends the site's name.
        A numeric address is safe.
        """
        name = host.rpartition(":")[0] if re.search(r":\d*$", host) and not host.endswith("]") else host
        name = name.strip("[]").lower()
        with suppress(ValueError):
            ip_address(name)
            return
        if name and name not in self._hosts:
            advice = "ask by its number, or start the server with --allowed-host or --api-key"
            raise RequestError(f"this server is not called {shown(name)}; {advice}", status=403, code="unknown_host")

    async def read_body(self, request: HttpRequest) -> bytes:
        """Read the body, up to the limits. The connection's next message is its end."""
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.read_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > self.limits.body_bytes:
                        raise RequestError(f"the body is longer than {self.limits.body_bytes} bytes", status=413)
        except TimeoutError:
            late = f"the body was not complete after {self.limits.read_seconds:g} s; send it again"
            raise RequestError(late, status=408, code="read_timeout") from None
        return bytes(body)

    async def _read_json(self, request: HttpRequest) -> object:
        """Read the body as Python values."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # also keeps web pages of other sites out: browsers ask first for this type
            raise RequestError(f"Content-Type must be application/json, got {shown(kind)}", status=415)
        body = await self.read_body(request)
        try:
            return READ_JSON(body.decode())
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None

    # ---- endpoints ----------------------------------------------------------------------------------------------

    async def completions(self, body: Any) -> ASGIApp:
        """`POST /v1/completions`."""
        return await self._answer(body, parse_completion(body, self.limits, self.defaults))

    async def chat_completions(self, body: Any) -> ASGIApp:
        """`POST /v1/chat/completions`."""
        most = self.llm.llm.max_model_len
        return await self._answer(body, parse_chat(body, self.limits, most, self.defaults, self._tool_format))

    async def models(self, request: HttpRequest) -> Response:
        """`GET /v1/models`."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, request: HttpRequest) -> Response:
        """`GET /v1/models/{model}`."""
        self._check_model(request.path_params["model"])
        return JSONResponse(self._card())

    async def tokenize(self, body: object) -> Response:
        """`POST /tokenize`: a text or a conversation to token ids, as in vLLM."""
        fields = check_fields(body, TOKENIZE_FIELDS)
        self._check_model(fields.get("model"))
        prompt, messages = fields.get("prompt"), fields.get("messages")
        given, adds_special = fields.keys() & {"prompt", "messages"}, boolean(fields, "add_special_tokens", True)
        if len(given) != 1 or not (isinstance(prompt, str) or isinstance(messages, list)):
            raise RequestError("give prompt (a text) or messages (a list)", param="prompt")
        try:
            if messages is None:
                assert isinstance(prompt, str)
                ids = await asyncio.to_thread(self.llm.llm.encode, 0, prompt, adds_special)
            else:
                arguments = template_kwargs(fields, chat_tools(body, fields, self._tool_format))
                ids = await asyncio.to_thread(self._chat_ids, conversation(messages), arguments)
        except ValueError as error:
            raise self._refused(error, "prompt" if messages is None else "messages") from None
        return JSONResponse({"count": len(ids), "max_model_len": self.llm.llm.max_model_len, "tokens": ids})

    async def detokenize(self, body: object) -> Response:
        """`POST /detokenize`: token ids to text, as in vLLM."""
        fields = check_fields(body, {"model", "tokens"})
        self._check_model(fields.get("model"))
        ids, llm = fields.get("tokens"), self.llm.llm
        if (
            not isinstance(ids, list)
            or len(ids) > llm.max_model_len
            or not all(as_integer(i) is not None and 0 <= i < llm.vocab_size for i in ids)
        ):
            raise RequestError(
                f"tokens must be a list of at most {llm.max_model_len} integers from 0 to {llm.vocab_size - 1}, "
                f"got {shown(ids)}",
                param="tokens",
            )
        decode = partial(text_of, ids, llm.tokenizer)
        return JSONResponse({"prompt": decode() if len(ids) <= AT_ONCE else await asyncio.to_thread(decode)})

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        """`GET /tokenizer_info`: the special tokens and the chat template, as in vLLM."""
        tokenizer = self.llm.llm.tokenizer
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        named = {"tokenizer_class": type(tokenizer).__name__, "chat_template": tokenizer.chat_template}
        return JSONResponse({**special, **named, "max_model_len": self.llm.llm.max_model_len})

    async def health(self, request: HttpRequest) -> Response:
        """`GET /health`: 200 while requests are accepted and steps succeed."""
        return Response(status_code=200 if await self.llm.works() else 503)

    async def version(self, request: HttpRequest) -> Response:
        """`GET /version`, as in vLLM."""
        return JSONResponse({"version": VERSION})

    async def metrics(self, request: HttpRequest) -> Response:
        """`GET /metrics`, for Prometheus."""
        try:
            return PlainTextResponse(await self.metrics_text(), media_type="text/plain; version=0.0.4")
        except EngineClosed as error:
            return error_response(error)

    async def openapi(self, request: HttpRequest) -> Response:
        """`GET /openapi.json`."""
        return JSONResponse(describe_api())

    async def docs(self, request: HttpRequest) -> Response:
        """`GET /docs`: the same description as a page."""
        return HTMLResponse(docs_page(describe_api()), headers=HEADERS)

    async def metrics_text(self) -> str:
        """Return all metrics; the last known ones if the engine does not answer. `EngineClosed` if it is closed."""
        return exposition(self.model, await self.llm.numbers(), self.llm.metrics)

    # ---- answers ------------------------------------------------------------------------------------------------

    async def _answer(self, body: dict, ask: Ask) -> ASGIApp:
        self._check_model(body.get("model"))
        if not ask.is_chat and sum(map(len, ask.prompts)) <= AT_ONCE:
            compiles = ask.params.structured_outputs is not None  # which may take long, and others are being served
            requests = await asyncio.to_thread(self._requests, ask) if compiles else self._requests(ask)
        else:
            requests = await asyncio.to_thread(self._requests, ask)
        splits = self.chat.reasoning_parser is not None
        answer = Answer(ask, requests, self.model, self.llm.llm.tokenizer, splits)
        if len(requests) > self.llm.max_unfinished:
            most = self.llm.max_unfinished
            raise RequestError(f"{len(requests)} answers were asked for; at most {most} can wait and run", param="n")
        if ask.streams:
            return EventStream(self.llm.submit(requests), answer, ask.include_usage)
        scores = [] if ask.scored is None else await self._scores(requests[:: ask.n], ask.scored)
        if not ask.generates:
            return JSONResponse(answer.whole([without_tokens(one) for one in requests], [[] for _ in requests], scores))
        outputs: dict[int, GenerationOutput] = {}
        tokens: dict[int, list[Token]] = {request.index: [] for request in requests}
        with self.llm.submit(requests) as stream:
            async for news in stream:
                for request, event in news:
                    tokens[request.index] += event.tokens
                    if event.output is not None:
                        outputs[request.index] = event.output
        order = range(len(requests))
        ended = [outputs[i] for i in order]
        if answer.constrains_calls:
            ended = await asyncio.to_thread(lambda: [answer.checked(output) for output in ended])
        if all("error" in output for output in ended):
            returned(ended)
        whole = answer.whole(ended, [tokens[i] for i in order], scores)
        for choice, output in zip(whole["choices"], ended, strict=True):
            if "error" in output:
                choice |= error_body(output["error"])
        return JSONResponse(whole)

    async def _scores(self, requests: list[Request], count: int) -> list[PromptLogprobs]:
        try:
            return await self.llm.score([request.prompt_token_ids for request in requests], count)
        except ValueError as error:
            raise RequestError(str(error), param="prompt_logprobs", code="unsupported_parameter") from None

    def _requests(self, ask: Ask) -> list[Request]:
        """Make a request per answer. The `n` requests of a prompt have different seeds and share its blocks."""
        arrival = time.perf_counter()
        try:
            prompts = [self._chat_ids(ask.prompts[0], ask.template_kwargs)] if ask.is_chat else ask.prompts
            return self.llm.llm.requests(prompts, ask.params, arrival)
        except GrammarError as error:
            if ask.tools is not None:
                raise RequestError(ask.tools.explain(error), param="tools") from None
            message = str(error).replace("structured_outputs", ask.form_field, 1)
            raise RequestError(message, param=ask.form_field) from None
        except ValueError as error:
            raise self._refused(error, "messages" if ask.is_chat else "prompt") from None

    def _chat_ids(self, messages: list, template_kwargs: Mapping[str, Any] | None) -> list[int]:
        arguments = {**self.chat.template_kwargs, **(template_kwargs or {})}
        return self.llm.llm.chat_prompts([messages], arguments)[0]

    def _refused(self, error: ValueError, param: str) -> RequestError:
        return refused_prompt(error, param, self.llm.llm.max_model_len)

    def _card(self) -> dict[str, Any]:
        length = self.llm.llm.max_model_len
        return {
            "id": self.model,
            "object": "model",
            "created": self._created,
            "owned_by": "six-engines",
            "max_model_len": length,
            "default_sampling_params": self.defaults,
        }

    def _check_model(self, name: object) -> None:
        if name is not None and name != self.model:
            raise RequestError(
                f"there is no model {shown(name)} here; the one that is served is {self.model!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
