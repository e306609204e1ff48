"""Check finished answers with parsers that are independent of the masks.

The masks come from one library, and a library has bugs: it rounds a large integer, or accepts the 29th of February of
any year. So its answers are not trusted. Another program checks every finished answer: jsonschema for a JSON
schema, `regex` for a regular expression, a comparison for a choice. For a grammar there is no other parser, so the
library reads the text again, character by character instead of token by token. If the check fails, the request ends
with an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import date, datetime
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any

from beyond.structured.patterns import SECONDS, matches
from beyond.structured.tokens import byte_tokens
from stage_a_naive.contract.structured_outputs import GrammarError, StructuredOutputs

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

Check = Callable[[str], str]  # returns why a text is not a valid answer, or ""
MOST_SHOWN = 200  # characters of a reason
# The formats that the library knows and enforces; any other format is only an annotation.
FORMATS = "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"
NUMBERED = "<["  # marks a grammar that names tokens by number: the text does not show which tokens they were


def make_check(form: StructuredOutputs, grammar: str) -> Check:
    """Make the check of a constraint's answers; `grammar` is the library's, which also checks grammars."""
    if form.kind == "choice":
        choices = frozenset(json.loads(form.text))
        return lambda text: "" if text in choices else "it is none of the choices"
    if form.kind == "regex":
        return lambda text: "" if matches(form.text, text, whole=True) else "it does not match"
    if form.kind == "grammar":
        return _grammar_check(grammar)
    validator = make_validator(read_exactly(form.text or '{"type": "object"}'))
    return lambda text: _first_error(validator, text)


def reason_against(check: Check, text: str) -> str:
    """Return why a text is not a valid answer, or "". An exception in the check is a reason too."""
    try:
        return check(text)
    except TimeoutError:
        return f"the check took longer than {SECONDS} s"
    except Exception as error:  # invalid JSON, numbers with too many digits, brackets nested too deeply
        return f"{type(error).__name__}: {error}"[:MOST_SHOWN]


def read_exactly(text: str) -> Any:
    """Read JSON; decimal fractions stay decimal, so that 0.3 is a multiple of 0.1."""
    return json.loads(text, parse_float=Decimal, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def schema_error(schema: Any) -> tuple[str, str] | None:
    """Return where and why something is not a JSON schema of the draft that it names; None if it is one.

    Raises:
        GrammarError: the package jsonschema is missing.
    """
    kind = _draft(schema)
    from jsonschema.exceptions import best_match

    error = best_match(kind(kind.META_SCHEMA).iter_errors(schema))
    if error is None:
        return None
    place = "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in error.absolute_path)
    return place, f"it is no JSON schema: {error.message[:MOST_SHOWN]}"


def make_validator(schema: Any) -> Validator:
    """Make a jsonschema validator for a schema, with formats and time limits."""
    bounded = _bounded(_draft(schema))
    from referencing import Registry

    # The registry is empty: a reference to another document is an error, and nothing is fetched.
    return bounded(schema, registry=Registry(), format_checker=_formats())


@cache
def _bounded(kind: type[Validator]) -> type[Validator]:
    from jsonschema.validators import extend

    return extend(kind, {"pattern": _pattern, "patternProperties": _pattern_properties})


def _draft(schema: Any) -> type[Validator]:
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.validators import validator_for
    except ImportError:
        raise GrammarError("structured_outputs needs the package jsonschema: pip install jsonschema") from None
    return validator_for(schema, default=Draft202012Validator)


def _first_error(validator: Validator, text: str) -> str:
    error = next(validator.iter_errors(read_exactly(text)), None)
    return "" if error is None else f"{error.json_path}: {error.message[:MOST_SHOWN]}"


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, str) and not matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: dict, instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, dict):
        for pattern, inner in patterns.items():
            for name in instance:
                if matches(pattern, name):
                    yield from validator.descend(instance[name], inner, path=name, schema_path=pattern)


@cache
def _formats() -> Any:
    """Return jsonschema's format checks, and those that it leaves to other packages."""
    from jsonschema import FormatChecker

    formats = FormatChecker([name for name in FORMATS if name in FormatChecker.checkers])
    formats.checks("date", ValueError)(lambda v: not isinstance(v, str) or bool(date.fromisoformat(v)))
    formats.checks("date-time", ValueError)(lambda v: not isinstance(v, str) or _is_time(v))
    formats.checks("time", ValueError)(lambda v: not isinstance(v, str) or _is_time(f"2000-01-01T{v}"))
    return formats


def _is_time(text: str) -> bool:
    """Tell whether a text is a date and time of RFC 3339; leap seconds are allowed."""
    whole = re.fullmatch(r"(.{10}[Tt ]\d\d:\d\d:)(60|\d\d)(\.\d+)?([Zz]|[+-]\d\d:\d\d)", text)
    return whole is not None and bool(datetime.fromisoformat(whole[1].upper() + min(whole[2], "59")))


def _grammar_check(grammar: str) -> Check:
    from llguidance import LLMatcher

    if NUMBERED in grammar:
        return lambda text: ""
    start = LLMatcher(byte_tokens(), grammar, log_level=0)

    def check(text: str) -> str:
        state, spelled = start.deep_copy(), list(text.encode())
        accepted = state.try_consume_tokens(spelled)
        if accepted < len(spelled):
            return f"the grammar allows nothing that begins like this: {text.encode()[: accepted + 1][-40:]!r}"
        return "" if state.is_accepting() else "the grammar needs more text after it"

    return check
