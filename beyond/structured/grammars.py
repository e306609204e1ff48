"""Grammars: the constraints of structured output, compiled by a library in a thread, once per constraint.

A *grammar* says which texts are answers. A *matcher* is the state of one answer in its grammar, and advances by each
accepted token. `Masks` computes which tokens may come next, for all answers of a step. The library is llguidance, which
reads all kinds of constraints (JSON schema, regular expression, grammar), reports what it does not support, and works
without Python's lock. Only this file uses it: another library would need another `Matcher`, `Masks` and `compile_form`.

Compiling takes milliseconds to seconds, so a thread does it. A request waits for its constraint; the batch does not.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError, wait
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from beyond.structured.answers import Check, make_check, reason_against
from beyond.structured.gbnf import GbnfError, gbnf_to_lark, place
from beyond.structured.patterns import PatternError, check_pattern, scan
from beyond.structured.schemas import Refused, first_refused, prepare
from beyond.structured.tokens import library_tokens
from stage_a_naive.checkpoints.loading import ModelSource, eos_token_ids, load_tokenizer
from stage_a_naive.contract.outputs import Completion
from stage_a_naive.contract.structured_outputs import GrammarError, StructuredOutputs
from stage_d_paged.block_manager import BlockManager
from stage_e_batching.step import BatchSequence

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MOST_CHARACTERS = 1 << 16  # of a constraint
MOST_FORMS = 256  # compiled constraints to keep
COMPILE_SECONDS = 10.0  # that a request waits for its constraint
# Between two tokens of JSON: a space, or a new line and an indentation. With unlimited space a model may never end.
WHITE_SPACE = r" |\n {0,8}"
POLL_SECONDS = 0.01
# Lark's tokens: a string, a comment, a regular expression, a special token by name.
LARK_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|<[^<>\[\]\s]+>')


class Matcher:
    """The state of one answer in its grammar.

    Args:
        state: the library's; this matcher takes ownership.
    """

    def __init__(self, state: LLMatcher) -> None:
        self.state = state

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance by tokens, up to the end of the answer; ignores tokens after it. Returns the number accepted."""
        for i, token_id in enumerate(token_ids):
            if self.state.is_stopped():
                return i
            self.state.consume_token(token_id)
        return len(token_ids)

    def roll_back(self, num_tokens: int) -> bool:
        """Undo the last accepted tokens; returns False if that is not possible."""
        return not self.state.is_error() and (num_tokens == 0 or self.state.rollback(num_tokens))

    def count_allowed(self, token_ids: list[int]) -> int:
        """Return how many of these tokens, from the first on, may come next."""
        return self.state.validate_tokens(token_ids)


