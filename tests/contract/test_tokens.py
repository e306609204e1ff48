"""Every engine's greedy tokens are stage A's, whatever it does to be fast."""

from __future__ import annotations

import pytest

from contract.engines import GREEDY as GREEDY
from contract.engines import PROMPTS, ask, finish


def test_greedy_tokens_are_stage_as_with_and_without_a_cached_prefix(engine, llm, expected) -> None:
    for _ in range(2):
        assert ask(llm, PROMPTS) == expected
    outputs = llm.generate([PROMPTS[4]] * 3, GREEDY, False)
    assert [output["token_ids"] for output in outputs] == [expected[4]] * 3
    cached = [output["metrics"]["num_cached_tokens"] for output in outputs]
    assert cached == [40] * 3 if "pool" in engine.has else cached == [0] * 3, "48 tokens, and the last block runs again"


def test_an_answer_ends_where_the_model_does(llm) -> None:
    [output] = llm.generate([[9] * (llm.max_model_len - 3)], GREEDY, False)
    assert len(output["token_ids"]) == 3 and output["finish_reason"] == "length"


@pytest.mark.needs("pool")
def test_requests_are_added_and_stepped_from_stage_d_on(llm, expected) -> None:
    added = [llm.add_request(prompt, GREEDY) for prompt in (*PROMPTS[:3], {"prompt_token_ids": PROMPTS[3]})]
    outputs = finish(llm)
    assert [outputs[request] for request in added] == expected[:4]
    assert llm.step() == ([], 0)
