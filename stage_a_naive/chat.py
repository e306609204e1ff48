"""From a conversation to a prompt.

A chat model is a text model that was trained on conversations written in one particular format, its chat template.
Given any other format, it answers worse or never stops. The template, a Jinja text, is stored with the tokenizer. A
tokenizer without one gets ChatML, the format of the Qwen models:

    <|im_start|>user
    What is a KV cache?<|im_end|>
    <|im_start|>assistant
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

from transformers import PreTrainedTokenizerFast

from stage_a_naive.contract.errors import one_line, shown

Message = Mapping[str, Any]  # {"role": …, "content": text, or a list of parts {"type": "text", "text": …}}


# Arguments that transformers handles itself, such as the caller's template. It passes `tools` on to the template.
APPLY = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) - {"tools"} | {"messages"}


def render_chats(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[str]:
    """Render one conversation (a list of messages) or several (a list of such lists) with `render_chat`."""
    listed = list(messages) if _is_list(messages) else []
    if not listed or isinstance(listed[0], Mapping):
        return [render_chat(tokenizer, cast("Sequence[Message]", listed or messages), template_kwargs)]
    texts = []
    for i, conversation in enumerate(listed):
        try:
            texts.append(render_chat(tokenizer, cast("Sequence[Message]", conversation), template_kwargs))
        except ValueError as error:
            raise ValueError(f"conversation {i}: {error}") from error
    return texts


def render_chat(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None
) -> str:
    """Render a conversation in the prompt format that the model was trained on, up to the assistant's answer.

    Args:
        template_kwargs: arguments of the model's template, such as Qwen3's `enable_thinking`.

    Raises:
        ValueError: there is no message, a message lacks a role or content, a tool call is malformed, or the template
            rejects the conversation or lacks an argument.
    """
    plain = [_plain(message) for message in for_template(messages)] if _is_list(messages) else []
    if not plain:
        raise ValueError(f"a conversation is a list of at least one message, got {shown(messages)}")
    given = _template_kwargs(tokenizer, template_kwargs)
    if not tokenizer.chat_template:
        note_missing_template(tokenizer.name_or_path)
        return chatml(plain)
    try:
        text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True, **given)
    except Exception as error:  # a template is a program written by the model's authors and may raise anything
        raise ValueError(f"the model's chat template refuses the conversation: {one_line(error)}") from error
    assert isinstance(text, str)  # as `tokenize=False` asks
    return text


def _template_kwargs(tokenizer: PreTrainedTokenizerFast, given: object) -> dict[str, Any]:
    """Check a template's arguments, because a template ignores an argument that it does not use.

    A model may have several named templates. The argument `chat_template` names the one to use; without it, `tool_use`
    is used if there are tools and the model has that template, else `default`.
    """
    if not (given is None or isinstance(given, Mapping)):
        raise ValueError(f"chat_template_kwargs must be a dict, got {shown(given)}")
    template, arguments = tokenizer.chat_template, dict(given or {})
    names = set(arguments)
    if isinstance(template, Mapping):
        named = arguments.get("chat_template")
        if named is None and not ("default" in template or "tools" in arguments and "tool_use" in template):
            named = "default"
        if named is not None and named not in list(template):
            advice = f"give one of {', '.join(template)} as chat_template_kwargs={{'chat_template': …}}"
            raise ValueError(f"the model has no chat template {shown(named)}; {advice}")
        names.discard("chat_template")
        template = tokenizer.get_chat_template(named, arguments.get("tools"))
    for name in names:
        if name in APPLY or not isinstance(template, str) or not re.search(rf"\b{re.escape(str(name))}\b", template):
            raise ValueError(f"the model's chat template has no argument {shown(name)}; leave it out")
    return arguments


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def for_template(messages: Iterable[object]) -> list[Any]:
    """Return a conversation as templates expect it: each tool call with a text, and its arguments as an object.

    OpenAI's clients leave the text out or send None, and send the arguments as JSON text, which a template would quote.

    Raises:
        ValueError: a message's tool calls are malformed. The error text begins with the field's name.
    """
    return [_for_template(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _for_template(message: object, where: str) -> object:
    if not isinstance(message, Mapping) or message.get("tool_calls") is None:
        return message
    calls = message["tool_calls"]
    if message.get("role") != "assistant" or not isinstance(calls, (list, tuple)):
        raise ValueError(f"{where}.tool_calls must be a list, in a message of the assistant, got {shown(calls)}")
    if not calls:  # an empty list means no calls
        return {name: value for name, value in message.items() if name != "tool_calls"}
    content = "" if message.get("content") is None else message["content"]
    read = [_call_for_template(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return {**message, "content": content, "tool_calls": read}


def _call_for_template(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f'{where} must be {{"id": …, "type": "function", "function": {{…}}}}, got {shown(call)}')
    arguments = function.get("arguments")
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, Mapping):
        raise ValueError(f"{where}.function.arguments must be an object or its JSON text, got {shown(arguments)}")
    return {**call, "function": {**function, "arguments": read}}


def _plain(message: Message) -> dict[str, Any]:
    """Join a message's content into one string; the template handles other fields (`name`, `tool_calls`)."""
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
        raise ValueError(f"a message is a dict with 'role' and 'content', got {shown(message)}")
    role, content = message["role"], message["content"]
    parts = content if isinstance(content, (list, tuple)) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"the content of a message is text, or a list of text parts, got {shown(content)}")
    if not isinstance(role, str):
        raise ValueError(f"the role of a message is text, got {shown(role)}")
    return {**message, "content": "\n".join(part["text"] for part in parts)}  # as vLLM joins them


@cache
def note_missing_template(name: str) -> None:
    """Print once that the named model has no chat template, and what follows from that."""
    print(
        f"[chat] {name} has no chat template, so it is given ChatML; a base model was not trained on that, and "
        "continues a text better: use generate, or --raw",
        file=sys.stderr,
    )


def chatml(messages: Sequence[Message]) -> str:
    """Render a conversation in ChatML, up to the assistant's answer."""
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n"
