"""A bad request is refused by name, alone, before anything runs."""

from __future__ import annotations

import pytest

from contract.engines import GREEDY, PROMPTS, ask
from stage_a_naive import SamplingParams

BAD = {
    "an empty text": (["a", ""], GREEDY, "prompt 1 is empty"),
    "an empty list": ([PROMPTS[0], []], GREEDY, "prompt 1 is empty"),
    "a token beyond the vocabulary": (
        [[5], [4096]],
        GREEDY,
        "prompt 1: token id 4096 is outside the vocabulary of 4096",
    ),
    "a token below 0": ([[-1]], GREEDY, "token id -1"),
    "a bias beyond the vocabulary": (
        ["a"],
        SamplingParams(logit_bias={5: 1, 4096: 1}),
        "logit_bias of prompt 0: token id 4096 is outside the vocabulary of 4096",
    ),
    "an allowed token beyond the vocabulary": (
        ["a"],
        SamplingParams(allowed_token_ids=[4096, 3]),
        "allowed_token_ids of prompt 0: token id 4096 is outside the vocabulary of 4096",
    ),
    "nothing that is allowed and not forbidden": (
        ["a", "b"],
        [GREEDY, SamplingParams(allowed_token_ids=[70, 71], min_tokens=2, stop_token_ids=[71, 70])],
        "allowed_token_ids of prompt 1 has only tokens that min_tokens or bad_words may forbid; allow one more",
    ),
    "a long prompt": ([[7] * 4096], GREEDY, r"prompt 0 has 4096 tokens; .* at most \d+ fit"),
    "one list of tokens": ([1, 2], GREEDY, "wrap it in a list"),
    "bytes": (b"abc", GREEDY, "bytes first"),
    "a dictionary": ([{"text": "abc"}], GREEDY, "prompt 0: a dictionary has 'prompt'"),
    "too few parameters": (["a", "b", "c"], [GREEDY], "3 prompts but 1 sampling parameters"),
    "a text for parameters": ("a", "greedy", "sampling_params is a SamplingParams, .* got 'greedy'"),
    "a dictionary for parameters": ("a", {"temperature": 0}, "sampling_params is a SamplingParams"),
    "a number for parameters": ("a", 3, "sampling_params is a SamplingParams"),
    "texts for parameters": (["a"], ["greedy"], "expected SamplingParams"),
}


@pytest.mark.parametrize(("prompts", "params", "says"), BAD.values(), ids=BAD)
def test_a_bad_request_is_refused_by_name_before_anything_runs(llm, prompts, params, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        llm.generate(prompts, params, False)
    assert "\n" not in str(caught.value)


def test_a_bad_message_is_refused_and_the_engine_goes_on(llm, expected) -> None:
    with pytest.raises(ValueError, match="content of a message is text"):
        llm.chat([{"role": "user", "content": None}], GREEDY, False)
    assert ask(llm, PROMPTS[:1]) == expected[:1]


@pytest.mark.needs("pool", "one process")
def test_max_model_len_is_the_limit_of_a_prompt_and_of_its_answer(engine) -> None:
    with engine.made(max_model_len=20) as llm:
        [output] = llm.generate([[7] * 15], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True), False)
        assert output["finish_reason"] == "length" and len(output["token_ids"]) == 5
        with pytest.raises(ValueError, match="at most 19 fit"):
            llm.generate([[7] * 20], GREEDY, False)


@pytest.mark.needs("pool", "one process")
def test_max_model_len_is_lowered_to_the_models_positions_in_one_line(engine, capfd) -> None:
    with engine.made(max_model_len=5000, num_kvcache_blocks=4) as llm:
        assert llm.max_model_len == 4096
    said = capfd.readouterr().err
    assert said.count("max_model_len=5000 is lowered to 4096") >= 1 and "attention: reference" in said
