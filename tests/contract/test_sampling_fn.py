"""A replaced sampler: its arguments, its requests, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch

from contract.engines import GREEDY, PROMPTS, SEEDED, ask, finish, sampler
from stage_a_naive import SamplingParams
from stage_a_naive.contract.params import check_sampling_fn

SEVENTH = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, seed=7)


def fail(*_: object) -> None:
    raise LookupError("stop here")


def outside(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    return torch.full((len(params),), logits.shape[-1])


def second_best(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    return logits.topk(2).indices[:, 1]


def nucleus(logits: torch.Tensor, p: float = 0.9) -> torch.Tensor:
    sorted_logits, order = logits.sort(descending=True)
    rest = sorted_logits.softmax(-1).cumsum(-1).roll(1, -1).gt(p).index_fill(-1, torch.tensor([0]), False)
    return order.gather(-1, sorted_logits.masked_fill(rest, -torch.inf).softmax(-1).multinomial(1)).squeeze(-1)


def failing_in_every_third_step(error: type[BaseException]) -> Callable:
    steps = count(1)

    def choose(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        if next(steps) % 3 == 0:
            raise error("stop here")
        return logits.argmax(-1)

    return choose


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (fail, LookupError, "stop here"),
        (failing_in_every_third_step(RuntimeError), RuntimeError, "stop here"),
        (failing_in_every_third_step(KeyboardInterrupt), KeyboardInterrupt, "stop here"),
        (outside, ValueError, "token id 4096, outside the vocabulary of 4096"),
        (lambda logits, params: -outside(logits, params), ValueError, "token id -4096, outside the vocabulary of 4096"),
        (lambda logits, params: logits, ValueError, "must return a tensor of integer ids of shape"),
        (lambda logits, params: logits.argmax(-1).tolist(), ValueError, r"integer ids of shape \[\d\], got \[\d+"),
        (lambda logits, params: None, ValueError, r"integer ids of shape \[\d\], got None"),
        (0.9, ValueError, "sampling_fn must be None or a function .* got 0.9"),
    ],
    ids=[
        "raises",
        "late",
        "interrupted",
        "outside the vocabulary",
        "below 0",
        "no ids",
        "a list",
        "nothing",
        "a number",
    ],
)
def test_what_a_sampler_does_wrong_is_named_and_the_next_call_is_right(llm, expected, function, error, says) -> None:
    with sampler(llm, function), pytest.raises(error, match=says) as caught:
        ask(llm, PROMPTS[:2])
    assert "\n" not in str(caught.value)
    assert ask(llm, PROMPTS[:2]) == expected[:2]


def test_a_replaced_sampler_is_asked_with_float32_logits_and_one_parameter_a_row(llm, expected) -> None:
    seen = []

    def best(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        seen.append((logits.dtype, logits.shape == (len(params), 4096), set(params)))
        return logits.argmax(-1)

    with sampler(llm, best):
        assert ask(llm, PROMPTS, SEEDED[0]) == expected
    assert all(asked == (torch.float32, True, {SEEDED[0]}) for asked in seen) and seen
    with sampler(llm, second_best):
        assert ask(llm, PROMPTS) != expected


@pytest.mark.needs("one process")
def test_the_logits_are_float32_also_of_a_model_in_16_bits(engine) -> None:
    dtypes = set()

    def note(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        dtypes.add(logits.dtype)
        return logits.argmax(-1)

    with engine.made(dtype="bfloat16") as llm, sampler(llm, note):
        ask(llm, "abc")
    assert dtypes == {torch.float32}


@pytest.mark.needs("exact")
def test_penalties_are_applied_before_a_replaced_sampler_sees_the_logits(llm, naive) -> None:
    params = replace(GREEDY, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.5)
    with sampler(llm, second_best), sampler(naive, second_best):
        assert ask(llm, PROMPTS[:2], params) == ask(naive, PROMPTS[:2], params)


def test_a_call_keeps_the_sampler_that_was_set_when_it_began(llm) -> None:
    def exchange(*_: object) -> None:
        llm.sampling_fn = None if llm.sampling_fn else second_best

    answers = []
    for function in (None, second_best):
        for listen in (None, exchange):
            with sampler(llm, function):
                answers.append(ask(llm, PROMPTS[:2], GREEDY, listen))
    assert answers[0] == answers[1] != answers[2] == answers[3]


@pytest.mark.parametrize("function", [nucleus, partial(nucleus, p=0.5), lambda logits: logits.argmax(-1)], ids=range(3))
def test_a_sampler_of_the_logits_alone_is_refused_with_how_to_use_it(llm, function: Callable) -> None:
    says = r"called as fn\(logits, params\).*set llm.sampling_fn = lambda logits, params:"
    with sampler(llm, function), pytest.raises(ValueError, match=says):
        ask(llm, "abc")
    with sampler(llm, lambda logits, params: function(logits)):
        assert len(ask(llm, "abc")[0]) == GREEDY.max_tokens


@pytest.mark.parametrize("usual", [torch.argmax, lambda *given: 1, lambda logits, params=None: 1, second_best])
def test_what_may_take_logits_and_parameters_is_called(usual: Callable) -> None:
    check_sampling_fn(usual)


def test_a_sampler_that_writes_to_its_logits_changes_no_log_probability(llm) -> None:
    def the_last(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        logits[:, :-1] = -1000.0
        return logits.argmax(-1)

    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2)
    found = []
    for function in (the_last, lambda logits, params: the_last(logits.clone(), params)):
        with sampler(llm, function):
            [output] = llm.generate([[1, 2, 3]], params, False)
        found.append((output["token_ids"], output["logprobs"]))
    assert found[0][0] == found[1][0] == [4095] * 3
    for step, same in zip(found[0][1], found[1][1], strict=True):
        assert step == pytest.approx(same, abs=1e-4)


@pytest.mark.needs("pool")
def test_a_sampler_that_fails_drops_the_added_requests_that_it_was_asked_for(llm, expected) -> None:
    with sampler(llm, outside):
        llm.add_request(PROMPTS[0], GREEDY)
    kept = llm.add_request(PROMPTS[1], GREEDY)
    with pytest.raises(ValueError, match="token id 4096, outside the vocabulary of 4096"):
        llm.step()
        llm.step()  # where a step's tokens are known one step later
    assert finish(llm) == {kept: expected[1]}


@pytest.mark.needs("pool")
def test_an_added_request_that_fails_beside_a_call_is_the_error_of_the_next_step(llm, expected) -> None:
    with sampler(llm, outside):
        llm.add_request(PROMPTS[0], GREEDY)
    assert ask(llm, [PROMPTS[1]]) == [expected[1]]
    assert not llm.is_finished()
    with pytest.raises(ValueError, match="token id 4096, outside the vocabulary of 4096"):
        llm.step()
    assert llm.is_finished()


@pytest.mark.needs("pool")
def test_a_call_and_an_added_request_that_fail_together_have_an_error_each(llm) -> None:
    says = "token id 4096, outside the vocabulary of 4096"
    with sampler(llm, outside):
        llm.add_request(PROMPTS[0], GREEDY)
        with pytest.raises(ValueError, match=says):
            ask(llm, PROMPTS[1:3])
    assert not llm.is_finished()
    with pytest.raises(ValueError, match=says):
        finish(llm)
    assert llm.is_finished()


@pytest.mark.needs("side by side")
def test_a_replaced_sampler_belongs_to_the_requests_that_came_while_it_was_set(llm, expected) -> None:
    rows: list[int] = []
    before = llm.stream([PROMPTS[1]], GREEDY)
    pieces = [next(before)[1]]
    with sampler(llm, lambda logits, params: rows.append(len(params)) or logits.argmin(-1)):
        during = llm.stream([PROMPTS[2]] * 2, GREEDY)
    assert ask(llm, [PROMPTS[3]]) == [expected[3]]
    joined = ["", ""]
    for index, piece in during:
        joined[index] += piece
    assert "".join(pieces + [piece for _, piece in before]) == llm.tokenizer.decode(expected[1])
    assert joined[0] == joined[1] != llm.tokenizer.decode(expected[2])
    assert max(rows) == 2, "asked for its own rows only"


@pytest.mark.needs("side by side")
@pytest.mark.parametrize("fault", ["raises", "outside the vocabulary", "of no integer type"])
def test_a_sampler_that_fails_for_one_request_ends_that_request_alone(llm, expected, fault: str) -> None:
    def choose(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        chosen = logits.argmax(-1)
        for row, asked in enumerate(params):
            if asked.seed == 7 and fault == "raises":
                raise LookupError("no token for seed 7")
            if asked.seed == 7:
                chosen[row] = logits.shape[-1]
        bad_type = fault == "of no integer type" and any(asked.seed == 7 for asked in params)
        return chosen.float() if bad_type else chosen

    errors = {"raises": "no token for seed 7", "outside the vocabulary": "4096, outside the vocabulary of 4096"}
    with sampler(llm, choose):
        good = llm.stream([PROMPTS[1]], GREEDY)
        pieces = [next(good)[1]]
        with pytest.raises((LookupError, ValueError), match=errors.get(fault, "must return a tensor of integer ids")):
            ask(llm, [PROMPTS[2], PROMPTS[3]], [GREEDY, SEVENTH])
        assert "".join(pieces + [piece for _, piece in good]) == llm.tokenizer.decode(expected[1])


@pytest.mark.needs("side by side")
def test_two_samplers_that_fail_in_one_step_end_their_requests_and_step_tells_of_both(llm, expected) -> None:
    def failing(name: str) -> Callable:
        def choose(*_: object) -> None:
            raise LookupError(f"sampler {name} fails")

        return choose

    for name in ("one", "two"):
        with sampler(llm, failing(name)):
            llm.add_request(PROMPTS[2], GREEDY)
    kept = llm.add_request(PROMPTS[3], GREEDY)
    found, errors = [], []
    while not llm.is_finished():
        try:
            found += llm.step()[0]
        except LookupError as error:
            errors.append(str(error))
    assert errors == ["sampler one fails", "sampler two fails"] and found == [(kept, expected[3])]
