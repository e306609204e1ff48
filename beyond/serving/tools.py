"""Tools of a chat: read them from a request, and write the grammar that constrains the model's calls.

A tool is a name and a JSON schema of its arguments. The chat template writes the tools into the prompt, and the model
answers with a call: text in a format that its family was trained on. With `required` or a named tool
the model must call, so the text is constrained from its first character on. With `auto` the model decides; its calls
are constrained only if a tool is `"strict": true`, and then from the first character of a call on.

    Hermes, Qwen2.5, Qwen3    <tool_call>
                              {"name": "clock", "arguments": {"city": "Paris"}}
                              </tool_call>
    Llama 3                   {"name": "clock", "parameters": {"city": "Paris"}}

Fields: https://platform.openai.com/docs/api-reference/chat/create. `tool_calls.py` reads the calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from beyond.structured.grammars import WHITE_SPACE
from beyond.structured.schemas import Refused, first_refused, prepare
from stage_a_naive.contract.errors import shown

MOST_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
COMBINED = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}  # may bring names that `properties` does not list
FUNCTION: dict[str, tuple[Callable[[Any], Any], str]] = {  # its fields, and which values they have
    "name": (
        lambda v: isinstance(v, str) and NAME.fullmatch(v),
        "a text of letters, digits, _ and -, at most 64 characters",
    ),
    "description": (lambda v: v is None or isinstance(v, str), "a text"),
    "parameters": (lambda v: v is None or isinstance(v, dict), "a JSON schema"),
    "strict": (lambda v: v is None or isinstance(v, bool), "true or false"),
}
CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": …}}'


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes a call.

    Attributes:
        opening, closing: text before and after the JSON object of a call.
        space: white space between them and the object.
        key: the object's name for the arguments.
        between: text between two calls.
        text: a regular expression for an answer, or its beginning, that is not a call.
        token_ids: ids of `opening` and `closing` if they are single tokens, which a grammar names by number.
        marks: other such tokens that may occur in text: Qwen3's `<think>`.
    """

    opening: str
    closing: str
    space: str
    key: str
    between: str
    text: str
    token_ids: Mapping[str, int]
    marks: Sequence[int] = ()

    def quote(self, tag: str) -> str:
        """Write `opening` or `closing` for a grammar."""
        return f"<[{self.token_ids[tag]}]>" if tag in self.token_ids else json.dumps(tag) if tag else ""


TEXT = r"(.|\n)*"
HERMES = ToolFormat("<tool_call>", "</tool_call>", "\n", "arguments", "\n", TEXT, {})
LLAMA3_JSON = ToolFormat("", "", "", "parameters", "; ", rf"[^{{\s]{TEXT}", {})
PARSERS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON}  # vLLM's names


@dataclass(frozen=True)
class Tools:
    """The tools of one request, checked.

    Attributes:
        shown: for the chat template.
        format: how the model writes calls.
        grammar: the grammar of the answer; None: not constrained.
        schemas: schemas of the constrained arguments, by the tool's place in the request.
        several: whether an answer may have more than one call.
    """

    shown: Sequence[Mapping[str, Any]]
    format: ToolFormat
    grammar: str | None
    schemas: Mapping[int, Mapping[str, Any]]
    several: bool

    def explain(self, error: ValueError) -> str:
        """Explain which part of which tool's schema made the library refuse the grammar, if it is a single one."""
        for i, schema in self.schemas.items():
            refused = first_refused(schema)
            if refused is not None:
                return f"tools[{i}].function.parameters{refused.pointer} cannot be compiled: {refused.reason}"
        return f"tools: {str(error).removeprefix('structured_outputs: ')}"


def tool_format(tokenizer: PreTrainedTokenizerFast, parser: str = "auto") -> ToolFormat | None:
    """Return the format of a model's calls; None if its chat template does not know tools.

    Args:
        parser: one of `PARSERS`; `auto` looks for it in the template, and takes Hermes's if unsure.
    """
    template = str(tokenizer.chat_template)
    if not re.search(r"\btools\b", template):
        return None
    if parser == "auto":
        parser = "llama3_json" if HERMES.opening not in template and '"parameters"' in template else "hermes"
    found, tokens = PARSERS[parser], tokenizer.get_added_vocab()
    tags = {tag: tokens[tag] for tag in (found.opening, found.closing) if tag in tokens}
    added = tokenizer.added_tokens_decoder.items()
    marks = tuple(sorted(i for i, token in added if not token.special and i not in tags.values()))
    return replace(found, token_ids=tags, marks=marks)


