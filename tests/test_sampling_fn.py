"""A replaced sampler: which requests it belongs to, and what happens to ids that are none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import SamplingParams
from stage_a_naive.frontend import check_sampling_fn
from stage_b_decode_step import LLM as DecodeStepLLM
from stage_d_paged import LLM as PagedLLM
from stage_e_batching import LLM as BatchingLLM

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MODEL = "random:qwen2-tiny"
STAGES = [pytest.param(NaiveLLM, id="a"), pytest.param(DecodeStepLLM, id="b"), pytest.param(PagedLLM, id="d")]


def second_best(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    return logits.topk(2).indices[:, 1]


@pytest.mark.parametrize("llm_class", STAGES)
def test_a_call_keeps_the_sampler_that_was_set_when_it_began(llm_class: type) -> None:
    llm = llm_class(MODEL, device="cpu")
    answers = {}
    for name, function in (("built-in", None), ("replaced", second_best)):
        llm.sampling_fn = function
        answers[name] = llm.generate(["abc", "de"], GREEDY, use_tqdm=False)

    def exchange(*_: object) -> None:
        llm.sampling_fn = None if llm.sampling_fn else second_best

    for name, function in (("built-in", None), ("replaced", second_best)):
        llm.sampling_fn = function
        outputs = llm.generate(["abc", "de"], GREEDY, use_tqdm=False, on_text=exchange)
        assert [o["token_ids"] for o in outputs] == [o["token_ids"] for o in answers[name]]
    assert answers["built-in"][0]["token_ids"] != answers["replaced"][0]["token_ids"]


def nucleus(logits: torch.Tensor, p: float = 0.9) -> torch.Tensor:
    sorted_logits, order = logits.sort(descending=True)
    outside = sorted_logits.softmax(-1).cumsum(-1).roll(1, -1).gt(p).index_fill(-1, torch.tensor([0]), False)
    return order.gather(-1, sorted_logits.masked_fill(outside, -torch.inf).softmax(-1).multinomial(1)).squeeze(-1)


@pytest.mark.parametrize("sampler", [nucleus, partial(nucleus, p=0.5), lambda logits: logits.argmax(-1)])
@pytest.mark.parametrize("llm_class", [*STAGES, pytest.param(BatchingLLM, id="e")])
def test_a_sampler_of_the_logits_alone_is_refused_with_how_to_use_it(llm_class: type, sampler: Callable) -> None:
    llm = llm_class(MODEL, device="cpu")
    llm.sampling_fn = sampler
    with pytest.raises(
        ValueError, match=r"called as fn\(logits, params\).*set llm.sampling_fn = lambda logits, params:"
    ):
        llm.generate("abc", GREEDY, use_tqdm=False)
    llm.sampling_fn = lambda logits, params: sampler(logits)
    assert len(llm.generate("abc", GREEDY, use_tqdm=False)[0]["token_ids"]) == GREEDY.max_tokens


@pytest.mark.parametrize("usual", [torch.argmax, lambda *given: 1, lambda logits, params=None: 1, second_best])
def test_what_may_take_logits_and_parameters_is_called(usual: Callable) -> None:
    check_sampling_fn(usual)


def test_a_sampler_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ValueError, match="sampling_fn must be None or a function .* got 0.9"):
        check_sampling_fn(0.9)


@pytest.mark.parametrize("llm_class", [*STAGES, pytest.param(BatchingLLM, id="e")])
def test_a_sampler_that_writes_to_its_logits_changes_no_log_probability(llm_class: type) -> None:
    def the_last(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        logits[:, :-1] = -1000.0
        return logits.argmax(-1)

    llm = llm_class(MODEL, device="cpu", dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2)
    found = []
    for sampling_fn in (the_last, lambda logits, params: the_last(logits.clone(), params)):
        llm.sampling_fn = sampling_fn
        [output] = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        found.append((output["token_ids"], output["logprobs"]))
    assert found[0] == found[1]


@pytest.mark.parametrize("wrong", [-1, 4096, 2**40])
@pytest.mark.parametrize("llm_class", STAGES)
def test_an_id_outside_the_vocabulary_is_refused_at_once(llm_class: type, wrong: int) -> None:
    llm = llm_class(MODEL, device="cpu")
    before = llm.generate("abc", GREEDY, use_tqdm=False)
    calls = 0

    def fails_at_the_third_token(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.full(logits.shape[:1], wrong) if calls == 3 else logits.argmax(-1)

    llm.sampling_fn = fails_at_the_third_token
    with pytest.raises(ValueError, match=f"sampling_fn returned token id {wrong}, outside the vocabulary of 4096"):
        llm.generate("abc", GREEDY, use_tqdm=False)
    assert calls == 3
    llm.sampling_fn = None
    assert llm.generate("abc", GREEDY, use_tqdm=False)[0]["token_ids"] == before[0]["token_ids"]
