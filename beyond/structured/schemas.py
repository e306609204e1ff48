"""Prepare schemas on arrival: refuse what the library misreads, with its place, and drop what it need not know.

A place is a JSON pointer (RFC 6901) such as `/properties/price/items`. The library reports what it refuses but not
where, so the place is found by trying the parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from beyond.structured.answers import FORMATS, schema_error
from beyond.structured.patterns import PatternError, check_pattern, scan
from beyond.structured.tokens import byte_tokens

MOST_TRIALS = 500  # of parts; in a larger schema the reported place may be an outer part
DEFINITIONS = ("$defs", "definitions")
NAMED = (*DEFINITIONS, "properties", "patternProperties")  # keywords whose value maps names to schemas
LISTED_OR_ONE = ("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalProperties", "additionalItems")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
LARGEST = 2**53  # the library's numbers are doubles, which skip integers above this
MOST_DIGITS = 15  # of a fraction that a double represents
# Allow one spelling per string: `\u0061` would be a second spelling of a name that the schema has a rule for.
ESCAPES = r"nrbtf\""
NEEDS_NUMBERS = re.compile(r"\\u00(?:[01]|7f)")  # control characters, which have no other spelling

Schema = Mapping[str, Any]


class Refused(NamedTuple):
    """A part of a schema that cannot be compiled."""

    pointer: str  # "" is the root
    reason: str


def prepare(schema: Schema, white_space: str = " ") -> dict[str, Any] | Refused:
    """Rewrite a schema for the library, or return the part that is wrong or would be misread.

    Three rules are dropped and left to the check of the finished answer: unique items, formats that are annotations,
    and (by an option of the library) that only one part of `oneOf` may hold.
    """
    wrong = schema_error(schema)
    if wrong is not None:
        return Refused(*wrong)
    parts = dict(_all_parts(schema))
    for pointer, part in parts.items():
        reason = next(filter(None, (check(part) for check in CHECKS)), None)
        if reason:
            return Refused(pointer, reason)
    endless = _first_endless(schema, parts)
    if endless is not None:
        return Refused(endless, "it cannot be satisfied: every value has another one inside, without end")
    escapes = f"{ESCAPES}u" if NEEDS_NUMBERS.search(json.dumps(schema)) else ESCAPES
    options = {"whitespace_pattern": white_space, "coerce_one_of": True, "json_allowed_escapes": escapes}
    return _written(schema) | {"x-guidance": options}


def _all_parts(schema: Schema, pointer: str = "") -> Iterator[tuple[str, Schema]]:
    yield pointer, schema
    for place, inner in _parts(schema):
        yield from _all_parts(inner, pointer + place)


def _check_numbers(part: Schema) -> str | None:
    given = [part[name] for name in (*BOUNDS, "const", "enum") if name in part]
    for number in _numbers_in(given):
        if abs(number) > LARGEST:
            return f"the number {number} is beyond 2**53, where not every integer is kept; use a string"
        if isinstance(number, float) and len(Decimal(repr(number)).normalize().as_tuple().digits) > MOST_DIGITS:
            return f"the number {number} has more than {MOST_DIGITS} digits; round it, or use a string"
    return None


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(inner)


def _check_patterns(part: Schema) -> str | None:
    for pattern in [part.get("pattern"), *_named(part, "patternProperties")]:
        try:
            if isinstance(pattern, str):
                check_pattern(pattern)
        except PatternError as error:
            return f"the pattern {pattern!r} cannot be compiled: {error}"
    return None


def _check_bounds(part: Schema) -> str | None:
    """Test the exclusive bounds: between an integer and a fraction near it, the library may accept a bound."""
    bounds = {name: part[name] for name in BOUNDS if name in part}
    excluded = [value for name, value in bounds.items() if name.startswith("exclusive") and type(value) in (int, float)]
    if not excluded:
        return None
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema({"type": "number", **bounds})
    state = LLMatcher(byte_tokens(), grammar, log_level=0)
    for text in {spelled for value in excluded for spelled in (f"{value:g}", f"{value:.1f}", f"{value}")}:
        ended = state.deep_copy()
        if ended.try_consume_tokens(list(text.encode())) == len(text) and ended.is_accepting():
            return f"the library would allow {text}, which {json.dumps(bounds)} excludes; move the bound a little"
    return None


CHECKS: tuple[Callable[[Schema], str | None], ...] = (_check_numbers, _check_patterns, _check_bounds)


def _first_endless(schema: Schema, parts: Mapping[str, Schema]) -> str | None:
    """Find a reference to a schema whose values never end: `a` needs an `a` inside.

    A schema has finite values if all schemas that it needs have finite values. So begin with schemas that need no
    other, and repeat until no more are found. Compare with the result if every reference is assumed to have values: the
    difference is endless.
    """
    known, finite = set(map(id, parts.values())), set[int]()

    def has_values(part: Any, believe: bool) -> bool:
        if not isinstance(part, dict):
            return part is not False
        return believe or id(part) not in known or id(part) in finite

    def satisfiable(part: Schema, believe: bool) -> bool:
        def inner(one: Any) -> bool:
            return has_values(one, believe)

        if isinstance(part.get("$ref"), str) and not inner(_target(schema, part["$ref"])):
            return False
        if not all(map(inner, part.get("allOf", ()))):
            return False
        if not all(any(map(inner, part[name])) for name in ("anyOf", "oneOf") if part.get(name)):
            return False
        types = part.get("type")
        if types == "object":
            names = part.get("properties", {})
            rest = part.get("additionalProperties", True)
            return all(inner(names.get(name, rest)) for name in part.get("required", ()))
        if types == "array":
            least, first = part.get("minItems", 0), part.get("prefixItems", [])
            rest = part.get("items", True)
            return all(map(inner, first[: int(least)])) and (least <= len(first) or inner(rest))
        return True

    ordered = list(parts.values())[::-1]  # inner ones first
    found = True
    while found:
        found = False
        for part in ordered:
            if id(part) not in finite and satisfiable(part, False):
                finite.add(id(part))
                found = True
    for pointer, part in parts.items():
        if "$ref" in part and id(part) not in finite and satisfiable(part, True):
            return pointer
    return None


def _target(schema: Schema, reference: str) -> Any:
    """Return the target of a reference inside a schema; True if there is none, which the library refuses."""
    found: Any = schema
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name, True) if isinstance(found, dict) else True
    return found if reference.startswith("#") else True


def _written(value: Any) -> Any:
    """Copy a schema for the library."""
    if not isinstance(value, dict):
        return value
    own = dict(value)
    if own.get("format") not in FORMATS:
        own.pop("format", None)
    if own.pop("uniqueItems", False) and isinstance(choices := own.get("items"), dict) and "enum" in choices:
        own["maxItems"] = min(own.get("maxItems", len(choices["enum"])), len(choices["enum"]))
    if "pattern" in own:
        own["pattern"] = scan(own["pattern"])
    for name in NAMED:
        if name in own:
            own[name] = {inner: _written(one) for inner, one in own[name].items()}
    if "patternProperties" in own:
        own["patternProperties"] = {scan(name): one for name, one in own["patternProperties"].items()}
    for name in LISTED_OR_ONE:
        if name in own:
            own[name] = list(map(_written, own[name])) if isinstance(own[name], list) else _written(own[name])
    return own


def first_refused(schema: Schema) -> Refused | None:
    """Find the smallest part that is refused for the same reason as the whole schema; None if it is not refused."""
    prepared = prepare(schema)
    if isinstance(prepared, Refused):
        return prepared
    around = {name: prepared[name] for name in (*DEFINITIONS, "$schema", "x-guidance") if name in prepared}
    found, part, trials = Refused("", _refusal(prepared)), prepared, 0
    while found.reason:
        for pointer, inner in _parts(part):
            trials += 1
            if trials <= MOST_TRIALS and _refusal({**around, **inner}) == found.reason:
                found, part = Refused(found.pointer + pointer, found.reason), inner
                break
        else:
            return found
    return None


def _refusal(schema: Schema) -> str:
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        return " ".join(LLMatcher.validate_grammar(grammar).split())
    except (ValueError, RecursionError) as error:
        return " ".join(str(error).split())


def _parts(schema: Schema) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas directly inside a schema, and their places."""
    for keyword in (*NAMED, *LISTED_OR_ONE):
        value = schema.get(keyword)
        if isinstance(value, list):
            inside = [(f"/{i}", one) for i, one in enumerate(value)]
        elif keyword in NAMED:
            inside = [(f"/{_escaped(name)}", one) for name, one in _named(schema, keyword).items()]
        else:
            inside = [("", value)]
        yield from ((f"/{keyword}{name}", one) for name, one in inside if isinstance(one, dict))


def _named(schema: Schema, keyword: str) -> Mapping[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
