"""Every engine samples stage A's tokens: with a seed, at the edges of the parameters, and in any mixture."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from contract.engines import GREEDY, PROMPTS, SEEDED, ask, mixture, one_by_one
from stage_a_naive import SamplingParams

MIXTURES = [mixture(seed) for seed in range(2)]


def test_a_seeded_request_is_the_same_alone_and_in_company(engine, llm, naive) -> None:
    alone = one_by_one(llm, SEEDED)
    assert ask(llm, PROMPTS, SEEDED) == alone
    if "exact" in engine.has:
        assert alone == ask(naive, PROMPTS, SEEDED)


@pytest.mark.parametrize(
    "extreme",
    [{"temperature": 5e-324}, {"top_p": 5e-324}, {"temperature": 1e-30, "top_k": 10**6, "top_p": 1e-40}, {"min_p": 1}],
    ids=str,
)
def test_the_narrowest_choice_is_the_best_token(llm, expected: list, extreme: dict) -> None:
    params = [GREEDY, SamplingParams(seed=1, max_tokens=10, ignore_eos=True, **extreme)]
    assert ask(llm, PROMPTS[:2], params) == expected[:2]


def tokens(outputs: list) -> list[tuple]:
    """The tokens of each answer, and those whose log-probabilities are reported."""
    return [(o["token_ids"], [list(step) for step in o.get("logprobs", [])]) for o in outputs]


@pytest.fixture(scope="session")
def right_mixtures(naive) -> list[list[tuple]]:
    return [tokens(naive.generate(prompts, params, False)) for prompts, params in MIXTURES]


def check(llm, right_mixtures: list[list[tuple]]) -> None:
    for (prompts, params), right in zip(MIXTURES, right_mixtures, strict=True):
        found = tokens(llm.generate(prompts, params, False))
        assert [p for p, a, b in zip(params, found, right, strict=True) if a != b] == []


@pytest.mark.needs("exact")
def test_requests_of_any_mixture_get_stage_as_tokens(llm, right_mixtures) -> None:
    check(llm, right_mixtures)


@pytest.mark.needs("exact", "penalty rows")
@pytest.mark.parametrize("most", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_requests_that_wait_for_a_row_of_counts_get_the_same_tokens(
    engine, right_mixtures, most: int, tmp_path
) -> None:
    with engine.made(max_num_penalty_seqs=most, max_num_seqs=6, trace=tmp_path / "trace.jsonl") as llm:
        check(llm, right_mixtures)
    steps = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    penalised = {i for i, params in enumerate(p for _, group in MIXTURES for p in group) if params.needs_penalties}
    running = [sum(entry["id"] in penalised for entry in step["sequences"]) for step in steps]
    assert max(running) == most, "no more than have a row, and never fewer without need"


def test_a_bias_of_100_leaves_no_other_token_and_of_minus_100_keeps_it_out(llm, expected) -> None:
    kept_out = replace(GREEDY, logit_bias=dict.fromkeys(expected[1], -100))
    params = [GREEDY, kept_out, replace(GREEDY, logit_bias={"7": 100}), replace(SEEDED[3], logit_bias={7: 100})]
    greedy, other, *sevens = ask(llm, PROMPTS[:1] + PROMPTS[1:2] * 3, params)
    assert greedy == expected[0] and not set(other) & set(expected[1])
    assert sevens == [[7] * len(one) for one in sevens]


def test_log_probabilities_are_those_of_the_model_without_a_bias(llm) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=3)
    biased = replace(params, logit_bias={7: 100})
    one, other = (output["logprobs"][0] for output in llm.generate([PROMPTS[0]] * 2, [params, biased], False))
    assert list(other) == [*list(one)[:3], 7] and other[7] < min(one.values())
    assert {i: other[i] for i in one} == pytest.approx(one, abs=1e-4)


@pytest.mark.needs("one process")
def test_unseeded_requests_differ_from_each_other_but_repeat_with_the_engines_seed(engine) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=10)
    found = []
    for seed in (5, 5, 6):  # the tutor's weights do not depend on it
        with engine.made("tutor", seed=seed) as llm:
            found.append(ask(llm, ["a", "a"], params))
    assert found[0] == found[1] != found[2] and found[0][0] != found[0][1]


def test_another_seed_gives_another_text(llm) -> None:
    one, two = (SamplingParams(temperature=1.0, max_tokens=10, seed=seed) for seed in (0, 1))
    assert ask(llm, "abc", one) == ask(llm, "abc", one) != ask(llm, "abc", two)


@pytest.mark.gpu
@pytest.mark.needs("one process")
def test_a_seeded_request_is_the_same_on_cpu_and_gpu(engine) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, seed=4)
    with engine.made("tutor", dtype="float32") as on_cpu, engine.made("tutor", device="cuda", dtype="float32") as llm:
        assert ask(llm, "What is prefill?", params) == ask(on_cpu, "What is prefill?", params)
