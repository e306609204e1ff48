"""`/v1/messages`, the API of Anthropic's clients, translated into chats.

    system, messages, tools, stop_sequences, output_config.format -> a chat -> blocks: thinking, text, tool_use

A user message may contain tool results, which are messages with the role `tool` in a chat. The text of a result that is
an error (`is_error`) must say so, because chat templates have no field for it.

Fields: https://docs.anthropic.com/en/api/messages. Features that chats do not have (images, tools run by the
server) are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json
from starlette.routing import Route
from starlette.types import ASGIApp

from beyond.serving.protocol import RequestError, boolean, check_fields
from beyond.serving.translation import Chats, Events, chat_call, chat_tools, only_text, told, translated
from stage_a_naive.contract.errors import shown

CONVERSATION = {"model", "system", "messages", "tools", "tool_choice", "thinking", "output_config"}
SAME = ("model", "stream", "max_tokens", "temperature", "top_p", "top_k")  # fields that chats have, too
FIELDS = CONVERSATION | {*SAME, "stop_sequences", "metadata"}
BLOCKS = {"user": ("tool_result",), "assistant": ("thinking", "redacted_thinking", "tool_use")}  # besides text
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # of tools, and the chat's words
TEXTS = {"reasoning": "thinking", "content": "text"}  # a chat's fields, and kinds of blocks
NO_END = {"stop_reason": None, "stop_sequence": None}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
WORDS = {".function": "", "parameters": "input_schema", "a function has": "a tool has"}  # for tools: a chat's, and ours


def routes(api: Chats) -> list[Route]:
    """List the endpoints; `api` answers the chats."""

    async def messages(body: Any) -> ASGIApp:
        return await translated(api.chat_completions(as_chat(body)), WORDS, as_message, MessageEvents())

    async def count_tokens(body: Any) -> ASGIApp:
        fields = check_fields(body, CONVERSATION)
        asked = {"model": fields.get("model"), "messages": conversation_of(fields)}
        tools = tools_of(fields)
        if "tools" in tools and tools.get("tool_choice") != "none":
            asked["tools"] = tools["tools"]
        return await translated(
            api.tokenize(asked), WORDS, lambda counted: {"input_tokens": counted["count"]}, MessageEvents()
        )

    return [
        Route("/v1/messages", api.post(messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", api.post(count_tokens), methods=["POST"]),
    ]


def as_chat(body: Any) -> dict[str, Any]:
    """Return the body of the equivalent chat request."""
    fields = check_fields(body, FIELDS)
    if "max_tokens" not in fields:
        raise RequestError("max_tokens is missing: the most tokens that the answer may have", param="max_tokens")
    chat = {name: fields[name] for name in SAME if name in fields} | tools_of(fields)
    chat["messages"] = conversation_of(fields)
    if "stop_sequences" in fields:
        chat["stop"] = fields["stop_sequences"]
    if fields.get("stream"):
        chat["stream_options"] = {"continuous_usage_stats": True}  # the first event tells how long the prompt is
    form = fields.get("output_config", {})
    if form != {}:
        if not (isinstance(form, dict) and set(form) == {"format"} and _is_schema(form["format"])):
            raise RequestError(
                f'output_config must be {{"format": {{"type": "json_schema", "schema": {{…}}}}}}, got {shown(form)}',
                param="output_config",
            )
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", **form["format"]}}
    return chat


def _is_schema(form: object) -> bool:
    return isinstance(form, dict) and form.get("type") == "json_schema" and isinstance(form.get("schema"), dict)


def tools_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat's fields for tools and for the choice among them."""
    chat = {"tools": chat_tools(fields["tools"], _function)} if "tools" in fields else {}
    if "tool_choice" not in fields:
        return chat
    choice = fields["tool_choice"]
    kind, name = (choice.get("type"), choice.get("name")) if isinstance(choice, dict) else (None, None)
    if kind == "tool" and isinstance(name, str):
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in CHOICES:
        chat["tool_choice"] = CHOICES[kind]
    else:
        allowed = '{"type": "auto"}, {"type": "any"}, {"type": "none"} or {"type": "tool", "name": …}'
        raise RequestError(f"tool_choice must be {allowed}, got {shown(choice)}", param="tool_choice")
    try:
        return chat | {"parallel_tool_calls": not boolean(choice, "disable_parallel_tool_use")}
    except RequestError as error:
        raise RequestError(f"tool_choice.{error}", param="tool_choice") from None


