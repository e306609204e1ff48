"""What a request's `structured_outputs` ask for: validated here, enforced by the engine of `beyond`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

KINDS = ("json", "regex", "choice", "grammar", "json_object")  # the names and meanings are vLLM's
RULE = (
    "exactly one of {'json': a schema}, {'regex': a text}, {'choice': a list of texts}, {'grammar': a text} and "
    "{'json_object': True}"
)

NO_FORMS = (
    "structured_outputs of prompt {}: this engine cannot constrain answers; use `from beyond import LLM`, or the "
    "server, python -m beyond.serving (beyond/structured/README.md)"
)


class GrammarError(ValueError):
    """A `structured_outputs` request that cannot be served; the message says why and what to do."""


class StructuredOutputs(NamedTuple):
    """A constraint on the answer as plain text, so that it can be compared and sent to another process."""

    kind: str  # one of `KINDS`
    text: str  # JSON of the schema or of the list of choices; the expression or grammar itself; "" for json_object


def as_structured_outputs(value: Any) -> StructuredOutputs | None:
    """Return the one constraint in a mapping; None if the mapping is malformed or has none or several."""
    if isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping) or not set(value) <= set(KINDS):
        return None
    given = {kind: form for kind, form in value.items() if form is not None and (kind, form) != ("json_object", False)}
    if len(given) != 1:
        return None
    [(kind, form)] = given.items()
    text = _as_text(kind, form)
    return None if text is None else StructuredOutputs(kind, text)


def _as_text(kind: str, form: Any) -> str | None:
    if kind in ("regex", "grammar"):
        return form if isinstance(form, str) and form else None
    if kind == "json_object":
        return "" if form is True else None
    try:
        if kind == "json" and isinstance(form, str):
            form = json.loads(form)
        text = json.dumps(form, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return None
    if kind == "json":
        return text if isinstance(form, dict) else None
    are_texts = isinstance(form, (list, tuple)) and all(isinstance(choice, str) and choice for choice in form)
    return text if are_texts and form else None
