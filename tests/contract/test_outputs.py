"""What an output says of its request."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from contract.engines import GREEDY, PROMPTS, SEEDED, SHORT_CHAT, ask, finish, listener
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


def test_the_time_to_first_token_begins_before_the_prompt_is_tokenized(llm, monkeypatch) -> None:
    encode = llm.encode

    def slow(*given: object) -> list[int]:
        time.sleep(0.05)
        return encode(*given)

    monkeypatch.setattr(llm, "encode", slow)
    one = replace(GREEDY, max_tokens=1)
    for [output] in (llm.generate("hello", one, False), llm.chat(SHORT_CHAT, one, False)):
        assert output["metrics"]["ttft"] - output["metrics"]["prefill_time"] > 0.05


def test_a_chat_ends_with_the_models_end_which_is_not_in_the_text(tutor) -> None:
    [output] = tutor.chat(SHORT_CHAT, SamplingParams(temperature=0, max_tokens=64), False)
    assert output["finish_reason"] == "stop" and output["token_ids"][-1] in tutor.eos_token_ids
    assert output["text"].startswith("A ") and output["text"].endswith(".")


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


def test_several_answers_to_a_prompt_follow_one_another_and_have_seeds_of_their_own(llm) -> None:
    several = replace(SEEDED[1], n=3)
    outputs = llm.generate(PROMPTS[:3], [GREEDY, several, replace(several, n=2, temperature=0)], False)
    assert [(o["prompt_index"], o["index"]) for o in outputs] == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert [o["prompt_token_ids"] for o in outputs] == [PROMPTS[o["prompt_index"]] for o in outputs]
    alone = [replace(SEEDED[1], seed=SEEDED[1].seed + i) for i in range(3)]
    assert [o["token_ids"] for o in outputs[1:4]] == ask(llm, [PROMPTS[1]] * 3, alone)
    assert outputs[4]["token_ids"] == outputs[5]["token_ids"] == ask(llm, PROMPTS[2:3])[0]
    heard, listen = listener(3)
    texts = [o["text"] for o in llm.generate(PROMPTS[1:2], several, False, listen)]
    assert heard == texts == [o["text"] for o in outputs[1:4]]


def test_answers_without_a_seed_differ(llm) -> None:
    found = ask(llm, "a", SamplingParams(temperature=2.0, max_tokens=10, n=3))
    assert len({tuple(ids) for ids in found}) == 3


@pytest.mark.needs("pool")
def test_what_gives_one_answer_refuses_several(llm) -> None:
    with pytest.raises(ValueError, match="n=2 answers to one prompt are what generate and chat give"):
        llm.add_request(PROMPTS[0], replace(GREEDY, n=2))
    if hasattr(llm, "stream"):
        with pytest.raises(ValueError, match="n=2 answers"):
            llm.stream("a", replace(GREEDY, n=2))
        pieces = list(llm.stream(["a"], replace(GREEDY, n=2)))
        assert {index for index, _ in pieces} == {0, 1}


@pytest.mark.needs("exact", "one process")
def test_log_probabilities_of_a_prompt_are_those_of_the_model(llm, naive) -> None:
    ask(llm, PROMPTS)  # now a prefix cache has their blocks
    params = [replace(GREEDY, max_tokens=1, prompt_logprobs=count) for count in (None, 0, 2, 4096)]
    outputs = llm.generate(PROMPTS[:4], [*params[:3], replace(params[3], n=2)], False)
    assert "prompt_logprobs" not in outputs[0]
    assert outputs[3]["prompt_logprobs"] == outputs[4]["prompt_logprobs"]
    for output, count in zip(outputs[1:], (0, 2, 4096, 4096), strict=True):
        ids, (first, *told) = output["prompt_token_ids"], output["prompt_logprobs"]
        with torch.inference_mode():
            right = naive.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert first is None and len(told) == len(ids) - 1
        for one, row, token_id in zip(told, right, ids[1:], strict=False):
            assert set(one) == {token_id, *row.topk(count).indices.tolist()}
            assert list(one.values()) == pytest.approx(row[list(one)].tolist(), abs=1e-3)


@pytest.mark.needs("pool", "one process")
def test_a_prompt_is_scored_when_a_request_that_was_added_has_given_its_blocks_back(engine) -> None:
    prompt, params = [7] * 31, replace(GREEDY, max_tokens=1, prompt_logprobs=1)
    with engine.made(num_kvcache_blocks=8, max_num_batched_tokens=64, max_num_seqs=4) as llm:
        [alone] = llm.generate([prompt], params, False)
        number = llm.add_request([5] * 10, replace(GREEDY, max_tokens=20))
        [beside] = llm.generate([prompt], params, False)
        assert [list(one or ()) for one in beside["prompt_logprobs"]] == [
            list(one or ()) for one in alone["prompt_logprobs"]
        ]
        assert len(finish(llm)[number]) == 20


def test_engines_of_several_ranks_refuse_to_score_a_prompt(engine, llm) -> None:
    params = replace(GREEDY, prompt_logprobs=1)
    if "one process" in engine.has:
        assert len(llm.generate([PROMPTS[0]], params, False)[0]["prompt_logprobs"]) == len(PROMPTS[0])
    else:
        with pytest.raises(ValueError, match="prompt_logprobs: an engine with .*_parallel_size=2 cannot score prompts"):
            llm.generate([PROMPTS[0]], params, False)