def _function(tool: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the function of a tool, or a description of the form that it should have."""
    if tool.get("type", "custom") != "custom" or "input_schema" not in tool:
        return '{"name": …, "description": …, "input_schema": {…}}, which the client runs'
    own = {name: value for name, value in tool.items() if name not in ("type", "input_schema", "cache_control")}
    return own | {"parameters": tool["input_schema"]}


def conversation_of(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat, without the reasoning of earlier turns, which templates leave out too."""
    thinking = fields.get("thinking", {"type": "disabled"})
    if thinking != {"type": "disabled"}:
        advice = "the server decides whether its model thinks (--chat-template-kwargs)"
        raise RequestError(
            f'thinking must be {{"type": "disabled"}}, got {shown(thinking)}; {advice}', param="thinking"
        )
    given, chat = fields.get("messages"), []
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise RequestError('messages must be a list of {"role": …, "content": …}', param="messages")
    if "system" in fields:
        chat.append({"role": "system", "content": only_text(fields["system"], ["text"], "system")})
    for message in given:
        if message.get("role") not in ("user", "assistant"):
            raise RequestError(f"the role of a message is user or assistant, got {shown(message)}", param="messages")
        chat += _turns(message["role"], message.get("content"))
    return chat


def _turns(role: str, content: object) -> list[dict[str, Any]]:
    """Return the chat messages for one message: each tool result is a separate message."""
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in BLOCKS[role]}
    texts: list[Any] = []  # whatever else there is must be text
    for block in blocks:
        found.get(str(block.get("type")) if isinstance(block, dict) else "", texts).append(block)
    results = [
        {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id"),
            "content": only_text(block.get("content", ""), ["text"], "messages"),
        }
        for block in found.get("tool_result", ())
    ]
    calls = [_call(block) for block in found.get("tool_use", ())]
    said = {"role": role, "content": only_text(texts, ["text"], "messages")} | ({"tool_calls": calls} if calls else {})
    return results + ([said] if texts or not results else [])


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(given, dict):
        form = '{"type": "tool_use", "id": …, "name": …, "input": {…}}'
        raise RequestError(f"a call of a tool must be {form}, got {shown(block)}", param="messages")
    return chat_call(block.get("id"), name, given)


def as_message(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a chat as a message."""
    [choice] = answer["choices"]
    message, reason, content = choice["message"], choice["finish_reason"], []
    calls = message.get("tool_calls", ())
    if "reasoning" in message:
        content.append({"type": "thinking", "thinking": message["reasoning"], "signature": ""})
    if message["content"] or not calls:
        content.append({"type": "text", "text": message["content"]})
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        read = read_arguments(name, arguments, is_cut=reason != "tool_calls")
        content.append({"type": "tool_use", "id": call["id"], "name": name, "input": read})
    return _message(answer, content, _ending(choice))


def read_arguments(name: str, arguments: str, is_cut: bool) -> dict[str, Any]:
    """Read the arguments of a call.

    Args:
        is_cut: whether the answer ended inside them; then their complete part counts.

    Raises:
        RequestError: they are not valid JSON, which only a grammar can guarantee.
    """
    try:
        return from_json(arguments or "{}", allow_partial=is_cut, allow_inf_nan=False)
    except ValueError as error:
        advice = 'ask again, or give the tool "strict": true'
        message = f"the model called {name} with arguments that are no JSON ({error}); {advice}"
        raise RequestError(message, param="tools", code="form_failed") from None


def _ending(choice: dict[str, Any]) -> dict[str, str | None]:
    """Return why an answer ended."""
    if choice["finish_reason"] == "stop" and isinstance(choice["stop_reason"], str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice["stop_reason"]}
    return {"stop_reason": STOP_REASONS[choice["finish_reason"]], "stop_sequence": None}


def _message(answer: dict[str, Any], content: list, ending: Mapping[str, str | None]) -> dict[str, Any]:
    name = answer["id"].replace("chatcmpl-", "msg_")
    message = {"id": name, "type": "message", "role": "assistant", "model": answer["model"], "content": content}
    return {**message, **ending, "usage": _usage(answer["usage"])}


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    uncached = usage["prompt_tokens"] - cached
    return {
        "input_tokens": uncached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


class MessageEvents:
    """Translates the chunks of one stream."""

    def __init__(self) -> None:
        self._has_begun = False
        self._index, self._kind = -1, ""  # of the block that is open
        self._tool, self._arguments = "", ""  # the name in the last call, and what has come of its arguments

    def __call__(self, chunk: dict[str, Any]) -> Events:
        """Return the events for a chunk, or for an error."""
        if "error" in chunk:
            yield _error(chunk["error"]["message"])
            return
        if not self._has_begun:
            self._has_begun = True
            yield "message_start", {"message": _message(chunk, [], NO_END)}
        try:
            yield from self._events(chunk)
        except RequestError as error:
            yield _error(str(error))

    def _events(self, chunk: dict[str, Any]) -> Events:
        [choice] = chunk["choices"]
        reason = choice["finish_reason"]
        for field, text, call in told(choice["delta"]):
            if call is not None:
                name = call["function"]["name"]
                yield from self._open("tool_use", {"id": call["id"], "name": name, "input": {}})
                self._tool, self._arguments = name, ""
            if field in TEXTS:
                kind = TEXTS[field]
                if kind != self._kind:
                    yield from self._open(kind, {kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
                delta = {"type": f"{kind}_delta", kind: text}
            else:
                self._arguments += text
                delta = {"type": "input_json_delta", "partial_json": text}
            yield "content_block_delta", {"index": self._index, "delta": delta}
        if reason is not None:
            if self._index < 0:
                yield from self._open("text", {"text": ""})  # an answer without any text has an empty block
            yield from self._close(is_cut=reason != "tool_calls")
            yield "message_delta", {"delta": _ending(choice), "usage": _usage(chunk["usage"])}
            yield "message_stop", {}

    def _open(self, kind: str, block: dict[str, Any]) -> Events:
        """Open a block and close the one before it."""
        yield from self._close()
        self._index, self._kind = self._index + 1, kind
        yield "content_block_start", {"index": self._index, "content_block": {"type": kind} | block}

    def _close(self, is_cut: bool = False) -> Events:
        if self._kind == "tool_use":
            read_arguments(self._tool, self._arguments, is_cut)
        if self._index >= 0:
            yield "content_block_stop", {"index": self._index}


def _error(message: str) -> tuple[str, dict[str, Any]]:
    return "error", {"error": {"type": "api_error", "message": message}}
