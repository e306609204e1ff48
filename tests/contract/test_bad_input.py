"""A bad request is refused by name, alone, before anything runs."""

from __future__ import annotations

import pytest

from contract.engines import GREEDY, ids


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        (["a", ""], GREEDY, "prompt 1 is empty"),
        ([[5], [4096]], GREEDY, "prompt 1: token id 4096 is outside the vocabulary of 4096"),
        ([[7] * 4096], GREEDY, r"prompt 0 has 4096 tokens; .* at most \d+ fit"),
        ([1, 2], GREEDY, "wrap it in a list"),
        (b"abc", GREEDY, "bytes first"),
        ([{"text": "abc"}], GREEDY, "prompt 0: a dictionary has 'prompt'"),
        (["a", "b", "c"], [GREEDY], "3 prompts but 1 sampling parameters"),
        ("a", "greedy", "sampling_params is a SamplingParams"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_request_is_refused_by_name_before_anything_runs(llm, prompts, params, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        llm.generate(prompts, params, False)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="content of a message is text"):
        llm.chat([{"role": "user", "content": None}], GREEDY, False)
    assert len(ids(llm.generate("hello", GREEDY, False))) == 1, "a string is one prompt"
