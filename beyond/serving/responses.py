"""`/v1/responses`, OpenAI's newer API, translated into chats.

    instructions, input, max_output_tokens, text.format -> a chat -> items: what the model thought, and its message

Nothing is stored here, so `"store": true` and `previous_response_id` are refused by name, as is what the chat path does
not have. Fields: https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.routing import Route
from starlette.types import ASGIApp

from beyond.serving.protocol import WHO_ASKS, RequestError, check_fields
from beyond.serving.translation import Chats, Events, only_text, translated
from stage_a_naive.contract.errors import shown

SAME = WHO_ASKS | {"model", "stream", "temperature", "top_p"}  # fields that chats have, too
FIELDS = SAME | {"input", "instructions", "max_output_tokens", "text", "metadata"}
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXTS = ["input_text", "output_text", "text"]


class Responses:
    """The endpoint.

    Args:
        api: which answers chats.
    """

    def __init__(self, api: Chats) -> None:
        self._api = api

    def routes(self) -> list[Route]:
        """List the endpoint."""
        return [Route("/v1/responses", self._api.post(self.responses), methods=["POST"])]

    async def responses(self, body: Any) -> ASGIApp:
        """`POST /v1/responses`."""
        chat = await self._api.chat_completions(as_chat(body))
        return translated(chat, lambda answer: as_response(body, answer), ResponseEvents(body))


def as_chat(body: Any) -> dict[str, Any]:
    """Return the body of a chat that asks for the same."""
    fields = check_fields(body, FIELDS)
    chat = {name: fields[name] for name in SAME if name in fields} | {"messages": _messages(fields)}
    if "max_output_tokens" in fields:
        chat["max_completion_tokens"] = fields["max_output_tokens"]
    if fields.get("stream"):
        chat["stream_options"] = {"continuous_usage_stats": True}
    text = fields.get("text", {})
    form = text.get("format", {}) if isinstance(text, dict) and set(text) <= {"format"} else None
    if not isinstance(form, dict):
        raise RequestError(f'text must be {{"format": {{"type": …}}}}, got {shown(text)}', param="text")
    if form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    return chat | ({"response_format": form} if form else {})


def _messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat. What the model thought in earlier turns is left out, as its template would."""
    given = fields.get("input")
    items: Any = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RequestError(f"input must be a text or a list of messages, got {shown(given)}", param="input")
    instructions = fields.get("instructions")
    chat = (
        [] if instructions is None else [{"role": "system", "content": only_text(instructions, TEXTS, "instructions")}]
    )
    for item in items:
        if item.get("type") == "reasoning":
            continue
        if item.get("type", "message") != "message" or item.get("role") not in ROLES:
            roles = f'{{"role": one of {", ".join(ROLES)}, "content": …}}'
            raise RequestError(f"an item of input is a message {roles}, got {shown(item)}", param="input")
        chat.append({"role": ROLES[item["role"]], "content": only_text(item.get("content"), TEXTS, "input")})
    return chat


def as_response(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a chat as a response."""
    [choice] = answer["choices"]
    told = choice["message"]
    items = [_item(answer, "reasoning", told["reasoning"])] if "reasoning" in told else []
    items.append(_item(answer, "message", told["content"]))
    return _response(body, answer, items, choice["finish_reason"])


def _response(body: dict[str, Any], answer: dict[str, Any], items: list, finish_reason: str | None) -> dict[str, Any]:
    """Write a response; None is the reason of one that goes on."""
    status = {None: "in_progress", "length": "incomplete"}.get(finish_reason, "completed")
    usage = answer["usage"]
    cached = usage.get("prompt_tokens_details", {"cached_tokens": 0})
    return {
        "id": _name(answer, "resp"),
        "object": "response",
        "created_at": answer["created"],
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": answer["model"],
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": body.get("top_p"),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": cached | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _name(answer: dict[str, Any], kind: str) -> str:
    return answer["id"].replace("chatcmpl-", f"{kind}_")


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(answer: dict[str, Any], kind: str, text: str | None, status: str = "completed") -> dict[str, Any]:
    """Write an item of the output; None is the text of one that begins."""
    content = [] if text is None else [_part(kind, text)]
    more = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
    return {"type": kind, "id": _name(answer, kind[:3]), "status": status, "content": content} | more


class ResponseEvents:
    """Translates the chunks of one stream.

    Args:
        body: of the request.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body
        self._number = -1  # of the last event
        self._items: list[dict[str, Any]] = []  # that are complete
        self._kind, self._text = "", ""  # of the item that is open

    def __call__(self, chunk: dict[str, Any]) -> Events:
        """Return the events of a chunk, or of an error in its place."""
        for name, event in self._events(chunk):
            self._number += 1
            yield name, event | {"sequence_number": self._number}

    def _events(self, chunk: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        if "error" in chunk:
            error = chunk["error"]
            yield "error", {"code": error["code"], "message": error["message"], "param": error["param"]}
            return
        if self._number < 0:
            for name in ("response.created", "response.in_progress"):
                yield name, {"response": _response(self._body, chunk, [], None)}
        [choice] = chunk["choices"]
        reason = choice["finish_reason"]
        for kind, field in (("reasoning", "reasoning"), ("message", "content")):
            if text := choice["delta"].get(field):
                yield from self._open(chunk, kind)
                self._text += text
                yield f"response.{_part(kind, '')['type']}.delta", self._place(chunk) | {"delta": text, "logprobs": []}
        if reason is not None:
            yield from self._open(chunk, self._kind or "message")  # an answer without any text has an empty message
            yield from self._close(chunk)
            response = _response(self._body, chunk, self._items, reason)
            yield f"response.{response['status']}", {"response": response}

    def _place(self, chunk: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": _name(chunk, self._kind[:3]), "output_index": len(self._items), "content_index": 0}

    def _open(self, chunk: dict[str, Any], kind: str) -> Events:
        """Open an item of this kind, unless one is open."""
        if kind == self._kind:
            return
        if self._kind:
            yield from self._close(chunk)
        self._kind, self._text = kind, ""
        item = _item(chunk, kind, None, "in_progress")
        yield "response.output_item.added", {"item": item, "output_index": len(self._items)}
        yield "response.content_part.added", self._place(chunk) | {"part": _part(kind, "")}

    def _close(self, chunk: dict[str, Any]) -> Events:
        part, place = _part(self._kind, self._text), self._place(chunk)
        yield f"response.{part['type']}.done", place | {"text": self._text, "logprobs": []}
        yield "response.content_part.done", place | {"part": part}
        item = _item(chunk, self._kind, self._text)
        yield "response.output_item.done", {"item": item, "output_index": len(self._items)}
        self._items.append(item)
