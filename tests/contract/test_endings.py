"""Requests of a batch end for different reasons, at different tokens, and none ends another."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from contract.engines import CHATS, GREEDY, PROMPTS, ask, ids, listener, sampler
from stage_a_naive import SamplingParams

OTHER_EOS = 77  # named in generation_config.json, unknown to the tokenizer


def scripted(scripts: list[list[int]]) -> Callable:
    """A sampler that gives each request, identified by its seed, its script's tokens, and then the last again."""
    calls: Counter[int] = Counter()

    def choose(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        chosen = []
        for seed in (p.seed for p in params):
            chosen.append(scripts[seed][min(calls[seed], len(scripts[seed]) - 1)])
            calls[seed] += 1
        return torch.tensor(chosen, device=logits.device)

    return choose


@pytest.mark.needs("one process")
@pytest.mark.parametrize("listens", [False, True], ids=["at the end", "streamed"])
def test_each_row_ends_for_its_own_reason(engine, tutor_copy: Path, listens: bool) -> None:
    (tutor_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [OTHER_EOS]}))
    with engine.made(tutor_copy) as llm:
        words = llm.tokenizer.encode("A cache keeps keys and values")
        decoded = [llm.tokenizer.decode([word]) for word in words]
        across = decoded[2][-1] + decoded[3][0]  # no single token holds it
        assert not any(across in text for text in decoded)
        eos = llm.tokenizer.eos_token_id
        asked = [
            ([eos], {}),
            ([OTHER_EOS], {}),
            ([*words[:2], OTHER_EOS], {}),
            (words, {"stop": across}),
            (words, {"stop_token_ids": (words[1],)}),
            ([eos, *words], {"ignore_eos": True, "max_tokens": 5}),
            (words, {"max_tokens": 5}),
        ]
        scripts = [script for script, _ in asked]
        params = [SamplingParams(seed=i, **options) for i, (_, options) in enumerate(asked)]
        heard, listen = listener(len(asked))
        prompts = [[5 + i] * (3 + i) for i in range(len(asked))]
        with sampler(llm, scripted(scripts)):
            outputs = llm.generate(prompts, params, False, listen if listens else None)
    lengths = [1, 1, 3, 4, 2, 5, 5]
    assert ids(outputs) == [script[:n] for script, n in zip(scripts, lengths, strict=True)]
    assert [o["finish_reason"] for o in outputs] == ["stop"] * 5 + ["length"] * 2
    assert [o.get("stop_reason") for o in outputs] == [None, None, None, across, words[1], None, None]
    texts = [o["text"] for o in outputs]
    assert texts[:2] == ["", ""] and texts[4] == decoded[0], "the text of what stops an answer is left out"
    assert texts[3] == "".join(decoded[:4]).partition(across)[0]
    if listens:
        assert heard == texts


@pytest.mark.parametrize("room", [1, 3])
def test_an_answer_ends_where_the_model_does(llm, room: int) -> None:
    [output] = llm.generate([[9] * (llm.max_model_len - room)], GREEDY, False)
    assert len(output["token_ids"]) == room and output["finish_reason"] == "length"


@pytest.mark.parametrize("end", [0, 4, 6, 8])
def test_a_stop_token_ends_an_answer_at_that_token_and_the_others_go_on(llm, expected, end: int) -> None:
    at = expected[1].index(expected[1][end])  # the first time that this token comes
    params = [GREEDY, replace(GREEDY, stop_token_ids=(expected[1][end],))]
    outputs = llm.generate(PROMPTS[:2], params, False)
    assert ids(outputs) == [expected[0], expected[1][: at + 1]]
    assert [output["finish_reason"] for output in outputs] == ["length", "stop"]
    assert outputs[1]["metrics"]["num_generated_tokens"] == at + 1


def test_requests_that_end_one_after_another_change_no_token_of_the_others(llm, expected) -> None:
    params = [replace(GREEDY, max_tokens=n) for n in (1, 10, 3, 7, 2)]
    assert ask(llm, PROMPTS, params) == [ids[: p.max_tokens] for ids, p in zip(expected, params, strict=True)]


@pytest.mark.parametrize("listens", [False, True], ids=["at the end", "streamed"])
def test_the_text_keeps_the_stop_string_or_token_where_it_is_asked_to(tutor, listens: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    [free] = tutor.chat(CHATS[0], params, False)
    ids, text = free["token_ids"], free["text"]
    stop = text[9:14]
    assert text.find(stop) == 9
    asked = [{"stop": stop}, {"stop": [stop[1:], stop]}, {"stop": [stop, stop[:3]]}, {"stop_token_ids": ids[5:6]}]
    kept = [replace(params, include_stop_str_in_output=True, **one) for one in asked]
    heard, listen = listener(5)
    outputs = tutor.chat([CHATS[0]] * 5, [*kept, replace(params, stop=stop)], False, listen if listens else None)
    first = ids.index(ids[5])
    wanted = [text[:14], text[:14], text[:12], tutor.tokenizer.decode(ids[: first + 1]), text[:9]]
    assert [output["text"] for output in outputs] == wanted
    assert [output["stop_reason"] for output in outputs] == [stop, stop, stop[:3], ids[5], stop]
    if listens:
        assert heard == wanted


@pytest.mark.parametrize("listens", [False, True], ids=["at the end", "streamed"])
def test_the_text_has_special_tokens_where_it_is_asked_to(tutor, listens: bool) -> None:
    eos = tutor.tokenizer.eos_token_id
    [word] = tutor.tokenizer.encode("a")
    script = [word, eos, word, eos]
    params = SamplingParams(seed=0, max_tokens=9, ignore_eos=True, skip_special_tokens=False)
    asked = [
        replace(params, max_tokens=4),
        replace(params, max_tokens=4, skip_special_tokens=True),
        replace(params, ignore_eos=False, min_tokens=3, include_stop_str_in_output=True),
        replace(params, ignore_eos=False, min_tokens=3),
        replace(params, stop=tutor.tokenizer.eos_token),
        replace(params, stop=tutor.tokenizer.eos_token, skip_special_tokens=True),
        replace(params, stop=tutor.tokenizer.eos_token, ignore_eos=False),
    ]
    heard, listen = listener(7)
    asked = [replace(one, seed=i) for i, one in enumerate(asked)]
    with sampler(tutor, scripted([script] * 7)):
        outputs = tutor.generate(["x"] * 7, asked, False, listen if listens else None)
    end = tutor.tokenizer.eos_token
    assert [output["text"] for output in outputs] == [f"a{end}a{end}", "aa", f"a{end}a{end}", f"a{end}a", "a", "a", "a"]
    assert [output["finish_reason"] for output in outputs] == ["length", "length"] + ["stop"] * 5
    assert [output.get("stop_reason") for output in outputs] == [None] * 4 + [end, end, None]
    if listens:
        assert heard == [output["text"] for output in outputs]
