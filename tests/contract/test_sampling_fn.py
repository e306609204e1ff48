"""A replaced sampler: what it is asked, which requests it belongs to, and what it may do wrong."""

from __future__ import annotations

import pytest
import torch

from contract.engines import GREEDY, PROMPTS, SEEDED, ids
from stage_a_naive import SamplingParams


def fail(*_: object) -> None:
    raise LookupError("stop here")


def outside(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    return torch.full((len(params),), logits.shape[-1])


@pytest.mark.parametrize(
    ("sampler", "error", "says"),
    [
        (fail, LookupError, "stop here"),
        (outside, ValueError, "token id 4096, outside the vocabulary of 4096"),
        (lambda logits, params: logits, ValueError, "must return a tensor of integer ids of shape"),
        (lambda logits, params: logits.argmax(-1).tolist(), ValueError, r"integer ids of shape \[\d\], got \[\d+"),
        (lambda logits, params: None, ValueError, r"integer ids of shape \[\d\], got None"),
    ],
    ids=["raises", "outside the vocabulary", "no ids", "a list", "nothing"],
)
def test_what_a_sampler_does_wrong_is_named_and_the_next_call_is_right(llm, expected, sampler, error, says) -> None:
    llm.sampling_fn = sampler
    try:
        with pytest.raises(error, match=says) as caught:
            llm.generate(PROMPTS[:2], GREEDY, False)
    finally:
        llm.sampling_fn = None
    assert "\n" not in str(caught.value)
    assert ids(llm.generate(PROMPTS[:2], GREEDY, False)) == expected[:2]


def test_a_replaced_sampler_is_asked_with_float32_logits_and_one_parameter_a_row(llm, expected: list) -> None:
    seen = []

    def best(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        seen.append((logits.dtype, logits.shape == (len(params), 4096), set(params)))
        return logits.argmax(-1)

    llm.sampling_fn = best
    try:
        assert ids(llm.generate(PROMPTS, SEEDED[0], False)) == expected
    finally:
        llm.sampling_fn = None
    assert all(asked == (torch.float32, True, {SEEDED[0]}) for asked in seen) and seen
