"""Sampling parameters of one request, validated when they are made.

A wrong value raises an error here instead of producing a wrong text later. Values are stored as plain Python numbers:
NumPy integers and floats are accepted, booleans are not.
"""

from __future__ import annotations

import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from stage_a_naive.contract.errors import shown
from stage_a_naive.contract.structured_outputs import RULE, as_structured_outputs


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request. The names and meanings are vLLM's.

    Attributes:
        temperature: divides the logits; 0 is greedy decoding (exact argmax).
        top_k: keep the k highest logits (ties with the k-th stay); 0 keeps all.
        top_p: keep the most likely tokens until their probability reaches p (ties with the last stay); 1 keeps all.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL).
        presence_penalty: subtracted once from the logit of every token already generated.
        frequency_penalty: subtracted once per occurrence from the logit of every token already generated.
        logit_bias: a mapping of token ids to numbers from -100 to 100, which are added to their logits before the
            penalties: -100 excludes a token, 100 practically forces it. Log-probabilities do not include the bias.
        bad_words: texts that must not appear in the answer, each checked as the tokens of the word and of a space plus
            the word. The same text in other tokens is not found. None is no word.
        allowed_token_ids: the only tokens that may be chosen; this excludes even the end of the sequence. None allows
            all.
        min_tokens: no end-of-sequence id, stop token or stop string ends the answer before it has this many tokens.
        max_tokens: generate at most this many tokens.
        stop: strings that end the generation; the text is cut before them. None is no string.
        stop_token_ids: token ids that end the generation, in addition to the model's end-of-sequence ids. None is no
            id.
        include_stop_str_in_output: keep the stop string, or the text of the stop token, in the text.
        ignore_eos: continue after the model's end-of-sequence ids (for benchmarks).
        skip_special_tokens: leave special tokens out of the text.
        n: answers per prompt. They are consecutive in the list of outputs, and use the seeds `seed`, `seed + 1`, ….
        seed: makes the sampled tokens reproducible; None takes a fresh seed from the engine.
        logprobs: also return the log-probabilities of this many likeliest tokens and of the chosen one, at every step.
        prompt_logprobs: the same for every token of the prompt except the first, in a separate prefill.
        structured_outputs: what the answer must match, exactly one of `{"json": schema}`, `{"regex": text}`,
            `{"choice": [texts]}`, `{"grammar": text}` and `{"json_object": True}`. Only the engine of `beyond` supports
            it.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Any = ()  # a mapping or None; after the check, pairs of a token id and a number
    bad_words: Any = ()  # strings or None; after the check, a tuple of strings
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int = 64
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Any = None  # a mapping; after the check, a `StructuredOutputs`, or None

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Reject parameters that only vLLM has."""
        for name in UNSUPPORTED.keys() & given.keys():
            raise TypeError(f"{name} is not supported: {UNSUPPORTED[name]}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            if getattr(self, name) is not getattr(SamplingParams, name):  # a default needs no check
                check_field(self, name, *rule)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens, got {self.min_tokens} and {self.max_tokens}")

    @property
    def has_token_rules(self) -> bool:
        """Whether it changes the logits of single tokens: see `token_rules.py`."""
        return bool(self.logit_bias or self.bad_words or self.min_tokens or self.allowed_token_ids)

    @property
    def needs_tokens(self) -> bool:
        """Whether the choice of a token depends on earlier tokens."""
        return bool(self.bad_words) or self.needs_penalties

    @property
    def needs_penalties(self) -> bool:
        """Whether scores depend on how often each token was used."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def filters(self, vocab_size: int) -> bool:
        """Whether top-k, top-p or min-p can exclude a token of the vocabulary."""
        return 0 < self.top_k < vocab_size or self.top_p < 1 or self.min_p > 0


def check_field(
    params: object, name: str, convert: Callable[[Any], object], allowed: Callable[[Any], bool], rule: str
) -> None:
    """Replace a field of a frozen dataclass by its plain Python form, or raise `ValueError` if `rule` forbids it.

    `convert` returns None for a wrong type.
    """
    given = getattr(params, name)
    value = convert(given)
    if value is None or not allowed(value):
        raise ValueError(f"{name} must be {rule}, got {shown(given)}")
    object.__setattr__(params, name, value)


def as_boolean(value: object) -> bool | None:
    """Return `value` if it is True or False; None if it is anything else."""
    return value if isinstance(value, bool) else None


