"""Random constraints, and random answers that satisfy them, to test grammar libraries."""

from __future__ import annotations

import random
import re
from typing import Any

from transformers import PreTrainedTokenizerFast

WORDS = ("a", "b", "ab", "block", "a key", 'q"', "back\\", "é", "<|im_end|>", "e\u0301", "\x7f", "a/b")
PATTERNS = (
    "^[a-c]{1,4}$",
    '^[^"]{1,4}$',
    "^[^\\\\a]{0,3}$",
    "^\\d{2}-\\d{2}$",
    "b",
    "^(a|ab)+$",
    "^\\S{1,5}$",
    "^[a&&b]$",
)
FORMATS = ("date", "date-time", "time", "uuid", "ipv4", "email", "password", "binary", "colour")
NUMBERS = (0, 1, -1, 3, 7, 10, 100, 0.25, 0.5, -0.75, 2.5, 1234567890123456789, 2**53, 9.999999999999999)
STRUCTURE = re.compile(r'[\s"\]},:0-9.]+')  # tokens that bring JSON to its end


def random_schema(chance: random.Random, depth: int = 3, names: tuple[str, ...] = ()) -> Any:
    """Make a JSON schema; `names` are the names of its definitions."""
    kinds = ["string", "integer", "number", "enum", "const", "boolean", "any"]
    kinds += ["object", "object", "array", "array", "union", "typed"] if depth else []
    kinds += ["reference"] if names else []
    kind = chance.choice(kinds)
    inner = lambda: random_schema(chance, depth - 1, names)  # noqa: E731
    if kind == "object":
        listed = chance.sample(WORDS, chance.randint(0, 3))
        found = {"type": "object", "properties": {name: inner() for name in listed}}
        found |= {"required": chance.sample(listed, chance.randint(0, len(listed)))} if listed else {}
        found |= maybe(chance, 0.6, additionalProperties=chance.choice([False, False, True, inner()]))
        found |= maybe(chance, 0.05, patternProperties={chance.choice(PATTERNS): inner()})
        return found | maybe(chance, 0.05, minProperties=1) | maybe(chance, 0.03, propertyNames={"maxLength": 3})
    if kind == "array":
        found = {"type": "array", **maybe(chance, 0.8, items=inner())}
        found |= maybe(chance, 0.15, prefixItems=[inner(), inner()]) | maybe(chance, 0.2, uniqueItems=True)
        return found | maybe(chance, 0.5, minItems=chance.randint(0, 2)) | {"maxItems": chance.randint(1, 3)}
    if kind == "union":
        found = {chance.choice(["anyOf", "anyOf", "oneOf", "allOf"]): [inner(), inner()]}
        return found | maybe(chance, 0.1, type="object")
    if kind == "typed":
        return {"type": chance.sample(["string", "integer", "null", "boolean"], 2), "maxLength": 3}
    if kind == "reference":
        return {"$ref": f"#/$defs/{chance.choice(names)}"}
    if kind == "string":
        found = {"type": "string", **maybe(chance, 0.5, maxLength=chance.randint(0, 6))}
        found |= maybe(chance, 0.2, minLength=chance.randint(0, 3)) | maybe(chance, 0.2, title="A text", default="a")
        extra = chance.random()
        return (
            found
            | ({"pattern": chance.choice(PATTERNS)} if extra < 0.3 else {})
            | ({"format": chance.choice(FORMATS)} if extra > 0.8 else {})
        )
    if kind in ("integer", "number"):
        low, high = sorted(chance.sample(NUMBERS[:11], 2))
        found = {"type": kind, **maybe(chance, 0.5, **{chance.choice(["minimum", "exclusiveMinimum"]): low})}
        found |= maybe(chance, 0.5, **{chance.choice(["maximum", "exclusiveMaximum"]): high})
        found |= maybe(chance, 0.05, maximum=chance.choice(NUMBERS))
        return found | maybe(chance, 0.1, multipleOf=chance.choice([1, 3, 0.5, 0.1]))
    values = [*WORDS, *NUMBERS, True, None, [1, "a"], {"a": 0.1}]
    if kind == "enum":
        return {"enum": chance.sample(values, chance.randint(1, 4))}
    if kind == "const":
        return {"const": chance.choice(values)}
    if kind == "boolean":
        return {"type": "boolean"}
    return chance.choice(
        [{}, {"type": "null"}, {"not": {"type": "string"}}, {"if": {"type": "string"}}, {"type": "object"}]
    )


