"""What a request with a form cannot ask for beside it, and whether the form can be compiled: at the door."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from beyond.structured.grammars import Grammars
from stage_a_naive.contract.outputs import SamplingFunction
from stage_a_naive.contract.params import SamplingParams
from stage_a_naive.contract.structured_outputs import GrammarError


class Refusal(NamedTuple):
    """Something that cannot be combined with `structured_outputs`."""

    other: str
    applies: Callable[[SamplingParams, SamplingFunction | None], bool]
    advice: str


REFUSED = (
    Refusal(
        "ignore_eos=True",
        lambda params, sampling_fn: params.ignore_eos,
        "an answer ends where its form ends; leave ignore_eos away",
    ),
    *(
        Refusal(
            name,
            lambda params, sampling_fn, name=name: bool(getattr(params, name)),
            f"it may forbid what the form needs next; leave {name} away",
        )
        for name in ("allowed_token_ids", "bad_words", "min_tokens")
    ),
    Refusal(
        "llm.sampling_fn",
        lambda params, sampling_fn: sampling_fn is not None,
        "another sampler may choose what the form forbids; set llm.sampling_fn = None",
    ),
)


def check_structured_outputs(
    grammars: Grammars, index: int, params: SamplingParams, sampling_fn: SamplingFunction | None
) -> None:
    """Check what a request asks for, and have its form compiled; the caller waits for that.

    Raises:
        GrammarError: it cannot be had; the message says why.
    """
    for refusal in REFUSED:
        if refusal.applies(params, sampling_fn):
            other = f"structured_outputs of prompt {index} cannot be combined with {refusal.other}"
            raise GrammarError(f"{other}: {refusal.advice}")
    grammars.start(params.structured_outputs)
