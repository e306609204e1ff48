"""Validate structured-output requests when they arrive: conflicts with other parameters, and compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from beyond.structured.grammars import Grammars
from stage_a_naive.contract.outputs import SamplingFunction
from stage_a_naive.contract.params import SamplingParams
from stage_a_naive.contract.structured_outputs import GrammarError


class Refusal(NamedTuple):
    """A parameter that cannot be combined with `structured_outputs`."""

    other: str
    applies: Callable[[SamplingParams, SamplingFunction | None], bool]
    advice: str


REFUSED = (
    Refusal(
        "ignore_eos=True",
        lambda params, sampling_fn: params.ignore_eos,
        "structured output decides where an answer ends; leave ignore_eos out",
    ),
    *(
        Refusal(
            name,
            lambda params, sampling_fn, name=name: bool(getattr(params, name)),
            f"it may forbid the tokens that structured output needs; leave {name} out",
        )
        for name in ("allowed_token_ids", "bad_words", "min_tokens")
    ),
    Refusal(
        "llm.sampling_fn",
        lambda params, sampling_fn: sampling_fn is not None,
        "another sampler may choose forbidden tokens; set llm.sampling_fn = None",
    ),
)


def check_structured_outputs(
    grammars: Grammars, index: int, params: SamplingParams, sampling_fn: SamplingFunction | None
) -> None:
    """Validate a structured-output request, and compile its constraint while the caller waits.

    Raises:
        GrammarError: it is not possible; the message says why.
    """
    for refusal in REFUSED:
        if refusal.applies(params, sampling_fn):
            other = f"structured_outputs of prompt {index} cannot be combined with {refusal.other}"
            raise GrammarError(f"{other}: {refusal.advice}")
    grammars.start(params.structured_outputs)