def whole_schema(chance: random.Random) -> dict[str, Any]:
    """Make a schema that may have definitions, which may refer to one another."""
    if chance.random() > 0.3:
        return random_schema(chance)
    names = ("x", "y")
    definitions = {name: random_schema(chance, 2, names) for name in names}
    return {**random_schema(chance, 2, names), "$defs": definitions}


def maybe(chance: random.Random, probability: float, **keywords: Any) -> dict[str, Any]:
    return keywords if chance.random() < probability else {}


def random_class(chance: random.Random) -> str:
    """Make a character class, as in regular expressions and GBNF."""
    parts = ["a", "b-d", "0-9", "+", "~", "&", " ", "é", r"\\", r"\]", r"\-", "_"]
    odd = ["&&", "--", "~~", "["] if chance.random() < 0.1 else []
    return f"[{chance.choice(['', '', '^'])}{''.join(chance.sample([*parts, *odd], chance.randint(1, 4)))}]"


def random_regex(chance: random.Random, depth: int = 3) -> str:
    """Make a regular expression."""
    kind = chance.choice(["text", "class", "class", "known", *["then", "either", "times"] * (depth > 0)])
    if kind == "text":
        return "".join(map(re.escape, chance.choice(WORDS)))
    if kind == "class":
        return random_class(chance)
    if kind == "known":
        return chance.choice(
            [r"\d", r"\w", r"\s", ".", r"\D", r"\p{L}", r"\x41", r"\u00e9", "<\\|im_end\\|>", r"\.", "(?i:ab)"]
        )
    parts = [random_regex(chance, depth - 1) for _ in range(2)]
    if kind == "then":
        return "".join(parts)
    if kind == "either":
        return f"({'|'.join(parts)})"
    often = chance.choice(
        ["*", "+", "?", "{2}", "{1,3}", "*?", "?+", "++"] if chance.random() < 0.1 else ["*", "+", "?", "{1,3}"]
    )
    return f"(?:{parts[0]}){often}"


def random_grammar(chance: random.Random) -> str:
    """Make a grammar in GBNF, whose rules may be recursive."""
    names = ["root", *chance.sample(["a-b", "a_b", "start", "word", "W"], chance.randint(1, 3))]

    def part(depth: int) -> str:
        kind = chance.choice(["text", "text", "class", "name", *["then", "either", "times"] * (depth > 0)])
        if kind == "text":
            return chance.choice(['"a"', '"b"', '"ab"', '"("', '")"', r'"\u0041"', r'"\x42\n"', '"<|im_end|>"', '"é"'])
        if kind == "class":
            return chance.choice(["[a-c]", "[a-c]+", "[^a(]", "[0-9]{1,3}", "[+--]", "[a&&b]", r"[\u0041-C]"])
        if kind == "name":
            return chance.choice(names)
        if kind == "then":
            return f"{part(depth - 1)} {part(depth - 1)}"
        if kind == "either":
            return f"({part(depth - 1)} | {part(depth - 1)})"
        return f"({part(depth - 1)}){chance.choice('*+?')}"

    return "\n".join(f"{name} ::= {part(2)} | {part(1)}" for name in names)


class Walker:
    """Chooses allowed tokens at random, in such a way that the answer ends.

    Args:
        tokenizer: of the ids.
        eos_ids: that end an answer.
        chance: the random numbers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, eos_ids: list[int], chance: random.Random) -> None:
        texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
        self._short = frozenset(i for i, text in enumerate(texts) if STRUCTURE.fullmatch(text))
        self._eos_ids, self._chance = frozenset(eos_ids), chance

    def next(self, allowed: list[int]) -> int | None:
        """Return the next token; None is the end."""
        going_on = [i for i in allowed if i not in self._eos_ids]
        if not going_on or (len(going_on) < len(allowed) and self._chance.random() < 0.4):
            return None
        short = [i for i in going_on if i in self._short]
        return self._chance.choice(short if short and self._chance.random() < 0.6 else going_on)
