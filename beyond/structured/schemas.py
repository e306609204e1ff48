"""Where in a schema the library found what it refuses: it says what, and the place is found by trying the parts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

MOST_TRIALS = 500  # of parts; in a larger schema the place may be a part around the one to blame
DEFINITIONS = ("$defs", "definitions")
NAMED = (*DEFINITIONS, "properties", "patternProperties")  # keywords whose value has schemas by name
LISTED_OR_ONE = ("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalProperties")


class Refused(NamedTuple):
    """A part of a schema that cannot be compiled."""

    pointer: str  # JSON pointer (RFC 6901) from the schema's root; "" is the root
    reason: str


def first_refused(schema: Mapping[str, Any]) -> Refused | None:
    """Find the smallest part that is refused for the reason that the whole schema is; None if the whole is not."""
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    found, part, trials = Refused("", _refusal(schema)), schema, 0
    while found.reason:
        for pointer, inner in _parts(part):
            trials += 1
            if trials <= MOST_TRIALS and _refusal({**definitions, **inner}) == found.reason:
                found, part = Refused(found.pointer + pointer, found.reason), inner
                break
        else:
            return found
    return None


def _refusal(schema: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        return " ".join(LLMatcher.validate_grammar(grammar).split())
    except (ValueError, RecursionError) as error:
        return " ".join(str(error).split())


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the schemas right inside a schema, and where they are."""
    for keyword in (*NAMED, *LISTED_OR_ONE):
        value = schema.get(keyword)
        if isinstance(value, list):
            inside = [(f"/{i}", one) for i, one in enumerate(value)]
        elif keyword in NAMED and isinstance(value, dict):
            inside = [(f"/{_escaped(name)}", one) for name, one in value.items()]
        else:
            inside = [("", value)]
        yield from ((f"/{keyword}{name}", one) for name, one in inside if isinstance(one, dict))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
