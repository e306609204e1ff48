"""Grammar libraries on random constraints: what they refuse, what they get wrong, and the time per token.

Each constraint is a random JSON schema, regular expression or grammar, and gets random answers: at every token one of
those that the library allows. Another program checks every complete answer (`beyond/structured/answers.py`). If the
check fails, the library has allowed what its constraint forbids. *The engine* is llguidance with the checks on
arrival of `beyond/structured`; there a wrong answer ends its request with an error.

    pip install xgrammar==0.2.8                 # no dependency of the course; without it, its rows are left out
    python -m benchmarks.micro random_forms minutes=10 only='the engine'    # new constraints, for ten minutes
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
import regex

from benchmarks.micro._forms import Walker, random_grammar, random_regex, whole_schema
from beyond.structured.answers import make_check, make_validator, read_exactly, reason_against, schema_error
from beyond.structured.gbnf import gbnf_to_lark
from beyond.structured.grammars import WHITE_SPACE, compile_form
from beyond.structured.tokens import library_tokens
from stage_a_naive.checkpoints.loading import eos_token_ids, load_tokenizer, resolve
from stage_a_naive.contract.outputs import decode_all
from stage_a_naive.contract.structured_outputs import StructuredOutputs

KINDS: dict[str, Callable[[random.Random], str]] = {
    "json": lambda chance: json.dumps(whole_schema(chance), ensure_ascii=False),
    "regex": random_regex,
    "grammar": random_grammar,
}
ENGINE = "the engine"
MOST_TOKENS = 60  # of an answer
MOST_REASONS = 5  # of wrong answers that are kept
TABLES = """
[random-forms]
corner = "constraints, library"
line = "{forms:,} {kind}, {library}"
columns."refused" = "{refused:,}"
columns."answers that ended, wrong ones" = "{ended:,}, {wrong:,}"
columns."stuck" = "{stuck:,}"
columns."µs per token" = "{1e6 * median(token_seconds):n}"
columns."ms to compile" = "{1e3 * median(compile_seconds):n}"
note = "{result['vocabulary']:,} tokens, {result['answers']} answers per constraint; {named(result)}"
"""


def named(result: dict) -> str:
    return ", ".join(f"{library} {number}" for library, number in result["libraries"].items())


class Compiled(NamedTuple):
    """A constraint compiled by one library: fills masks, and advances by a token."""

    fill: Callable[[], None]  # the mask; an exception is raised where nothing can be told
    mask: np.ndarray
    accept: Callable[[int], None]


class Llguidance:
    """Masks of llguidance.

    Args:
        tokens: of the model.
        size: of its vocabulary.
    """

    def __init__(self, tokens: Any, size: int, checked: bool) -> None:
        self._tokens, self._checked = tokens, checked
        self._mask = np.zeros(-(-size // 32), np.int32)

    def compile(self, form: StructuredOutputs) -> Callable[[], Compiled]:
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark

        if self._checked:
            state = compile_form(form, self._tokens)[0]
        else:
            if form.kind == "json":
                grammar = LLMatcher.grammar_from_json_schema(form.text, overrides={"whitespace_pattern": WHITE_SPACE})
            elif form.kind == "regex":
                grammar = LLMatcher.grammar_from_regex(form.text)
            else:
                grammar = LLMatcher.grammar_from_lark(any_to_lark(form.text))
            state = LLMatcher(self._tokens, grammar, log_level=0)
            if state.is_error():
                raise ValueError(state.get_error())
        return lambda: self._start(state.deep_copy())

    def _start(self, state: Any) -> Compiled:
        def fill() -> None:
            state.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            if state.is_error():
                raise ValueError(state.get_error())

        return Compiled(fill, self._mask, state.consume_token)


class Xgrammar:
    """Masks of xgrammar."""

    def __init__(self, tokenizer: Any, size: int, eos_ids: list[int]) -> None:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=eos_ids)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._new, self._batch = xgrammar.GrammarMatcher, xgrammar.BatchGrammarMatcher(max_threads=1)
        self._mask = np.zeros((1, -(-size // 32)), np.int32)

    def compile(self, form: StructuredOutputs) -> Callable[[], Compiled]:
        compiler = self._compiler
        if form.kind == "json":
            compiled = compiler.compile_json_schema(form.text, max_whitespace_cnt=8)
        elif form.kind == "regex":
            compiled = compiler.compile_regex(form.text)
        else:
            compiled = compiler.compile_grammar(form.text)
        return lambda: self._start(self._new(compiled))

    def _start(self, matcher: Any) -> Compiled:
        def fill() -> None:
            self._mask[:] = -1
            self._batch.batch_fill_next_token_bitmask([matcher], self._mask)

        return Compiled(fill, self._mask, matcher.accept_token)


def ids_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def check_of(form: StructuredOutputs) -> Callable[[str], str] | None:
    """Return the check of a constraint, even if the engine refuses it; None if no program can check it."""
    from llguidance import LLMatcher

    try:
        if form.kind == "json":
            schema = read_exactly(form.text)
            if schema_error(schema) is not None:
                return None
            validator = make_validator(schema)
            return lambda text: "" if validator.is_valid(read_exactly(text)) else "it is not valid"
        if form.kind == "regex":
            regex.compile(form.text)
            return make_check(form, "")
        return make_check(form, LLMatcher.grammar_from_lark(gbnf_to_lark(form.text)))
    except Exception:  # the libraries do not document their exceptions
        return None


def measure(
    schemas: int = 2000,
    expressions: int = 1000,
    grammars: int = 200,
    answers: int = 2,
    parts: int = 5,
    minutes: float = 0,
    only: str = "",
) -> dict:
    """Count and time each kind of constraint with each library, or with one, on the tutor's vocabulary.

    With `minutes`, new constraints are tried for at least that long.
    """
    source = resolve("tutor")
    tokenizer = load_tokenizer(source)
    size, eos_ids = len(tokenizer), sorted(eos_token_ids(source, tokenizer))
    tokens = library_tokens(tokenizer, size, eos_ids)
    from llguidance.hf import from_tokenizer

    libraries: dict[str, Any] = {ENGINE: Llguidance(tokens, size, True)}
    versions = {"llguidance": version("llguidance")}
    if not only:
        libraries["llguidance"] = Llguidance(from_tokenizer(tokenizer, size, eos_ids), size, False)
        try:
            versions["xgrammar"] = version("xgrammar")
            libraries["xgrammar"] = Xgrammar(tokenizer, size, eos_ids)
        except PackageNotFoundError:
            pass
    counts = dict(zip(KINDS, (schemas, expressions, grammars), strict=True))
    rows = {
        (kind, name): {"kind": NAMES[kind], "library": name}
        | dict.fromkeys(("forms", "refused", "ended", "wrong", "stuck"), 0)
        | {"reasons": [], "token_seconds": [], "compile_seconds": []}
        for kind in counts
        for name in libraries
    }
    end = time.monotonic() + 60 * minutes
    part = 0
    while part < parts or time.monotonic() < end:
        for kind, count in counts.items():
            try_forms(kind, count // parts, part, answers, libraries, rows, tokenizer, eos_ids)
        part += 1
    for row in rows.values():
        print(*(f"{value}" for value in list(row.values())[:7]), *row["reasons"][:3], sep="  ", flush=True)
    return {"vocabulary": size, "answers": answers, "libraries": versions, "rows": list(rows.values())}


NAMES = {"json": "JSON schemas", "regex": "expressions", "grammar": "grammars"}


def try_forms(
    kind: str, count: int, part: int, answers: int, libraries: dict, rows: dict, tokenizer: Any, eos_ids: list[int]
) -> None:
    """Try `count` constraints of a kind, the same with every library."""
    seconds = {name: ([], [0.0, 0]) for name in libraries}
    for number in range(count):
        form = StructuredOutputs(kind, KINDS[kind](random.Random(f"{kind} {part} {number}")))
        check = check_of(form)
        for name, library in libraries.items():
            row, (compiling, spent) = rows[kind, name], seconds[name]
            row["forms"] += 1
            start = time.perf_counter()
            try:
                begin = library.compile(form)
            except Exception:  # each library has its own, and some have several
                row["refused"] += 1
                continue
            compiling.append(time.perf_counter() - start)
            walker = Walker(tokenizer, eos_ids, random.Random(number))
            for _ in range(answers):
                text = answer(begin(), walker, tokenizer, spent)
                row["ended"] += isinstance(text, str)
                row["stuck"] += text is False
                reason = reason_against(check, text) if check is not None and isinstance(text, str) else ""
                row["wrong"] += bool(reason)
                if reason and len(row["reasons"]) < MOST_REASONS:
                    row["reasons"].append(f"{form.text[:300]!r}: {text[:80]!r}: {reason}")
    for name, (compiling, (spent, num_tokens)) in seconds.items():
        rows[kind, name]["compile_seconds"].append(float(np.median(compiling)) if compiling else 0.0)
        rows[kind, name]["token_seconds"].append(spent / max(num_tokens, 1))


def answer(compiled: Compiled, walker: Walker, tokenizer: Any, spent: list) -> str | bool | None:
    """Make a random answer; None if it became too long, False if no token was allowed."""
    ids: list[int] = []
    for _ in range(MOST_TOKENS):
        start = time.perf_counter()
        try:
            compiled.fill()
        except Exception:  # a grammar that got too large, in the words of its library
            return False
        spent[0] += time.perf_counter() - start
        allowed = ids_of(compiled.mask)
        if not allowed:
            return False
        token = walker.next(allowed)
        if token is None:
            return decode_all(tokenizer, ids)
        start = time.perf_counter()
        compiled.accept(token)
        spent[0] += time.perf_counter() - start
        spent[1] += 1
        ids.append(token)
    return None
