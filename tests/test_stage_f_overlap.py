"""One step ahead of the tokens, and yet exactly the tokens of the engine that waits for them."""

from __future__ import annotations

from functools import partial

import pytest
from fake_model import answer_alone, make_engine, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stage_e_fuzz import arrivals, run_and_compare, settings_of_engine

import stage_e_batching
import stage_f_graph_tp
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.engine import Sampled
from stage_f_graph_tp.overlap import OverlappedEngine, without_rows

PROMPTS = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (3, 33, 17, 9, 50)]
PROMPTS.append(PROMPTS[4][:40] + [7, 8, 9])
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@settings(max_examples=100, deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=20), settings_of_engine())
def test_whatever_arrives_aborts_or_fails_every_answer_is_the_one_it_would_get_alone(requests, options):
    run_and_compare(requests, options, partial(make_engine, late=True))


@settings(max_examples=30, deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=20), settings_of_engine())
def test_and_so_it_is_with_whole_prompts(requests, options):
    options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], 40)
    run_and_compare(requests, options | {"enable_chunked_prefill": False}, partial(make_engine, late=True))


@settings(max_examples=30, deadline=None)
@given(st.lists(arrivals.filter(lambda a: a.abort_after is None), min_size=1, max_size=8))
def test_surplus_is_at_most_one_token_a_request_and_none_where_the_end_is_known(requests):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 4096, "max_model_len": 4096}
    options = {"num_blocks": 400, "block_size": 4, "enable_prefix_caching": False, **limits}
    engine = run_and_compare(requests, options, partial(make_engine, late=True))
    ended_early = len(requests) - sum(r.ignore_eos for r in requests)
    needed = sum(len(r.prompt) - 1 for r in requests) + engine.counters.num_generated_tokens
    assert needed <= engine.runner.num_tokens_run <= needed + ended_early


@pytest.mark.parametrize("fails", [4, 5], ids=["when its tokens are fetched", "when it is launched"])
def test_after_a_failed_step_nothing_that_was_launched_is_still_under_way(fails):
    pool = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    engine = make_engine(late=True, fail_at=frozenset({fails}), **pool)
    request = make_request(0, [5, 6, 7, 8, 9], 20, ignore_eos=True)
    engine.add_request(request, streams=False)
    with pytest.raises(RuntimeError, match="the device failed"):
        while True:
            engine.step()
    assert len(engine.runner.launched) == (5 if fails == 4 else 4)
    assert all(step.waited for step in engine.runner.launched)
    events = []
    while engine.has_unfinished():
        events += engine.step()
    assert events[-1].output["token_ids"] == answer_alone(request, 4096)[0]


def tiny(**options: object) -> stage_f_graph_tp.LLM:
    return stage_f_graph_tp.LLM("random:qwen2-tiny", device="cpu", **options)


@pytest.fixture(scope="module")
def waiting() -> stage_e_batching.LLM:
    """Stage E, which waits for a step's tokens before it schedules the next."""
    return stage_e_batching.LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=256)


@pytest.fixture(scope="module")
def llm() -> stage_f_graph_tp.LLM:
    return tiny(num_kvcache_blocks=64, kvcache_block_size=4)


def test_a_step_in_flight_that_fails_as_the_next_one_did_is_told_of_once():
    pool = {"num_blocks": 50, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    engine = make_engine(late=True, fail_at=frozenset({2, 3}), **pool)  # 2 when it is waited for, 3 at its launch
    request = make_request(0, [1, 2, 3], 9, ignore_eos=True)
    engine.add_request(request, streams=False)
    errors, outputs = [], []
    while engine.has_unfinished():
        try:
            outputs += [event.output["token_ids"] for event in engine.step() if event.output]
        except RuntimeError as error:
            errors.append(error)
    assert len(errors) == 1 and errors[0].__context__ is None, "the launch's error, not the one that followed"
    assert outputs == [answer_alone(request, 4096)[0]]


def test_the_next_step_is_ordered_before_the_tokens_of_the_last_are_fetched(monkeypatch):
    for overlap, expected in ((True, "L LW LW LW LW W"), (False, "LW LW LW LW LW")):
        llm, log = tiny(overlap=overlap, num_kvcache_blocks=16), []
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


def test_the_counters_leave_the_surplus_out(llm, waiting):
    end = ids(waiting.generate(PROMPTS[:1], GREEDY, False))[0][4]
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(end,), ignore_eos=True)
    before = llm.engine.counters.num_generated_tokens
    outputs = [llm.generate(PROMPTS[:1], params, False)[0] for _ in range(3)]
    llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), False)
    generated = sum(len(output["token_ids"]) for output in outputs)
    assert generated < 36 and {output["finish_reason"] for output in outputs} == {"stop"}
    assert llm.engine.counters.num_generated_tokens - before == generated + 1


def test_the_tokens_of_a_step_without_some_rows_keep_their_logprobs_and_errors():
    error = ValueError("the last row's own")
    sampled = Sampled([5, 6, 7], [None, {6: -1.0}, None], {0: ValueError("of a row that is gone"), 2: error})
    assert without_rows([0], sampled) == Sampled([6, 7], [{6: -1.0}, None], {1: error})
    assert without_rows([1, 2], Sampled([5, 6, 7])) == Sampled([5], None, {})
