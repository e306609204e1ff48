"""One step ahead of the tokens, and yet exactly the tokens of the engine that waits for them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from contract.engines import MODEL
from examples import examples
from fake_engines import make_guessing
from fake_model import answer_alone, make_calls, make_request
from hypothesis import given
from hypothesis import strategies as st
from test_stage_e_fuzz import arrivals, run_and_compare

import stage_f_graph_tp

pytestmark = pytest.mark.fast
POOL = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@examples(10)
@given(st.lists(arrivals.filter(lambda a: a.abort_after is None), min_size=1, max_size=8))
def test_surplus_is_at_most_one_token_a_request_and_none_where_the_end_is_known(requests):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 4096, "max_model_len": 4096}
    options = {"num_blocks": 400, "block_size": 4, "enable_prefix_caching": False, **limits}
    calls = run_and_compare(requests, options, partial(make_calls, late=True))
    ended_early = len(requests) - sum(r.ignore_eos for r in requests)
    asked = [make_request(0, r.prompt, r.max_tokens, r.ignore_eos) for r in requests]
    generated = sum(len(answer_alone(request, 1601)[0]) for request in asked)
    assert calls.engine.counters.num_generated_tokens == generated, "the counters leave the surplus out"
    needed = sum(len(r.prompt) - 1 for r in requests) + generated
    assert needed <= calls.engine.runner.num_tokens_run <= needed + ended_early


@pytest.mark.parametrize("fails", [4, 5], ids=["when its tokens are fetched", "when it is launched"])
def test_after_a_failed_step_nothing_that_was_launched_is_still_under_way(fails):
    calls = make_calls(late=True, fail_at=frozenset({fails}), **POOL)
    request = make_request(0, [5, 6, 7, 8, 9], 20, ignore_eos=True)
    calls.add_request(request, streams=False)
    with pytest.raises(RuntimeError, match="the device failed"):
        while True:
            calls.step()
    assert len(calls.engine.runner.launched) == (5 if fails == 4 else 4)
    assert all(step.waited for step in calls.engine.runner.launched)
    events = []
    while calls.has_unfinished():
        events += calls.step()
    assert events[-1].output["token_ids"] == answer_alone(request, 4096)[0]


def test_a_step_in_flight_that_fails_as_the_next_one_did_is_told_of_once():
    calls = make_calls(late=True, fail_at=frozenset({2, 3}), **POOL)  # 2 when it is waited for, 3 at its launch
    request = make_request(0, [1, 2, 3], 9, ignore_eos=True)
    calls.add_request(request, streams=False)
    errors, outputs = [], []
    while calls.has_unfinished():
        try:
            outputs += [event.output["token_ids"] for event in calls.step() if event.output]
        except RuntimeError as error:
            errors.append(error)
    assert len(errors) == 1 and errors[0].__context__ is None, "the launch's error, not the one that followed"
    assert outputs == [answer_alone(request, 4096)[0]]


@pytest.mark.parametrize("late", [True, False])
def test_the_next_step_is_launched_before_the_tokens_of_the_last_are_fetched(late):
    calls, in_flight = make_calls(late=late, **POOL), []
    calls.add_request(make_request(0, [1, 2, 3], 5, ignore_eos=True), streams=False)
    while calls.has_unfinished():
        calls.step()
        in_flight.append([step.waited for step in calls.engine.runner.launched].count(False))
    assert in_flight == ([1] * 5 + [0] if late else [0] * 5)
    llm = stage_f_graph_tp.LLM(MODEL, device="cpu", without="" if late else "overlap", num_kvcache_blocks=16)
    assert llm.engine.depth == int(late)


def test_a_step_that_nobody_guessed_for_stays_in_flight():
    silent = SimpleNamespace(has_draft=lambda sequence: True, draft=lambda sequence: [])
    calls, in_flight = make_guessing(drafter=silent, **POOL), []
    calls.add_request(make_request(0, [1, 2, 3], 5, ignore_eos=True), streams=False)
    while calls.has_unfinished():
        calls.step()
        in_flight.append([step.waited for step in calls.engine.runner.launched].count(False))
    assert in_flight == [1] * 5 + [0]
