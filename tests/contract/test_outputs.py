"""What an output says of its request."""

from __future__ import annotations

import pytest

from contract.engines import CHATS, GREEDY, PROMPTS, ask
from stage_a_naive import SamplingParams
from stage_a_naive.contract.outputs import Metrics


def test_an_output_has_every_field_and_its_metrics_agree(llm) -> None:
    few = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 1, 2)]
    for prompt, n, output in zip(PROMPTS[:3], (3, 1, 2), llm.generate(PROMPTS[:3], few, False), strict=True):
        assert set(output) == {
            "prompt_index",
            "index",
            "text",
            "token_ids",
            "prompt_token_ids",
            "finish_reason",
            "metrics",
        }
        assert output["prompt_token_ids"] == prompt and output["finish_reason"] == "length"
        metrics = output["metrics"]
        assert set(metrics) == set(Metrics.__annotations__)
        assert metrics["num_generated_tokens"] == len(output["token_ids"]) == n
        assert metrics["num_prompt_tokens"] == len(prompt) > metrics["num_cached_tokens"]
        assert 0 < metrics["prefill_time"] <= metrics["ttft"] and (metrics["tpot"] > 0) == (n > 1)
        assert metrics["tpot"] == (pytest.approx(metrics["decode_time"] / (n - 1)) if n > 1 else 0)
        total = metrics["prefill_time"] + metrics["decode_time"]
        assert metrics["tokens_per_sec"] == pytest.approx(n / total)


def test_a_chat_ends_with_the_models_end_which_is_not_in_the_text(tutor) -> None:
    [output] = tutor.chat(CHATS[0], SamplingParams(temperature=0, max_tokens=256), False)
    assert output["finish_reason"] == "stop" and output["token_ids"][-1] in tutor.eos_token_ids
    assert "key" in output["text"].lower() and "<|" not in output["text"]


def test_one_string_is_one_prompt_and_token_ids_are_taken_as_they_are(llm) -> None:
    [output] = llm.generate("hello", GREEDY, False)
    assert ask(llm, [output["prompt_token_ids"]]) == [output["token_ids"]]
    assert llm.generate([], GREEDY, False) == []


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
