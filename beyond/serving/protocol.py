"""Validate requests: every field of the OpenAI API is either honoured or refused by name.

A field that a server silently ignores is worse than one that it refuses, because the client believes that its penalty
or its `tools` had an effect. So every field that is not in the tables below is an error, unless its value is `null` or
requests nothing (`"echo": false`). `user` and its successors, `safety_identifier` and `prompt_cache_key`, only identify
the user and change no answer. Further fields of a message are left to the model's template. Sampling parameters that
are not given have the server's defaults (`defaults.py`).

Fields: https://platform.openai.com/docs/api-reference/chat/create, and vLLM's extra sampling parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from beyond.serving.defaults import keep_all_if_negative
from beyond.serving.tools import HERMES, ToolFormat, Tools, parse_tools
from stage_a_naive.chat import for_template
from stage_a_naive.contract.errors import shown
from stage_a_naive.contract.params import SamplingParams, as_integer


class RequestError(Exception):
    """A refused request.

    Args:
        message: what was given, what is allowed, what to do.
        status: the HTTP status.
        param: the invalid field.
        code: an error code for programs.
        retry_after: seconds after which the same request may succeed.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after


@dataclass(frozen=True)
class Limits:
    """Limits of one request.

    Attributes:
        body_bytes: bytes of the JSON text.
        read_seconds: seconds for the body to arrive.
        prompts: prompts per request.
        n: answers per prompt.
        stops: stop strings, which are searched for after every token; also stop token ids.
        words: bad words, likewise.
        biases: tokens with a bias; allowed tokens.
        logprobs: alternatives per token.
    """

    body_bytes: int = 4 << 20
    read_seconds: float = 30
    prompts: int = 64
    n: int = 16
    stops: int = 16
    words: int = 128
    biases: int = 1024
    logprobs: int = 20


@dataclass(frozen=True)
class Ask:
    """A request for completions, checked as far as it can be without the model.

    Attributes:
        prompts: texts or lists of token ids, or one conversation (a list of messages) for a chat.
        params: sampling parameters; the answers of one request differ only in the seed.
        streams: whether to send tokens as they are generated.
        include_usage: whether a stream ends with the token counts.
        continuous_usage: whether every event of a stream has the token counts so far.
        is_chat: whether `prompts` is a conversation.
        echo: whether each answer begins with its prompt.
        prompt_logprobs: how many of the likeliest tokens to return at every position of the prompts; None returns none.
        template_kwargs: arguments of the chat template.
        generates: whether to generate tokens; otherwise only prompts are scored.
        tools: the tools that the model may call; None if there are none.
        form_field: the field that requests structured output, for error messages.
    """

    prompts: list
    params: SamplingParams
    streams: bool
    include_usage: bool
    continuous_usage: bool
    is_chat: bool
    echo: bool = False
    prompt_logprobs: int | None = None
    template_kwargs: Mapping[str, Any] | None = None
    generates: bool = True
    tools: Tools | None = None
    form_field: str = "structured_outputs"

    @property
    def n(self) -> int:
        """Return the number of answers per prompt."""
        return self.params.n

    @property
    def scored(self) -> int | None:
        """Return how many of the likeliest tokens the answer needs at every position of the prompts; None for none."""
        counts = [self.prompt_logprobs, self.params.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)


