"""Describe the API, for programs (`/openapi.json`) and for people (`/docs`).

The models here describe the fields. `protocol.py` validates requests, because its messages say more than a model's; a
test compares the two.
"""

from __future__ import annotations

from functools import cache
from html import escape
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from stage_a_naive.contract.params import RULES

TITLE = "An engine behind the OpenAI API"
STYLE = """:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem; font-size: 1.1rem } code { font-size: .95em }
table { border-collapse: collapse; width: 100% }
td, th { border-top: 1px solid color-mix(in srgb, currentColor 25%, transparent); padding: .3rem .6rem .3rem 0 }
td, th { text-align: left; vertical-align: top }"""
# Neither scripts nor fonts, and nothing from elsewhere.
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}


def _sampling(name: str) -> Any:
    """A sampling parameter, described in the words of its errors."""
    return Field(None, description=RULES[name][2])


def _field(description: str) -> Any:
    return Field(None, description=description)


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool | None = _field("the last event has the numbers of tokens")
    continuous_usage_stats: bool | None = _field("every event has those so far")


class Shared(BaseModel):
    """Fields common to all requests for text."""

    model: str | None = _field("the name of the model that is served; it may be left out")
    n: int | None = _field("answers to each prompt, 1 to 16")
    stream: bool | None = _field("send every token as it comes, as server-sent events")
    stream_options: StreamOptions | None = _field('with "stream": true')
    max_tokens: int | None = _sampling("max_tokens")
    temperature: float | None = _sampling("temperature")
    top_p: float | None = _sampling("top_p")
    top_k: int | None = Field(None, description=RULES["top_k"][2] + "; -1 is off, too")
    min_p: float | None = _sampling("min_p")
    repetition_penalty: float | None = _sampling("repetition_penalty")
    presence_penalty: float | None = _sampling("presence_penalty")
    frequency_penalty: float | None = _sampling("frequency_penalty")
    logit_bias: dict[str, float] | None = _sampling("logit_bias")
    bad_words: list[str] | None = _sampling("bad_words")
    allowed_token_ids: list[int] | None = _sampling("allowed_token_ids")
    min_tokens: int | None = _sampling("min_tokens")
    stop: str | list[str] | None = _sampling("stop")
    stop_token_ids: list[int] | None = _sampling("stop_token_ids")
    include_stop_str_in_output: bool | None = _field("leave the stop string in the text")
    ignore_eos: bool | None = _field("continue after the model's end-of-sequence token")
    skip_special_tokens: bool | None = _field("false writes special tokens into the text")
    seed: int | None = _field("makes sampled tokens reproducible")
    response_format: dict[str, Any] | None = _field("text, json_object or json_schema: the format of the answer")
    structured_outputs: dict[str, Any] | None = _field("json, regex, choice, grammar or json_object, as in vLLM")
    user: str | None = _field("identifies the user or conversation; does not affect the answer")
    safety_identifier: str | None = _field("identifies the user or conversation; does not affect the answer")
    prompt_cache_key: str | None = _field("identifies the user or conversation; does not affect the answer")