def parse_tools(body: Mapping[str, Any], form: ToolFormat | None) -> Tools | None:
    """Check `tools`, `tool_choice` and `parallel_tool_calls` of a chat; None if the model gets no tools.

    With `"tool_choice": "none"` the template gets no tools, so the model has nothing to call.

    Raises:
        ValueError: one of them is invalid; the message begins with the field.
    """
    given, choice, parallel = (body.get(name) for name in ("tools", "tool_choice", "parallel_tool_calls"))
    if not (parallel is None or isinstance(parallel, bool)):
        raise ValueError(f"parallel_tool_calls must be true or false, got {shown(parallel)}")
    if not (given is None or isinstance(given, list)) or len(given or []) > MOST_TOOLS:
        raise ValueError(f"tools must be a list of at most {MOST_TOOLS} tools, got {shown(given)}")
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(given or [])]
    names = [function["name"] for function in functions]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"tools[{i}].function.name {name!r} is that of tools[{names.index(name)}]; give another")
    chosen = _chosen(choice, names)
    if choice == "none" or not functions:
        return None
    if form is None:
        raise ValueError("tools are unknown to the model's chat template; serve a model that was trained with tools")
    constrained = chosen is not None or any(function.get("strict") for function in functions)
    schemas: dict[int, dict[str, Any]] = {}
    if constrained:
        for i in range(len(functions)) if chosen is None else chosen:
            by_schema = chosen is not None or functions[i].get("strict")
            schemas[i] = _arguments(functions[i], i) if by_schema else {"type": "object"}
    several = parallel is not False and not isinstance(choice, dict)
    grammar = None
    if constrained:
        calls = {names[i]: _prepared(schema, i) for i, schema in schemas.items()}
        grammar = write_grammar(calls, form, must_call=chosen is not None, several=several)
    for_prompt = [{"type": "function", "function": function} for function in functions]
    return Tools(for_prompt, form, grammar, schemas, several)


def _function(tool: object, where: str) -> dict[str, Any]:
    """Return the fields of a tool's function that are set."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise ValueError(f'{where} must be {{"type": "function", "function": {{…}}}}, got {shown(tool)}')
    function = {name: value for name, value in tool["function"].items() if value is not None}
    for name, (is_right, allowed) in FUNCTION.items():
        if not is_right(value := function.get(name)):
            raise ValueError(f"{where}.function.{name} must be {allowed}, got {shown(value)}")
    unknown = function.keys() - FUNCTION
    if unknown:
        raise ValueError(f"{where}.function has {shown(min(unknown))}; a function has {', '.join(FUNCTION)}")
    return function


def _chosen(choice: object, names: Sequence[str]) -> Sequence[int] | None:
    """Return the places of the tools of which one must be called; None if no call is required."""
    if choice is None or choice in ("none", "auto"):
        return None
    if not names:
        raise ValueError(f"tool_choice is {shown(choice)}, but there are no tools; give tools")
    if choice == "required":
        return range(len(names))
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError(f"tool_choice must be {CHOICES}, got {shown(choice)}")
    if name not in names:
        raise ValueError(f"tool_choice names {shown(name)}; the tools are {', '.join(names)}")
    return [names.index(name)]


def _arguments(function: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Return the schema of a function's arguments; without a schema it has no arguments."""
    schema = function.get("parameters", {})
    if schema.get("type", "object") != "object":
        raise ValueError(f'tools[{i}].function.parameters/type must be "object", got {shown(schema["type"])}')
    # JSON Schema allows names that it does not list; a function does not, and a small model adds them without end.
    closed = {} if COMBINED & schema.keys() else {"additionalProperties": False}
    return {"type": "object", **closed, **schema}


def _prepared(schema: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Write the schema of a function's arguments for a grammar."""
    prepared = prepare(schema, WHITE_SPACE)
    if isinstance(prepared, Refused):
        raise ValueError(f"tools[{i}].function.parameters{prepared.pointer} cannot be compiled: {prepared.reason}")
    return prepared


def write_grammar(calls: Mapping[str, Mapping[str, Any]], form: ToolFormat, *, must_call: bool, several: bool) -> str:
    """Write the grammar of answers that call tools, in the library's dialect of Lark.

    Args:
        calls: the schema of the arguments, by the tool's name.
        must_call: whether an answer consists only of calls; else it may be, or begin with, other text.
        several: whether an answer may have more than one call.
    """
    call = f"({' | '.join(f'call_{i}' for i in range(len(calls)))}) {form.quote(form.closing)}"
    opening = form.quote(form.opening)
    more = f" ({json.dumps(form.between)} {opening} {call})*" if several else ""
    if must_call:
        lines = [f"start: {opening} {call}{more}"]
    else:
        lines = [f"start: text | {'opened' if opening else ''} {call}{more}", *_text_rules(form)]
    for i, (name, schema) in enumerate(calls.items()):
        before = f"{form.space}{json.dumps({'name': name})[:-1]}, {json.dumps(form.key)}: "
        lines.append(f"call_{i}: {json.dumps(before)} arguments_{i} {json.dumps('}' + form.space)}")
        lines.append(f"arguments_{i}: %json {json.dumps(schema)}")
    return "\n".join(lines)


def _text_rules(form: ToolFormat) -> list[str]:
    """Write the rules of a text that is not a call, and of a text that ends where a call begins."""
    mark = f"<[{','.join(map(str, form.marks))}]>"
    rules = [f"TEXT: /{form.text}/", f"text: TEXT? ({mark} TEXT?)*" if form.marks else "text: TEXT?"]
    if form.opening in form.token_ids:
        rules.append(f"opened: text {form.quote(form.opening)}")
    elif form.opening:  # ends with the first opening; such a rule is one expression, so it can have no tokens
        rules.append(f"opened[lazy]: TEXT {form.quote(form.opening)}")
    return rules
