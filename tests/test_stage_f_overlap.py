"""One step ahead of the tokens, and yet exactly the tokens of the engine that waits for them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from contract.engines import GREEDY, MODEL, PROMPTS, ask
from fake_model import answer_alone, make_calls, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stage_e_fuzz import arrivals, run_and_compare

import stage_f_graph_tp
from stage_a_naive.sampling import SamplingParams

pytestmark = pytest.mark.fast


@settings(max_examples=30, deadline=None)
@given(st.lists(arrivals.filter(lambda a: a.abort_after is None), min_size=1, max_size=8))
def test_surplus_is_at_most_one_token_a_request_and_none_where_the_end_is_known(requests):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 4096, "max_model_len": 4096}
    options = {"num_blocks": 400, "block_size": 4, "enable_prefix_caching": False, **limits}
    calls = run_and_compare(requests, options, partial(make_calls, late=True))
    ended_early = len(requests) - sum(r.ignore_eos for r in requests)
    needed = sum(len(r.prompt) - 1 for r in requests) + calls.engine.counters.num_generated_tokens
    assert needed <= calls.engine.runner.num_tokens_run <= needed + ended_early


@pytest.mark.parametrize("fails", [4, 5], ids=["when its tokens are fetched", "when it is launched"])
def test_after_a_failed_step_nothing_that_was_launched_is_still_under_way(fails):
    pool = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    calls = make_calls(late=True, fail_at=frozenset({fails}), **pool)
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


def tiny(**options: object) -> stage_f_graph_tp.LLM:
    return stage_f_graph_tp.LLM(MODEL, device="cpu", **options)


def test_a_step_in_flight_that_fails_as_the_next_one_did_is_told_of_once():
    pool = {"num_blocks": 50, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    calls = make_calls(late=True, fail_at=frozenset({2, 3}), **pool)  # 2 when it is waited for, 3 at its launch
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


def test_the_next_step_is_ordered_before_the_tokens_of_the_last_are_fetched():
    for overlap, expected in ((True, "L LW LW LW LW W"), (False, "LW LW LW LW LW")):
        llm, log = tiny(without="" if overlap else "overlap", num_kvcache_blocks=16), []
        launch = llm.runner.launch

        def logged(step, launch=launch, log=log):
            result = launch(step)
            if not step.sequences:
                return result
            log.append("L")
            wait = result.wait
            object.__setattr__(result, "wait", lambda: log.append("W") or wait())
            return result

        llm.runner.launch = logged
        run_step = llm.engine.run_step
        llm.engine.run_step = lambda run_step=run_step, log=log: (run_step(), log.append(" "))[0]
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), False)
        assert "".join(log).strip() == expected


def test_the_counters_leave_the_surplus_out():
    llm = tiny(num_kvcache_blocks=64)
    end = ask(llm, PROMPTS[:1])[0][4]
    before = llm.engine.counters.num_generated_tokens
    params = replace(GREEDY, stop_token_ids=(end,), ignore_eos=True)
    outputs = [llm.generate(PROMPTS[:1], params, False)[0] for _ in range(3)]
    ask(llm, PROMPTS[:1], replace(GREEDY, max_tokens=1))
    generated = sum(len(output["token_ids"]) for output in outputs)
    assert generated < 3 * GREEDY.max_tokens and {output["finish_reason"] for output in outputs} == {"stop"}
    assert llm.engine.counters.num_generated_tokens - before == generated + 1
