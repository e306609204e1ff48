"""Serve other APIs by translation: their requests become chats, and the chats' answers become theirs."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from beyond.serving.answers import as_json
from beyond.serving.event_stream import EventStream
from beyond.serving.protocol import RequestError
from stage_a_naive.contract.errors import shown

Events = Iterable[tuple[str, dict[str, Any]]]  # the name of each, and what it says
Pieces = Iterable[tuple[str, str, dict[str, Any] | None]]  # a kind, its text, and the call if one begins


class Chats(Protocol):
    """The part of the chat API that other APIs use."""

    def post(self, handler: Callable[..., Awaitable[ASGIApp]], /) -> ASGIApp:
        """Make a guarded endpoint whose `handler` gets the body's JSON."""
        ...

    async def chat_completions(self, body: Any) -> ASGIApp:
        """Answer `POST /v1/chat/completions`."""
        ...

    async def tokenize(self, body: object) -> Response:
        """Answer `POST /tokenize`."""
        ...


async def translated(
    answered: Awaitable[ASGIApp],
    words: Mapping[str, str],
    whole: Callable[[dict], dict],
    chunk: Callable[[dict], Events],
) -> ASGIApp:
    """Return the answer to a chat in the format of another API.

    Args:
        answered: the answer of a method of `Chats`.
        words: names in error messages about tools, and the other API's names for them.
        whole: translates a complete answer.
        chunk: translates one chunk of a stream, or an error, into events.
    """
    try:
        answer = await answered
    except RequestError as error:
        message = str(error)
        for word, other in words.items() if error.param in ("tools", "tool_choice") else ():
            message = message.replace(word, other)
        raise RequestError(message, error.status, error.param, error.code, error.retry_after) from None
    if isinstance(answer, EventStream):
        return TranslatedStream(answer, chunk)
    assert isinstance(answer, JSONResponse)
    return JSONResponse(whole(json.loads(bytes(answer.body))))


def chat_tools(given: object, function_of: Callable[[Mapping[str, Any]], dict[str, Any] | str]) -> Any:
    """Return tools in a chat's format; the chat checks their fields.

    Args:
        function_of: returns the function of a tool, or a description of the form that it should have.
    """
    if not isinstance(given, list):
        return given
    tools = []
    for i, tool in enumerate(given):
        function = function_of(tool if isinstance(tool, dict) else {})
        if isinstance(function, str):
            raise RequestError(f"tools[{i}] must be {function}, got {shown(tool)}", param="tools")
        tools.append({"type": "function", "function": function})
    return tools


def told(message: Mapping[str, Any]) -> Pieces:
    """List the parts of a chat's message, or of a chunk of it: `reasoning`, `content` and calls, in their order."""
    calls = message.get("tool_calls", [])
    if calls and "id" not in calls[0]:  # the rest of the open call; text may follow it
        yield "", calls[0]["function"]["arguments"], None
        calls = calls[1:]
    for field in ("reasoning", "content"):
        if text := message.get(field):
            yield field, text, None
    for call in calls:
        yield "call", call["function"]["arguments"], call


def chat_call(call_id: object, name: str, arguments: object) -> dict[str, Any]:
    """Return a tool call in the format of an assistant's message in a chat."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class TranslatedStream:
    """A stream whose events are translated on their way to the client."""

    def __init__(self, chat: EventStream, chunk: Callable[[dict], Events]) -> None:
        self._chat, self._chunk = chat, chunk

    @property
    def code(self) -> str:
        """Code of the error that ended it early; else empty."""
        return self._chat.code

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_translated(message: Message) -> None:
            if message["type"] == "http.response.body":
                chunks = [one.removeprefix("data: ") for one in message["body"].decode().split("\n\n")]
                told = [event for one in chunks if one not in ("", "[DONE]") for event in self._chunk(json.loads(one))]
                frames = [f"event: {name}\ndata: {as_json({'type': name} | event)}\n\n" for name, event in told]
                message = {**message, "body": "".join(frames).encode()}
            await send(message)

        await self._chat(scope, receive, send_translated)


def only_text(content: Any, types: Sequence[str], param: str) -> str:
    """Return a content as text, joining its parts if it has parts; `RequestError` for parts of another type."""
    parts = [{"type": types[0], "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") in types and isinstance(part.get("text"), str) for part in parts
    ):
        raise RequestError(
            f"{param} must be a text or a list of parts of type {types[0]}, got {shown(content)}", param=param
        )
    return "\n".join(part["text"] for part in parts)