def as_integer(value: Any) -> int | None:
    """Return `value` as a Python integer; None if it is a boolean or no integer."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_number(value: object) -> float | None:
    """Return `value` as a Python float; None if it is a boolean, no real number, or not finite."""
    if isinstance(value, bool) or not isinstance(value, (float, int, numbers.Real)):
        return None
    try:
        number = float(value)
    except OverflowError:  # 10**400 is an integer, but no float
        return None
    return number if math.isfinite(number) else None


def _as_strings(value: Any) -> tuple[str, ...] | None:
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    strings = tuple(value) if isinstance(value, Iterable) else (value,)
    return strings if all(isinstance(s, str) for s in strings) else None


def _as_ids(value: object) -> tuple[int, ...] | None:
    if value is None:
        return ()
    ids: tuple[Any, ...] = (None,)
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        ids = tuple(map(as_integer, value))
    return None if None in ids else ids


def _as_bias(value: Any) -> tuple[tuple[int, float], ...] | None:
    if value is None:
        return ()
    if not isinstance(value, (Mapping, tuple)):
        return None
    try:  # JSON has ids as text
        given = dict(value).items()
        pairs: dict[Any, Any] = {int(i) if isinstance(i, str) else as_integer(i): as_number(bias) for i, bias in given}
    except (TypeError, ValueError):
        return None
    return None if None in pairs or None in pairs.values() else tuple(pairs.items())


MOST_ANSWERS = 2**14  # to one prompt

UNSUPPORTED = {  # vLLM's parameters that `SamplingParams` lacks, and what to do instead
    "best_of": "ask for n answers with logprobs=0, and keep the likeliest",
    "detokenize": "leave it out; token_ids are in every output",
    "extra_args": "set llm.sampling_fn, which chooses tokens from the logits",
    "flat_logprobs": "leave it out; logprobs are a dictionary for every token",
    "guided_decoding": "write structured_outputs={'json': …}",
    "logits_processors": "set llm.sampling_fn, which chooses tokens from the logits",
    "output_kind": "call stream, which yields the text in pieces",
    "spaces_between_special_tokens": "leave it out; special tokens are written as the tokenizer decodes them",
    "truncate_prompt_tokens": "shorten the prompt: llm.tokenizer.encode(text)[-limit:]",
    "use_beam_search": "sample n answers with logprobs=0, and keep the likeliest",
}

RULES = {  # for each field of `SamplingParams`: the conversion, the condition, and the condition in words
    "temperature": (as_number, lambda v: v >= 0, "a finite number, 0 or more"),
    "top_k": (as_integer, lambda v: v >= 0, "an integer, 0 (off) or more"),
    "top_p": (as_number, lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "min_p": (as_number, lambda v: 0 <= v <= 1, "between 0 and 1"),
    "repetition_penalty": (as_number, lambda v: v > 0, "a finite number above 0"),
    "presence_penalty": (as_number, lambda v: -2 <= v <= 2, "between -2 and 2"),
    "frequency_penalty": (as_number, lambda v: -2 <= v <= 2, "between -2 and 2"),
    "logit_bias": (
        _as_bias,
        lambda v: all(i >= 0 and abs(bias) <= 100 for i, bias in v),
        "token ids, 0 or more, each with a number from -100 to 100",
    ),
    "bad_words": (_as_strings, lambda v: all(map(str.strip, v)), "one or more strings that are not blank"),
    "allowed_token_ids": (_as_ids, lambda v: v and min(v) >= 0, "None, or one or more integers, 0 or more"),
    "min_tokens": (as_integer, lambda v: v >= 0, "an integer, 0 or more"),
    "max_tokens": (as_integer, lambda v: v >= 1, "an integer, 1 or more"),
    "stop": (_as_strings, all, "one or more non-empty strings"),
    "stop_token_ids": (_as_ids, lambda v: all(i >= 0 for i in v), "integers, 0 or more"),
    "include_stop_str_in_output": (as_boolean, lambda v: True, "True or False"),
    "ignore_eos": (as_boolean, lambda v: True, "True or False"),
    "skip_special_tokens": (as_boolean, lambda v: True, "True or False"),
    "n": (as_integer, lambda v: 1 <= v <= MOST_ANSWERS, f"an integer from 1 to {MOST_ANSWERS}"),
    "seed": (as_integer, lambda v: 0 <= v < 2**64, f"None, or an integer from 0 to {2**64 - 1}"),
    "logprobs": (as_integer, lambda v: 0 <= v < 2**31, f"None, or an integer from 0 to {2**31 - 1}"),
    "prompt_logprobs": (as_integer, lambda v: 0 <= v < 2**31, f"None, or an integer from 0 to {2**31 - 1}"),
    "structured_outputs": (as_structured_outputs, lambda v: True, RULE),
}


def check_sampling_fn(sampling_fn: object) -> None:
    """Raise `ValueError` if `sampling_fn` cannot be called with logits and parameters, e.g. takes only a tensor."""
    if not callable(sampling_fn):
        raise ValueError(f"sampling_fn must be None or a function fn(logits, params), got {shown(sampling_fn)}")
    try:
        parameters = list(inspect.signature(sampling_fn).parameters.values())
    except ValueError:  # a C function without a signature
        return
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return
    second = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:2]
    # A second parameter whose default is a number, as in nucleus(logits, p=0.9), is not for a list of parameters.
    if not second or as_number(second[0].default) is not None:
        raise ValueError(
            "sampling_fn is called as fn(logits, params), with one SamplingParams per row, and this one takes logits "
            "alone; set llm.sampling_fn = lambda logits, params: your_function(logits)"
        )