class CompletionRequest(Shared):
    """Prompts to continue."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(description="one or several texts or token-id lists")
    logprobs: int | None = _field("the likeliest tokens to tell at every step, 0 to 20")
    echo: bool | None = _field("begin the answer with the prompt")
    prompt_logprobs: int | None = _field("the likeliest tokens to tell at every position of the prompt, 0 to 20")
    best_of: int | None = _field("supported if it equals n")


class TextPart(BaseModel):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]


class ChatRequest(Shared):
    """A conversation to answer."""

    messages: list[Message] = Field(description="the conversation; further fields are left to the chat template")
    max_completion_tokens: int | None = _field("max_tokens by its newer name")
    logprobs: bool | None = _field("tell the log-probability of every token")
    top_logprobs: int | None = _field("the likeliest tokens to tell beside it, 0 to 20")
    chat_template_kwargs: dict[str, Any] | None = _field("arguments of the chat template")
    tools: list[dict[str, Any]] | None = _field(
        "functions that the model may call, each with a schema of its arguments"
    )
    tool_choice: str | dict[str, Any] | None = _field("none, auto, required, or the function to be called")
    parallel_tool_calls: bool | None = _field("whether an answer may have several calls")


class TokenizeRequest(BaseModel):
    """A text or a conversation to tokenize."""

    model: str | None = _field("the name of the model that is served")
    prompt: str | None = _field("a text; or")
    messages: list[Message] | None = _field("a conversation")
    tools: list[dict[str, Any]] | None = _field("functions that the model of the conversation may call")
    add_special_tokens: bool | None = _field("what the tokenizer puts around a text")
    chat_template_kwargs: dict[str, Any] | None = _field("arguments of the chat template")


class DetokenizeRequest(BaseModel):
    """Tokens to turn into text."""

    model: str | None = _field("the name of the model that is served")
    tokens: list[int] = Field(description="token ids")


ENDPOINTS: tuple[tuple[str, str, type[BaseModel] | None, str], ...] = (
    ("post", "/v1/chat/completions", ChatRequest, "Answer a conversation"),
    ("post", "/v1/completions", CompletionRequest, "Continue prompts, or tell how likely they are"),
    ("post", "/v1/responses", None, "OpenAI's newer API: answer a conversation"),
    ("post", "/v1/messages", None, "Anthropic's API: answer a conversation"),
    ("post", "/v1/messages/count_tokens", None, "The number of tokens of such a conversation"),
    ("get", "/v1/models", None, "The model that is served, and the sampling parameters of requests that name none"),
    ("get", "/v1/models/{model}", None, "The same, by name"),
    ("post", "/tokenize", TokenizeRequest, "A text or a conversation to token ids"),
    ("post", "/detokenize", DetokenizeRequest, "Token ids to text"),
    ("get", "/tokenizer_info", None, "The special tokens and the chat template"),
    ("get", "/health", None, "200 while requests are taken and steps succeed"),
    ("get", "/ping", None, "The same"),
    ("get", "/version", None, "The version of the engines"),
    ("get", "/metrics", None, "Metrics for Prometheus"),
)


@cache  # it takes long enough to be noticed by others
def describe_api() -> dict[str, Any]:
    """Return the description of the API in OpenAPI 3.1."""
    place, paths = "#/components/schemas/{model}", {}
    models = [(model, "validation") for _, _, model, _ in ENDPOINTS if model is not None]
    schemas = models_json_schema(models, ref_template=place)[1]["$defs"]  # pyright: ignore[reportArgumentType]
    error = {"type": "object", "properties": {name: {} for name in ("message", "type", "param", "code")}}
    schemas["Error"] = {"type": "object", "properties": {"error": error}}
    refused = {"application/json": {"schema": {"$ref": place.format(model="Error")}}}
    for method, path, model, summary in ENDPOINTS:
        told: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "the answer"}}}
        told["responses"]["default"] = {"description": "what is wrong, and what to do", "content": refused}
        if model is not None:
            content = {"application/json": {"schema": {"$ref": place.format(model=model.__name__)}}}
            told["requestBody"] = {"required": True, "content": content}
        if "{model}" in path:
            told["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[path] = {method: told}
    security = {"key": {"type": "http", "scheme": "bearer", "description": "where the server has a key"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": "1", "description": "What is not listed is refused by name."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": security},
        "security": [{"key": []}, {}],
    }


def docs_page(api: dict[str, Any]) -> str:
    """Write the description of an API as a page: its endpoints, and the fields of each request."""
    parts = [f"<h1>{escape(TITLE)}</h1>", f"<p>{escape(api['info']['description'])} For programs: "]
    parts.append('<a href="openapi.json">openapi.json</a>.</p>')
    for path, methods in api["paths"].items():
        for method, told in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code> {escape(told['summary'])}</h2>")
            if "requestBody" in told:
                name = told["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                parts.append(_table(api["components"]["schemas"][name]))
    title = f"<title>{escape(TITLE)}</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}<style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _table(schema: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>{' (required)' if name in schema.get('required', ()) else ''}</td>"
        f"<td>{escape(_type(field))}</td><td>{escape(field.get('description', ''))}</td></tr>"
        for name, field in schema["properties"].items()
    )
    return f"<table><tr><th>field</th><th>type</th><th>meaning</th></tr>{rows}</table>"


def _type(schema: dict[str, Any]) -> str:
    """Describe the values that a field may have."""
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    return schema.get("type") or schema["$ref"].rpartition("/")[2]
