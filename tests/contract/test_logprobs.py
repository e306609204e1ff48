"""Log-probabilities of the chosen token and of the likeliest ones."""

from __future__ import annotations

import pytest

from contract.engines import PROMPTS
from stage_a_naive import SamplingParams


def test_logprobs_are_the_same_alone_and_beside_one_that_asks_for_more(llm) -> None:
    counts = (1, 9, None, 0, 3)
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=count) for count in counts]
    outputs = llm.generate(PROMPTS, params, False)
    assert ["logprobs" in output for output in outputs] == [True, True, False, True, True]
    for prompt, asked, output in zip(PROMPTS, params, outputs, strict=True):
        if asked.logprobs is not None:
            [alone] = llm.generate([prompt], asked, False)
            for step, same in zip(output["logprobs"], alone["logprobs"], strict=True):
                assert list(step) == list(same) and step == pytest.approx(same, abs=1e-4)
            assert all(token in step for token, step in zip(output["token_ids"], output["logprobs"], strict=True))
