"""Find tool calls in the text of an answer while it is generated.

A call is sent in pieces, as in OpenAI's API: first its id and name, then its arguments, a piece per token. The
arguments are passed on as the model wrote them; their end is found by counting brackets, without parsing the JSON. A
complete answer goes through the same code, as one piece. Text that may begin a call is held back; if it turns out to
have no name, it is text after all.

If a grammar constrained the calls, `error_in_calls` checks their arguments again at the end, with another program.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from beyond.serving.protocol import RequestError
from beyond.serving.tools import ToolFormat, Tools
from beyond.structured.answers import make_check, reason_against
from stage_a_naive.contract.structured_outputs import StructuredOutputs


class CallParser:
    """Reads one answer.

    Args:
        form: how the model writes calls.
        several: whether to return more than the first call.

    Attributes:
        num_calls: calls begun so far.
    """

    def __init__(self, form: ToolFormat, several: bool = True) -> None:
        self.num_calls = 0
        self._form = form
        name, key = r'"name"\s*:\s*("(?:[^"\\]|\\.)*")', re.escape(json.dumps(form.key))
        self._head = re.compile(rf"\s*\{{\s*{name}\s*,\s*{key}\s*:\s*(?=\{{)")
        self._opening = re.compile(rf"\s*{re.escape(form.opening)}" if form.opening else r"\s*(?=\{)")
        self._ends_call = form.closing or form.between.strip()
        self._after_call = self._text if several else self._nothing
        self._read = self._text
        self._held = ""  # text that is not told yet
        self._opened = ""  # what the call began with
        self._depth, self._in_string, self._escaped = 0, False, False  # of the arguments so far
        self._delta: dict[str, Any] = {}

    @property
    def has_called(self) -> bool:
        """Tell whether there are calls and the last one is complete."""
        return self.num_calls > 0 and self._read != self._arguments

    def feed(self, text: str, ends: bool = False) -> dict[str, Any]:
        """Add the next text; returns what is known now: `content`, `tool_calls`, both or neither.

        Args:
            ends: whether nothing comes behind it.
        """
        self._held += text
        self._delta = {}
        while self._read(ends):
            pass
        return self._delta

    # Each of these reads from `_held` what belongs to it, and returns whether the next has something to read.

    def _text(self, ends: bool) -> bool:
        opening = self._opening.search(self._held) if self._form.opening else self._opening.match(self._held)
        if opening:
            self._tell_text(self._held[: opening.start()])
            self._opened, self._held = opening[0], self._held[opening.end() :]
            self._read = self._name
            return True
        known = len(self._held) if ends else _sure(self._held, self._form.opening)
        if ends and self.num_calls and not self._held.strip():
            known = 0  # white space behind the last call
        self._tell_text(self._held[:known])
        self._held = self._held[known:]
        if known and not self._form.opening:  # such calls only begin an answer
            self._read = self._rest
        return False

    def _rest(self, ends: bool) -> bool:
        self._tell_text(self._held)
        self._held = ""
        return False

    def _nothing(self, ends: bool) -> bool:
        self._held = ""
        return False

    def _name(self, ends: bool) -> bool:
        head = self._head.match(self._held)
        if head:
            call = {"id": f"call_{os.urandom(12).hex()}", "type": "function"}
            self._tell_call(call, {"name": json.loads(head[1], strict=False), "arguments": ""})
            self._held, self._read = self._held[head.end() :], self._arguments
            return True
        text, closing, rest = self._held.partition(self._ends_call)
        if not (closing or ends):
            return False
        self._tell_text(self._opened + text + closing)
        self._held, self._read = rest, self._text
        return bool(closing)

    def _arguments(self, ends: bool) -> bool:
        end = self._end_of_arguments()
        piece, self._held = self._held[:end], "" if end is None else self._held[end:]
        if piece:
            self._tell_call({}, {"arguments": piece})
        if end is None:
            return False
        self._read = self._closing
        return True

    def _end_of_arguments(self) -> int | None:
        for i, character in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = self._in_string
            elif character == '"':
                self._in_string = not self._in_string
            elif not self._in_string and character in "{[]}":
                self._depth += 1 if character in "{[" else -1
                if not self._depth:
                    return i + 1
        return None

    def _closing(self, ends: bool) -> bool:
        _, closing, rest = self._held.partition(self._ends_call)
        if closing:
            self._held, self._read = rest, self._after_call
        return bool(closing)

    def _tell_text(self, text: str) -> None:
        if text:
            self._delta["content"] = self._delta.get("content", "") + text

    def _tell_call(self, new: dict[str, Any], function: dict[str, str]) -> None:
        """Return a new call, or more arguments of the last one."""
        self.num_calls += bool(new)
        calls = self._delta.setdefault("tool_calls", [])
        index = self.num_calls - 1
        if calls and calls[-1]["index"] == index:
            calls[-1]["function"]["arguments"] += function["arguments"]
        else:
            calls.append({"index": index, **new, "function": function})


def _sure(text: str, opening: str) -> int:
    """Count the characters that cannot belong to an opening or to the white space before one."""
    for length in range(min(len(text), len(opening) - 1), 0, -1):
        if text.endswith(opening[:length]):
            text = text[:-length]
            break
    return len(text.rstrip())


def error_in_calls(tools: Tools, text: str) -> RequestError | None:
    """Return the error in the constrained calls of a stopped answer; None if there is none.

    The grammar came from one library, and a schema may have rules that no grammar can express; see `answers.py` of
    `beyond.structured`.
    """
    parser = CallParser(tools.format, tools.several)
    calls = [call["function"] for call in parser.feed(text, ends=True).get("tool_calls", ())]
    if calls and not parser.has_called:
        return _form_failed(
            f"the call of {calls[-1]['name']} is not complete; stop or stop_token_ids ended it too early"
        )
    places = {function["function"]["name"]: i for i, function in enumerate(tools.shown)}
    for call in calls:
        place = places.get(call["name"], -1)
        if place not in tools.schemas:
            return _form_failed(f"the model called {call['name']}, which it must not")
        schema = StructuredOutputs("json", json.dumps(tools.schemas[place]))
        if reason := reason_against(make_check(schema, ""), call["arguments"]):
            return _form_failed(f"the arguments of the call of {call['name']} do not match tools[{place}] ({reason})")
    return None


def _form_failed(message: str) -> RequestError:
    return RequestError(f"tools: {message}", param="tools", code="form_failed")
