"""`/v1/messages`, the API of Anthropic's clients, translated into chats.

    system, messages, stop_sequences, output_config.format -> a chat -> blocks of text and thinking

Fields: https://docs.anthropic.com/en/api/messages. What the chat path does not have (tools, images) is refused by name.
Whether a stop string or the model itself ended an answer is not told apart: the reason is `end_turn`.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from beyond.serving.protocol import RequestError, check_fields
from beyond.serving.translation import Chats, Events, only_text, translated
from stage_a_naive.contract.errors import shown

CONVERSATION = {"model", "system", "messages", "thinking", "output_config"}
SAME = ("model", "stream", "max_tokens", "temperature", "top_p", "top_k")  # fields that chats have, too
FIELDS = CONVERSATION | {*SAME, "stop_sequences", "metadata"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class Messages:
    """The endpoints.

    Args:
        api: which answers chats.
    """

    def __init__(self, api: Chats) -> None:
        self._api = api

    def routes(self) -> list[Route]:
        """List the endpoints."""
        return [
            Route("/v1/messages", self._api.post(self.messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", self._api.post(self.count_tokens), methods=["POST"]),
        ]

    async def messages(self, body: Any) -> ASGIApp:
        """`POST /v1/messages`."""
        return translated(await self._api.chat_completions(as_chat(body)), as_message, MessageEvents())

    async def count_tokens(self, body: Any) -> Response:
        """`POST /v1/messages/count_tokens`: how many tokens the prompt of such a request has."""
        fields = check_fields(body, CONVERSATION)
        told = await self._api.tokenize({"model": fields.get("model"), "messages": conversation_of(fields)})
        return JSONResponse({"input_tokens": json.loads(bytes(told.body))["count"]})


def as_chat(body: Any) -> dict[str, Any]:
    """Return the body of a chat that asks for the same."""
    fields = check_fields(body, FIELDS)
    if "max_tokens" not in fields:
        raise RequestError("max_tokens is missing: the most tokens that the answer may have", param="max_tokens")
    chat = {name: fields[name] for name in SAME if name in fields} | {"messages": conversation_of(fields)}
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


def conversation_of(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat. What the model thought in earlier turns is left out, as its template would."""
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
        content = message.get("content")
        if isinstance(content, list):
            content = [block for block in content if not (isinstance(block, dict) and block.get("type") == "thinking")]
        chat.append({"role": message["role"], "content": only_text(content, ["text"], "messages")})
    return chat


def as_message(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a chat as a message."""
    [choice] = answer["choices"]
    told, content = choice["message"], [{"type": "text", "text": choice["message"]["content"]}]
    if "reasoning" in told:
        content.insert(0, {"type": "thinking", "thinking": told["reasoning"], "signature": ""})
    return _message(answer, content, STOP_REASONS[choice["finish_reason"]])


def _message(answer: dict[str, Any], content: list, stop_reason: str | None) -> dict[str, Any]:
    name = answer["id"].replace("chatcmpl-", "msg_")
    message = {"id": name, "type": "message", "role": "assistant", "model": answer["model"], "content": content}
    return message | {"stop_reason": stop_reason, "stop_sequence": None, "usage": _usage(answer["usage"])}


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

    def __call__(self, chunk: dict[str, Any]) -> Events:
        """Return the events of a chunk, or of an error in its place."""
        if "error" in chunk:
            error = chunk["error"]
            yield "error", {"error": {"type": "api_error", "message": error["message"]}}
            return
        if not self._has_begun:
            self._has_begun = True
            yield "message_start", {"message": _message(chunk, [], None)}
        [choice] = chunk["choices"]
        for kind, name in (("thinking", "reasoning"), ("text", "content")):
            if text := choice["delta"].get(name):
                yield from self._open(kind)
                yield "content_block_delta", {"index": self._index, "delta": {"type": f"{kind}_delta", kind: text}}
        if choice["finish_reason"] is not None:
            if self._index < 0:
                yield from self._open("text")  # an answer without any text has an empty block
            yield "content_block_stop", {"index": self._index}
            reason = {"stop_reason": STOP_REASONS[choice["finish_reason"]], "stop_sequence": None}
            yield "message_delta", {"delta": reason, "usage": _usage(chunk["usage"])}
            yield "message_stop", {}

    def _open(self, kind: str) -> Events:
        """Open a block of this kind, unless one is open."""
        if kind == self._kind:
            return
        if self._index >= 0:
            yield "content_block_stop", {"index": self._index}
        self._index, self._kind = self._index + 1, kind
        signature = {"signature": ""} if kind == "thinking" else {}
        yield "content_block_start", {"index": self._index, "content_block": {"type": kind, kind: ""} | signature}
