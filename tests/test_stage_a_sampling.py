"""Sampling: validation, every filter against transformers' own, penalties, and reproducible draws."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stage_a_naive.contract.filters import STEPS, cut_off, filter_logits, weights
from stage_a_naive.contract.logprobs import top_logprobs
from stage_a_naive.contract.noise import gumbel_from_bits, gumbel_noise
from stage_a_naive.contract.params import RULES, SamplingParams
from stage_a_naive.contract.penalties import apply_penalties
from stage_a_naive.sampling import sample

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")
SMALLEST = 5e-324  # the smallest positive float; float32 has none below 1.4e-45


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", -3),
        ("max_tokens", 0),
        ("max_tokens", 1.0),
        ("stop", ("", "x")),
        ("stop", (3,)),
        ("stop_token_ids", (-1,)),
        pytest.param("temperature", 10**400, id="beyond floats"),
        ("temperature", True),
        ("max_tokens", True),
        pytest.param("max_tokens", -(10**5000), id="5000 digits"),
        ("stop", b"x"),
        ("stop_token_ids", 3),
        ("stop_token_ids", (1.0,)),
        ("logit_bias", {7: 100.5}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {7: "1"}),
        ("logit_bias", (1, 2)),
        ("bad_words", [" "]),
        ("bad_words", 3),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("min_tokens", -1),
        ("min_tokens", 65),
        ("include_stop_str_in_output", 1),
        ("skip_special_tokens", None),
        ("n", 0),
        ("n", 2**14 + 1),
        ("prompt_logprobs", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", -1),
        ("ignore_eos", 1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be") as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 160


@pytest.mark.parametrize("name", ["best_of", "logits_processors", "truncate_prompt_tokens", "detokenize"])
def test_parameters_that_only_vllm_has_are_refused_by_name_with_advice(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} is not supported: .*") as caught:
        SamplingParams(temperature=0, **{name: 1})
    assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'top_x'"):
        SamplingParams(top_x=1)


def test_the_ends_of_a_range_are_in_it_and_parameters_are_frozen() -> None:
    SamplingParams(min_p=1, presence_penalty=-2, frequency_penalty=-2, max_tokens=1, seed=2**64 - 1, logprobs=0)
    params = SamplingParams(temperature=0, top_p=1, min_p=0, presence_penalty=2, frequency_penalty=2, seed=0)
    with pytest.raises(AttributeError):
        params.temperature = 0.5


def test_every_field_has_a_rule_and_a_default_that_it_allows() -> None:
    """So a default need not be checked again whenever parameters are made."""
    for field in fields(SamplingParams):
        convert, allowed, _ = RULES[field.name]
        assert field.default is None or (convert(field.default) == field.default and allowed(field.default))


def test_vllms_spellings_and_numpys_numbers_are_understood() -> None:
    params = SamplingParams(
        np.float32(0.5), np.int64(3), stop=None, stop_token_ids=None, max_tokens=np.int32(7), seed=np.uint64(5)
    )
    assert params == SamplingParams(0.5, 3, stop=(), stop_token_ids=(), max_tokens=7, seed=5)
    assert type(params.max_tokens) is int and type(params.temperature) is float
    assert SamplingParams(stop_token_ids=np.array([1, 2])).stop_token_ids == (1, 2)
    assert SamplingParams(logit_bias={"5": 1, np.int64(7): -100}).logit_bias == ((5, 1.0), (7, -100.0))
    assert SamplingParams(logit_bias=None).logit_bias == SamplingParams(logit_bias={}).logit_bias == ()
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b") and SamplingParams(stop="end").stop == ("end",)


@examples(20)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 40, 400]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_the_filters_leave_the_distribution_that_transformers_leaves(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed)) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p > 0:
        expected = MinPLogitsWarper(min_p)(None, expected)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    torch.testing.assert_close(filter_logits(logits[0], params).softmax(-1), expected[0].softmax(-1))


def test_ties_at_the_edge_of_top_k_all_stay_and_a_k_beyond_the_vocabulary_keeps_all() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 0.0])
    assert torch.isfinite(filter_logits(logits, SamplingParams(top_k=2))).tolist() == [True, True, True, False]
    assert torch.isfinite(filter_logits(logits, SamplingParams(top_k=99))).all()


def test_no_token_stays_once_the_likelier_ones_have_exactly_top_p() -> None:
    logits = torch.tensor([0.0, 0.0, -1.0, -1.0])
    kept = torch.isfinite(filter_logits(logits, SamplingParams(top_p=1 / (1 + math.exp(-1)) - 1e-6)))
    assert kept.tolist() == [True, True, False, False]
    kept = torch.isfinite(filter_logits(logits, SamplingParams(top_p=1 / (1 + math.exp(-1)) + 1e-6)))
    assert kept.all(), "equals at the edge all stay"
    half = next(d for d in range(23_258_000, 23_259_000) if weights(torch.tensor(d)) == 2**39)
    assert cut_off(torch.tensor([0, half, half]), SamplingParams(top_p=0.5)) == 0, "the first has exactly one half"


@examples(33)
@given(st.lists(st.integers(0, 2**30 - 1), min_size=1, max_size=40))
@example([380_765_901])
def test_weights_are_the_exponential_and_never_grow_with_the_distance(values: list[int]) -> None:
    distance = torch.tensor(sorted(values), dtype=torch.int32)
    found = weights(distance)
    exact = 2.0**40 * torch.exp(-distance.double() / STEPS)
    # The distance and its halvings, up to 16 where the step of 2**-40 does not hide them, are rounded to float32.
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=1.0)
    assert (found.diff() <= 0).all()


@pytest.mark.parametrize("temperature", [SMALLEST, 1e-40, 1e-30, 1.0, 1e308])
@pytest.mark.parametrize("top_p", [SMALLEST, 1e-40, 1.0])
@pytest.mark.parametrize("others", [{}, {"top_k": 2}, {"min_p": SMALLEST}, {"min_p": 1.0}])
def test_the_smallest_temperature_or_top_p_is_greedy_with_and_without_other_filters(
    temperature: float, top_p: float, others: dict
) -> None:
    logits = torch.tensor([[-80.0, 79.0, 80.0, 1.0]])
    params = SamplingParams(temperature=temperature, top_p=top_p, **others)
    assert not filter_logits(logits[0], params).isnan().any()
    if temperature < 1 or top_p < 1 and temperature == 1:
        assert [sample(logits, [params], [seed], [0]).item() for seed in range(8)] == [2] * 8


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws, params = 6000, SamplingParams()
    logits = probs.log().expand(draws, 4)
    ids = sample(logits, [params] * draws, [7] * draws, list(range(draws)))
    counts = torch.bincount(ids, minlength=4).double()
    expected = probs.double() * draws
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 16.3, counts  # the 99.9th percentile with three degrees of freedom


def test_noise_is_independent_of_the_neighbouring_step_seed_and_token() -> None:
    base = gumbel_noise(1, 5, 20_000, CPU)
    assert abs(base.mean() - 0.5772) < 0.03 and abs(base.var() - math.pi**2 / 6) < 0.08
    others = (gumbel_noise(1, 6, 20_000, CPU), gumbel_noise(2, 5, 20_000, CPU), gumbel_noise(1 + 2**32, 5, 20_000, CPU))
    for other in (*others, base.roll(1)):
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1]) < 0.03


def test_the_lowest_and_the_highest_random_bits_are_finite_noise() -> None:
    assert torch.isfinite(gumbel_from_bits(torch.tensor([0, 2**32 - 1]))).all()


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(3))
    seen = [4, 4, 7, 11]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([seen]), logits.clone())
    got = apply_penalties(logits, [SamplingParams(repetition_penalty=1.7)], [seen[:2]], [seen[2:]])
    torch.testing.assert_close(got, expected)


def test_presence_counts_once_and_frequency_counts_every_time_over_the_output_alone() -> None:
    logits = torch.zeros(2, 6)
    params = [SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), SamplingParams()]
    got = apply_penalties(logits, params, [[1], [1]], [[2, 2, 3], [2]])
    assert got.tolist() == [[0, 0, -1.0, -0.75, 0, 0], [0] * 6]
    alone = [SamplingParams(presence_penalty=0.5), SamplingParams(frequency_penalty=0.25)]
    got = apply_penalties(logits, alone, [[1], [1]], [[2, 2, 3], [2, 2, 3]])
    assert got.tolist() == [[0, 0, -0.5, -0.5, 0, 0], [0, 0, -0.5, -0.25, 0, 0]]
    assert logits.abs().sum() == 0, "the caller's logits must not change"


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_alone_needs_the_tokens_so_far(penalty: str) -> None:
    assert SamplingParams(**{penalty: 0.5}).needs_penalties and not SamplingParams().needs_penalties


def test_logprobs_name_the_likeliest_tokens_and_the_chosen_one() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    found = top_logprobs(logits, 2, token_id=0)
    assert list(found) == [1, 3, 0]
    assert found[0] == pytest.approx(float(logits.log_softmax(-1)[0]))
    assert list(top_logprobs(logits, 9, token_id=0)) == [1, 3, 2, 0], "there are no more"