SAMPLING = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "seed",
    "max_tokens",
}
ROLES = ("system", "developer", "user", "assistant", "tool")
WHO_ASKS = {"user", "safety_identifier", "prompt_cache_key"}
FORMS = {"response_format", "structured_outputs"}  # that answers must have
SHARED = SAMPLING | WHO_ASKS | FORMS | {"model", "n", "stream", "stream_options", "logprobs"}
COMPLETION_FIELDS = SHARED | {"prompt", "best_of", "echo", "prompt_logprobs"}
TOOLS = {"tools", "tool_choice", "parallel_tool_calls"}
CHAT_FIELDS = SHARED | TOOLS | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}
TOKENIZE_FIELDS = {"model", "prompt", "messages", "tools", "add_special_tokens", "chat_template_kwargs"}
# Values that ask for nothing: mostly the defaults of fields that are not supported, which clients send all the same.
ASKS_FOR_NOTHING: dict[str, tuple[object, ...]] = {
    "chat_template_kwargs": ({},),
    "best_of": (1,),  # or `n`
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (False,),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "include_obfuscation": (False,),  # this and the next: in `stream_options`
    "continuous_usage_stats": (False,),
    # vLLM's
    "top_logprobs": (0,),
    "min_tokens": (0,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "priority": (0,),
}


def parse_completion(body: object, limits: Limits, defaults: Mapping[str, float] | None = None) -> Ask:
    """Check the body of `/v1/completions`. By default an answer has at most 16 tokens, as in OpenAI's API.

    Args:
        defaults: sampling parameters that the request leaves out; `max_tokens` applies only to chats.

    Raises:
        RequestError: a field is unknown, unsupported, of the wrong type or out of range.
    """
    fields = check_fields(body, COMPLETION_FIELDS)
    count = _integer(fields, "logprobs", 0, limits.logprobs)
    echo, prompt_logprobs = boolean(fields, "echo"), _integer(fields, "prompt_logprobs", 0, limits.logprobs)
    asks_of_prompts = echo or prompt_logprobs is not None
    generates = not (asks_of_prompts and as_integer(fields.get("max_tokens")) == 0)
    if not generates:
        fields["max_tokens"] = 1  # for the checks; nothing is sampled
    params = _sampling_params(fields, limits, count, {**(defaults or {}), "max_tokens": 16})
    ask = _ask(_prompts(fields.get("prompt"), limits), fields, params, is_chat=False)
    if asks_of_prompts and ask.streams:
        name = "echo" if echo else "prompt_logprobs"
        raise RequestError(f'{name} is not supported with "stream": true', param=name, code="unsupported_parameter")
    ask = replace(ask, echo=echo, prompt_logprobs=prompt_logprobs, generates=generates)
    if fields.get("best_of", ask.n) != ask.n:  # the best of them would have to be chosen
        given = f"got {shown(fields['best_of'])} and {ask.n}"
        raise RequestError(
            f"best_of is supported only if it equals n, {given}", param="best_of", code="unsupported_parameter"
        )
    return ask


def parse_chat(
    body: object,
    limits: Limits,
    max_model_len: int,
    defaults: Mapping[str, float] | None = None,
    tool_format: ToolFormat | None = HERMES,
) -> Ask:
    """Check the body of `/v1/chat/completions`.

    Args:
        max_model_len: the longest answer if neither the request nor `defaults` set a limit.
        defaults: sampling parameters that the request leaves out.
        tool_format: how the model writes tool calls; None if it was not trained for tools.

    Raises:
        RequestError: a field is unknown, unsupported, of the wrong type or out of range.
    """
    fields = check_fields(body, CHAT_FIELDS)
    tools = chat_tools(body, fields, tool_format)
    if "max_completion_tokens" in fields:
        if "max_tokens" in fields:
            raise RequestError("max_tokens and max_completion_tokens mean the same; give one", param="max_tokens")
        fields["max_tokens"] = fields["max_completion_tokens"]
    wanted, count = boolean(fields, "logprobs"), _integer(fields, "top_logprobs", 0, limits.logprobs)
    if count is not None and not wanted:
        raise RequestError('top_logprobs needs "logprobs": true', param="top_logprobs")
    defaults = {"max_tokens": max_model_len, **(defaults or {})}
    params = _sampling_params(fields, limits, (count or 0) if wanted else None, defaults)
    if not isinstance(fields.get("messages"), list):
        raise RequestError('messages must be a list of {"role": …, "content": …}', param="messages")
    for message in fields["messages"]:
        if isinstance(message, dict) and isinstance(role := message.get("role"), str) and role not in ROLES:
            raise RequestError(
                f"the role of a message is one of {', '.join(ROLES)}, got {shown(role)}", param="messages"
            )
    ask = _ask([conversation(fields["messages"])], fields, params, is_chat=True)
    return replace(ask, template_kwargs=template_kwargs(fields, tools), tools=tools)


def chat_tools(body: Any, fields: dict[str, Any], tool_format: ToolFormat | None) -> Tools | None:
    """Read the fields for tools; if they constrain the answer, set the structured output in `fields`."""
    try:
        tools = parse_tools(body, tool_format)  # not of `fields`: "none" asks for something if there are tools
    except ValueError as error:
        raise _refused_field(error) from None
    for name in FORMS & set(fields) if tools is not None else ():
        raise RequestError(
            f'{name} cannot be combined with tools; ask for structured output with "tool_choice": "none"', param=name
        )
    if tools is not None and tools.grammar is not None:
        fields["structured_outputs"] = {"grammar": tools.grammar}
    return tools


def conversation(messages: list) -> list:
    """Return messages as chat templates expect them: OpenAI's role `developer` becomes `system`.

    Raises:
        RequestError: a tool call is malformed.
    """
    try:
        listed = for_template(messages)
    except ValueError as error:
        raise _refused_field(error) from None
    is_developers = [isinstance(message, dict) and message.get("role") == "developer" for message in listed]
    return [one | {"role": "system"} if is_it else one for one, is_it in zip(listed, is_developers, strict=True)]


def _refused_field(error: ValueError) -> RequestError:
    """Turn an error that begins with a field's name, or a place in it, into an error about the field."""
    return RequestError(str(error), param=re.split(r"\W", str(error), maxsplit=1)[0])


def check_fields(body: object, known: set[str]) -> dict[str, Any]:
    """Return the fields of a JSON object that request something; `RequestError` names an unsupported one."""
    if not isinstance(body, dict):
        raise RequestError(f"expected a JSON object, got {shown(body)}")
    fields = {
        name: value for name, value in body.items() if value is not None and value not in ASKS_FOR_NOTHING.get(name, ())
    }
    for name in fields:
        if name.startswith("guided_"):
            form = name.removeprefix("guided_")
            raise RequestError(
                f"{shown(name)} is vLLM's name of old; write structured_outputs: {{{form!r}: …}}",
                param=shown(name)[1:-1],
                code="unsupported_parameter",
            )
        if name not in known:
            raise RequestError(
                f"{shown(name)} is not supported here; supported: {', '.join(sorted(known))}",
                param=shown(name)[1:-1],  # it may hold what no UTF-8 can
                code="unsupported_parameter",
            )
    return fields


def _ask(prompts: list, fields: Mapping[str, Any], params: SamplingParams, is_chat: bool) -> Ask:
    streams = boolean(fields, "stream")
    try:
        options = check_fields(fields.get("stream_options", {}), {"include_usage", "continuous_usage_stats"})
        include_usage, continuous_usage = boolean(options, "include_usage"), boolean(options, "continuous_usage_stats")
    except RequestError as error:
        raise RequestError(f"stream_options: {error}", param="stream_options", code=error.code) from None
    if (include_usage or continuous_usage) and not streams:
        raise RequestError('stream_options needs "stream": true', param="stream_options")
    form_field = "response_format" if "response_format" in fields else "structured_outputs"
    return Ask(prompts, params, streams, include_usage, continuous_usage, is_chat, form_field=form_field)


def _sampling_params(
    fields: Mapping[str, Any], limits: Limits, logprobs: int | None, defaults: Mapping[str, float]
) -> SamplingParams:
    most_entries = {
        "stop": limits.stops,
        "stop_token_ids": limits.stops,
        "bad_words": limits.words,
        "logit_bias": limits.biases,
        "allowed_token_ids": limits.biases,
    }
    for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
        boolean(fields, name)
    for name, most in most_entries.items():
        values = fields.get(name)
        if isinstance(values, dict) and name != "logit_bias":  # which would be read as the list of its names
            raise RequestError(f"{name} must be a list, got {shown(values)}", param=name)
        if isinstance(values, (list, dict)) and len(values) > most:
            raise RequestError(f"{name} has {len(values)} entries; at most {most} are allowed", param=name)
    given = {name: keep_all_if_negative(name, fields[name]) for name in SAMPLING & set(fields)}
    values = {**defaults, **given}
    if (seed := _integer(fields, "seed", -(2**63), 2**64 - 1)) is not None:  # OpenAI's are signed; the engine's are not
        values["seed"] = seed % 2**64
    n = _integer(fields, "n", 1, limits.n) or 1
    try:
        return SamplingParams(**values, n=n, logprobs=logprobs, structured_outputs=_structured_outputs(fields))
    except ValueError as error:  # its first word is the name of the field
        name, _, rest = str(error).partition(" ")
        if name == "max_tokens" and "max_completion_tokens" in fields:
            name = "max_completion_tokens"
        raise RequestError(f"{name} {rest}", param=name) from None


def _structured_outputs(fields: Mapping[str, Any]) -> Any:
    """Return the structured output requested by `response_format` or `structured_outputs`."""
    wanted = fields.get("response_format")
    if wanted is None:
        return fields.get("structured_outputs")
    if "structured_outputs" in fields:
        raise RequestError(
            "response_format and structured_outputs both ask for structured output; give one",
            param="response_format",
        )
    if isinstance(wanted, dict) and wanted.get("type") == "json_object":
        return {"json_object": True}
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        named = wanted.get("json_schema")
        if isinstance(named, dict) and isinstance(named.get("schema"), dict):
            return {"json": named["schema"]}
    raise RequestError(
        'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
        f'{{"name": …, "schema": {{…}}}}}}, got {shown(wanted)}',
        param="response_format",
    )


def _prompts(prompt: object, limits: Limits) -> list:
    """Return one or several texts or token-id lists as a list."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):  # that the others are, too, is the engine's to check
            return [prompt]
        if len(prompt) > limits.prompts:
            raise RequestError(f"{len(prompt)} prompts; a request may have at most {limits.prompts}", param="prompt")
        if all(isinstance(one, str) for one in prompt) or all(isinstance(one, list) for one in prompt):
            return prompt
    raise RequestError(
        f"prompt must be a text, a list of texts, a list of token ids, or a list of such lists, got {shown(prompt)}",
        param="prompt",
    )


def template_kwargs(fields: Mapping[str, Any], tools: Tools | None) -> dict[str, Any] | None:
    """Return the arguments of the chat template, including the tools; `RequestError` for anything but an object."""
    value = fields.get("chat_template_kwargs")
    if not (value is None or isinstance(value, dict)):
        raise RequestError(f"chat_template_kwargs must be an object, got {shown(value)}", param="chat_template_kwargs")
    if tools is None:
        return value
    if "tools" in (value or {}):
        raise RequestError("tools and chat_template_kwargs both have tools; give one", param="tools")
    return {**(value or {}), "tools": tools.shown}


def boolean(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a field that is true or false; `RequestError` if it is anything else."""
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {shown(value)}", param=name)
    return value


def _integer(fields: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = fields.get(name)
    if value is not None and (as_integer(value) is None or not least <= value <= most):
        raise RequestError(f"{name} must be an integer from {least} to {most}, got {shown(value)}", param=name)
    return value