class Masks:
    """Fills the masks of many answers at once, on several cores and without Python's lock.

    Args:
        num_threads: the library's threads; more than the number of cores gain nothing.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(self._num_threads)

    def fill(self, answers: Sequence[tuple[Matcher, int, list[int]]], masks: np.ndarray) -> dict[int, GrammarError]:
        """Write which tokens may come next: bit i % 32 of word i // 32 is 1 if token i may.

        Args:
            answers: matcher, its row, and a draft of its next tokens. The row after a guess gets the mask of the token
                that would follow the guess; rows after a forbidden guess are not written.
            masks: int32 `[rows, ceil(vocab / 32)]`, contiguous.

        Returns:
            the errors by row, of answers whose grammar has become too complex or allows no token.
        """
        plain = [(matcher.state, row) for matcher, row, draft in answers if not draft]
        drafts = [(matcher.state, row, draft) for matcher, row, draft in answers if draft]
        place = masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *place)
        if drafts:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafts, *place)
        errors = {}
        for matcher, row, _ in answers:
            if matcher.state.is_error():
                errors[row] = GrammarError(f"structured_outputs: the answer cannot go on ({_reason(matcher.state)})")
            elif not masks[row].any():
                errors[row] = GrammarError("structured_outputs: no token of the vocabulary can come next")
        return errors


class Compiled(NamedTuple):
    """A compiled constraint."""

    start: LLMatcher  # at the beginning of an answer; copy it
    check: Check  # checks the text of a finished answer


class Grammars:
    """The compiled constraints of one model.

    Args:
        source: the model, for its tokenizer.
        vocab_size: of its logits. Ids past the tokenizer's are never allowed.
    """

    def __init__(self, source: ModelSource, vocab_size: int) -> None:
        self._source, self._vocab_size = source, vocab_size
        self.num_words = -(-vocab_size // 32)  # int32 words of a mask
        self._compiled: OrderedDict[StructuredOutputs, Future[Compiled]] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(2, thread_name_prefix="grammars")

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        return load_tokenizer(self._source)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        return library_tokens(self._tokenizer, self._vocab_size, eos_token_ids(self._source, self._tokenizer))

    def compile(self, form: StructuredOutputs) -> Future[Compiled]:
        """Compile a constraint in the thread, once; the future has the result, or the `GrammarError`."""
        with self._lock:
            found = self._compiled.get(form)
            if found is None:
                found = self._compiled[form] = self._threads.submit(self._compile, form)
            self._compiled.move_to_end(form)
            while len(self._compiled) > MOST_FORMS:
                self._compiled.popitem(last=False)
        return found

    def start(self, form: StructuredOutputs) -> Matcher:
        """Return a matcher at the beginning of an answer.

        Raises:
            GrammarError: the constraint is wrong, cannot be satisfied, or takes too long to compile.
        """
        try:
            return Matcher(self.compile(form).result(COMPILE_SECONDS).start.deep_copy())
        except TimeoutError:
            took = f"takes longer than {COMPILE_SECONDS:.0f} s to compile; make it smaller"
            raise GrammarError(f"structured_outputs: the {form.kind} {took}") from None

    def error_of(self, completion: Completion) -> GrammarError | None:
        """Return why the text of a stopped answer violates its constraint; None if it does not."""
        form = completion.request.params.structured_outputs
        if form is None or completion.finish_reason != "stop":
            return None
        reason = reason_against(self.compile(form).result().check, completion.text)
        if not reason:
            return None
        ended = completion.all_token_ids[-1] in self._tokens.eos_tokens
        by = "" if ended else "; stop or stop_token_ids ended it too early"
        return GrammarError(f"structured_outputs: the answer does not match the {form.kind} ({reason}){by}")

    def _compile(self, form: StructuredOutputs) -> Compiled:
        state, grammar = compile_form(form, self._tokens, self._tokenizer.get_added_vocab())
        # The first masks build most of the library's tables: do it here, not in a step.
        trial, mask = state.deep_copy(), np.zeros(self.num_words, np.int32)
        trial.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[~np.isin(allowed, self._tokens.eos_tokens)]
        if len(allowed) and not trial.is_error():
            trial.consume_token(int(allowed[0]))
            trial.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if trial.is_error():
            raise GrammarError(f"structured_outputs: the {form.kind} cannot be satisfied ({_reason(trial)})")
        if not len(allowed):
            raise GrammarError(f"structured_outputs: the {form.kind} allows no answer but an empty one")
        return Compiled(state, make_check(form, grammar))


def compile_form(
    form: StructuredOutputs, tokens: LLTokenizer, marks: Mapping[str, int] = MappingProxyType({})
) -> tuple[LLMatcher, str]:
    """Compile a constraint with the library; returns an answer's first state, and the library's grammar.

    Args:
        tokens: of the model, as `library_tokens` describes them.
        marks: ids of added tokens, such as `<|im_end|>`, which a grammar may name.

    Raises:
        GrammarError: it is wrong or too large, or the library does not support it or misreads it.
    """
    from llguidance import LLMatcher

    if len(form.text) > MOST_CHARACTERS:
        size = f"{len(form.text)} characters; at most {MOST_CHARACTERS} are allowed"
        raise GrammarError(f"structured_outputs: the {form.kind} has {size}")
    try:
        grammar = write_grammar(form, marks)
    except GrammarError:
        raise
    except Exception as error:  # the library does not document what its parsers raise
        raise _cannot_compile(form, _first_line(error)) from None
    state = LLMatcher(tokens, grammar, log_level=0)
    if state.is_error():
        raise _cannot_compile(form, _reason(state))
    return state, grammar


def write_grammar(form: StructuredOutputs, marks: Mapping[str, int]) -> str:
    """Translate a constraint into the library's language; raises `GrammarError` or the library's errors."""
    from llguidance import LLMatcher

    if form.kind in ("json", "json_object"):
        schema = prepare(json.loads(form.text or '{"type": "object"}'), WHITE_SPACE)
        if isinstance(schema, Refused):
            raise _refused(form, *schema)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema))
    if form.kind == "regex":
        try:
            check_pattern(form.text)
        except PatternError as error:
            raise _refused(form, "", str(error)) from None
        return LLMatcher.grammar_from_regex(form.text)
    if form.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(quoted, json.loads(form.text))))
    try:
        return LLMatcher.grammar_from_lark(as_lark(form.text, marks))
    except (GbnfError, PatternError) as error:
        raise _refused(form, "", str(error)) from None


def as_lark(text: str, marks: Mapping[str, int]) -> str:
    """Translate a grammar, GBNF or Lark, into the library's dialect of Lark, with special tokens by number.

    Raises:
        GbnfError, PatternError: it is not valid; the message says where.
    """
    if re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE):
        return gbnf_to_lark(text)

    def written(found: re.Match) -> str:
        part = found[0]
        if part[0] == "<":
            return f"<[{marks[part]}]>" if part in marks else part
        if part[0] == "/" and part[1] != "/":
            try:
                scan(part[1:])
            except PatternError as error:
                raise PatternError(f"the expression {part} at {place(text, found.start())}: {error}") from None
        return part

    return LARK_PARTS.sub(written, text)


def quoted(text: str) -> str:
    """Escape a text as a regular expression for the library."""
    return "".join(c if c.isalnum() else rf"\u{{{ord(c):x}}}" for c in text)


def _cannot_compile(form: StructuredOutputs, reason: str) -> GrammarError:
    part = first_refused(json.loads(form.text)) if form.kind == "json" else None
    return _refused(form, part.pointer if part else "", reason)


def _refused(form: StructuredOutputs, pointer: str, reason: str) -> GrammarError:
    place = f" at {pointer}" if pointer else ""
    return GrammarError(f"structured_outputs: the {form.kind}{place} cannot be compiled ({reason})")


def _reason(state: LLMatcher) -> str:
    """Return the library's error without the dump of its state."""
    return _first_line(state.get_error()) or state.stop_reason()


def _first_line(error: Any) -> str:
    text = " ".join(str(error).partition("<state>")[0].split())
    return text if len(text) <= 300 else f"{text[:299]}…"


class WhenCompiled:
    """The order of arrival, without the requests whose constraints are still being compiled.

    Args:
        grammars: compile the constraints.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def candidates(self, waiting: Iterable[BatchSequence], limit: int, manager: BlockManager) -> list[BatchSequence]:
        """Return the first `limit` waiting sequences that can be admitted."""
        compiling: list[Future[Compiled]] = []
        found = list(islice((s for s in waiting if self._is_ready(s, compiling)), limit))
        if compiling and not found and not manager.num_used:  # nothing else can run
            wait(compiling, POLL_SECONDS, "FIRST_COMPLETED")
        return found

    def _is_ready(self, sequence: BatchSequence, compiling: list[Future[Compiled]]) -> bool:
        form = sequence.request.params.structured_outputs
        if form is None or (compiled := self._grammars.compile(form)).done():
            return True
        compiling.append(compiled)
        return False
