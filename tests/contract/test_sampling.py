"""Every engine samples stage A's tokens: with a seed, at the edges of the parameters, and in any mixture."""

from __future__ import annotations

import pytest

from contract.engines import GREEDY, PROMPTS, SEEDED, ask, mixture, one_by_one
from stage_a_naive import SamplingParams

MIXTURES = [mixture(seed) for seed in range(4)]


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


@pytest.mark.needs("exact", "side by side", "one process")
@pytest.mark.parametrize("most", [1, 3])
def test_requests_that_wait_for_a_row_of_counts_get_the_same_tokens(engine, right_mixtures, most: int) -> None:
    with engine.made(max_num_penalty_seqs=most, max_num_seqs=6) as llm:
        check(llm, right_mixtures)
