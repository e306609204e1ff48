"""`/v1/responses`, OpenAI's newer API, translated into chats.

    instructions, input, tools, max_output_tokens, text.format -> a chat -> items: reasoning, message, function_call

As in a chat, the arguments of a tool are guaranteed to follow its schema if it is `"strict": true` or must be called.
Nothing is stored, so `"store": true` and `previous_response_id` are refused by name, as are features that chats do not
have. Fields: https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from starlette.routing import Route
from starlette.types import ASGIApp

from beyond.serving.protocol import TOOLS, WHO_ASKS, RequestError, check_fields
from beyond.serving.translation import Chats, Events, chat_call, chat_tools, only_text, told, translated
from stage_a_naive.contract.errors import shown

SAME = WHO_ASKS | {"model", "stream", "temperature", "top_p"}  # fields that chats have, too
FIELDS = SAME | TOOLS | {"input", "instructions", "max_output_tokens", "text", "metadata"}
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXTS = ["input_text", "output_text", "text"]
FORM = '{"type": "function", "name": …}'
WORDS = {'{"type": "function", "function": {"name": …}}': FORM, ".function": ""}  # for tools: a chat's, and ours


def routes(api: Chats) -> list[Route]:
    """List the endpoint; `api` answers the chats."""

    async def responses(body: Any) -> ASGIApp:
        chat = api.chat_completions(as_chat(body))
        return await translated(chat, WORDS, lambda answer: as_response(body, answer), ResponseEvents(body))

    return [Route("/v1/responses", api.post(responses), methods=["POST"])]


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
    return chat | _tools_of(body) | ({"response_format": form} if form else {})


def _tools_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat's fields for tools and for the choice among them."""
    chat = {name: body[name] for name in TOOLS & body.keys()}
    if "tools" in chat:
        chat["tools"] = chat_tools(chat["tools"], _function)
    choice = chat.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    return chat


def _function(tool: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the function of a tool; or the form that it should have."""
    own = {name: value for name, value in tool.items() if name != "type"}
    return own if tool.get("type") == "function" else FORM


def _messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat, without the reasoning of earlier turns, which templates leave out too."""
    given = fields.get("input")
    items: Any = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RequestError(f"input must be a text or a list of messages, got {shown(given)}", param="input")
    instructions = fields.get("instructions")
    chat: list[dict[str, Any]] = (
        [] if instructions is None else [{"role": "system", "content": only_text(instructions, TEXTS, "instructions")}]
    )
    for item in items:
        if item.get("type") == "reasoning":
            continue
        if item.get("type") == "function_call":
            if not (chat and chat[-1]["role"] == "assistant"):  # in a chat, calls are part of what the assistant said
                chat.append({"role": "assistant", "content": ""})
            chat[-1].setdefault("tool_calls", []).append(_call(item))
        elif item.get("type") == "function_call_output":
            output = only_text(item.get("output"), TEXTS, "input")
            chat.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif item.get("type", "message") == "message" and item.get("role") in ROLES:
            chat.append({"role": ROLES[item["role"]], "content": only_text(item.get("content"), TEXTS, "input")})
        else:
            roles = f'{{"role": one of {", ".join(ROLES)}, "content": …}}'
            raise RequestError(
                f"an item of input is a message {roles}, a function_call or a function_call_output, got {shown(item)}",
                param="input",
            )
    return chat


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        form = '{"type": "function_call", "call_id": …, "name": …, "arguments": a text}'
        raise RequestError(f"a call of a tool must be {form}, got {shown(item)}", param="input")
    return chat_call(item.get("call_id"), name, arguments)


def as_response(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a chat as a response."""
    [choice] = answer["choices"]
    message, reason, items = choice["message"], choice["finish_reason"], []
    calls = message.get("tool_calls", ())
    if "reasoning" in message:
        items.append(_item(answer, len(items), "reasoning", message["reasoning"]))
    if message["content"] or not calls:
        items.append(_item(answer, len(items), "message", message["content"]))
    for call in calls:
        items.append(_called(answer, len(items), call, call["function"]["arguments"]))
    if reason == "length":
        items[-1]["status"] = "incomplete"
    return _response(body, answer, items, reason)


def _response(body: dict[str, Any], answer: dict[str, Any], items: list, finish_reason: str | None) -> dict[str, Any]:
    """Write a response; a reason of None means that it continues."""
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
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [{"parameters": None, "strict": False} | tool for tool in body.get("tools") or ()],
        "top_p": body.get("top_p"),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": cached | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _name(answer: dict[str, Any], kind: str, place: int | None = None) -> str:
    """Return the id of the response, or of its item at this place."""
    return answer["id"].replace("chatcmpl-", f"{kind}_") + ("" if place is None else f"_{place}")


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(answer: dict[str, Any], place: int, kind: str, text: str | None, status: str = "completed") -> dict[str, Any]:
    """Write an item of the output; a text of None means that it begins."""
    content = [] if text is None else [_part(kind, text)]
    more = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
    return {"type": kind, "id": _name(answer, kind[:3], place), "status": status, "content": content} | more


def _called(
    answer: dict[str, Any], place: int, call: dict[str, Any], arguments: str, status: str = "completed"
) -> dict[str, Any]:
    """Write the item of a tool call; a stream sends its arguments in pieces."""
    item = {"type": "function_call", "id": _name(answer, "fun", place), "status": status, "call_id": call["id"]}
    return item | {"name": call["function"]["name"], "arguments": arguments}


class ResponseEvents:
    """Translates the chunks of one stream.

    Args:
        body: the request's body.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body
        self._number = -1  # of the last event
        self._items: list[dict[str, Any]] = []  # that are complete
        self._kind, self._text = "", ""  # of the item that is open; a call's text is its arguments
        self._call: dict[str, Any] = {}  # that is open

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
        for field, text, call in told(choice["delta"]):
            kind = {"reasoning": "reasoning", "content": "message"}.get(field, "function_call")
            if call is not None or kind != self._kind:
                yield from self._open(chunk, kind, call)
            self._text += text
            if kind == "function_call":
                yield "response.function_call_arguments.delta", self._place(chunk) | {"delta": text}
            else:
                delta = {"delta": text, "logprobs": []}
                yield f"response.{_part(kind, '')['type']}.delta", self._part_place(chunk) | delta
        if reason is not None:
            if not self._kind:
                yield from self._open(chunk, "message")  # an answer without any text has an empty message
            yield from self._close(chunk, "incomplete" if reason == "length" else "completed")
            response = _response(self._body, chunk, self._items, reason)
            yield f"response.{response['status']}", {"response": response}

    def _place(self, chunk: dict[str, Any]) -> dict[str, Any]:
        place = len(self._items)
        return {"item_id": _name(chunk, self._kind[:3], place), "output_index": place}

    def _part_place(self, chunk: dict[str, Any]) -> dict[str, Any]:
        return self._place(chunk) | {"content_index": 0}

    def _item(self, chunk: dict[str, Any], status: str) -> dict[str, Any]:
        place, begins = len(self._items), status == "in_progress"
        if self._kind == "function_call":
            return _called(chunk, place, self._call, self._text, status)
        return _item(chunk, place, self._kind, None if begins else self._text, status)

    def _open(self, chunk: dict[str, Any], kind: str, call: dict[str, Any] | None = None) -> Events:
        """Open an item and close the one before it."""
        if self._kind:
            yield from self._close(chunk)
        self._kind, self._text, self._call = kind, "", call or {}
        item = self._item(chunk, "in_progress")
        yield "response.output_item.added", {"item": item, "output_index": len(self._items)}
        if kind != "function_call":
            yield "response.content_part.added", self._part_place(chunk) | {"part": _part(kind, "")}

    def _close(self, chunk: dict[str, Any], status: str = "completed") -> Events:
        if self._kind == "function_call":
            done = {"arguments": self._text, "name": self._call["function"]["name"]}
            yield "response.function_call_arguments.done", self._place(chunk) | done
        else:
            part, place = _part(self._kind, self._text), self._part_place(chunk)
            yield f"response.{part['type']}.done", place | {"text": self._text, "logprobs": []}
            yield "response.content_part.done", place | {"part": part}
        item = self._item(chunk, status)
        yield "response.output_item.done", {"item": item, "output_index": len(self._items)}
        self._items.append(item)
