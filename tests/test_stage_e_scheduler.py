"""The scheduler's rules, one by one, on a fake model."""

from __future__ import annotations

import json
import random
import sys
from collections import deque
from contextlib import nullcontext, suppress

import pytest
from fake_model import CountingRunner, answer_alone, completion_of, make_calls, make_request, run_all

from benchmarks.pictures import timeline
from stage_a_naive.contract.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_d_paged import block_manager
from stage_e_batching.llm import serve
from stage_e_batching.scheduler import MAX_OVERTAKES, MAX_PROMPT_STEPS, Scheduler
from stage_e_batching.step import BatchSequence, State
from stage_e_batching.trace import Trace

pytestmark = pytest.mark.fast
ROOMY = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def prompt_of(length: int, phrase: int = 1) -> list[int]:
    return [(i * phrase + phrase) % 60 + 1 for i in range(length)]


def add(calls, length: int, max_tokens: int, phrase: int = 1) -> int:
    request = make_request(0, prompt_of(length, phrase), max_tokens, ignore_eos=True)
    return calls.add_request(request, streams=False)


def counting(queue_class: type) -> type:
    """The class of a queue that counts the elements it reads, searches through or moves."""
    from_both_ends = issubclass(queue_class, deque)  # a list moves all that comes after

    class Counting(queue_class):
        touched = 0

        def _moves(self, i: int) -> int:
            return min(i, len(self) - i) if from_both_ends else len(self) - i

        def remove(self, item):
            i = next(i for i, other in enumerate(super().__iter__()) if other is item)
            self.touched += i + self._moves(i)
            super().remove(item)

        def insert(self, i, item):
            self.touched += self._moves(i)
            super().insert(i, item)

        def __iter__(self):
            for item in super().__iter__():
                self.touched += 1
                yield item

        def __getitem__(self, i):
            self.touched += len(range(*i.indices(len(self)))) if isinstance(i, slice) else 1
            return super().__getitem__(i)

    return Counting


def test_no_more_than_max_num_seqs_run_and_all_of_them_get_on():
    calls = make_calls(**ROOMY)
    for i in range(20):
        add(calls, 5, 10, phrase=i + 1)
    while calls.has_unfinished():
        before = {s.request_id: s.num_computed_tokens for s in calls.engine.scheduler.decoding}
        calls.step()
        assert calls.engine.scheduler.num_running <= 8
        after = {s.request_id: s.num_computed_tokens for s in calls.engine.scheduler.decoding}
        assert all(after[i] > before[i] for i in after.keys() & before.keys())
    assert calls.engine.counters.num_finished == 20


def test_a_prompt_that_is_scored_gets_its_blocks_under_lasting_overload_and_then_requests_go_on():
    calls = make_calls(num_blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    scheduler, scored = calls.engine.scheduler, BatchSequence(completion_of(prompt_of(60)))

    def step_under_load() -> int:
        while len(scheduler.waiting) < 3:
            add(calls, 10, 6, phrase=len(scheduler.unfinished) + 1)
        calls.step()
        return calls.engine.counters.num_finished

    for _ in range(9):
        step_under_load()
    before = step_under_load()
    while not scheduler.allocate(scored, 60):
        step_under_load()
        assert calls.engine.counters.num_finished <= before + MAX_OVERTAKES + scheduler.max_num_seqs
        assert scheduler.unfinished
    assert calls.engine.counters.num_finished > before + 1  # a few may pass it
    scheduler.free(scored)
    after = calls.engine.counters.num_finished
    assert any(step_under_load() > after + MAX_OVERTAKES for _ in range(200))
    assert not scheduler.allocate(scored, 60)
    scheduler.free(scored)  # the caller has gone: nothing waits for it
    after = calls.engine.counters.num_finished
    assert any(step_under_load() > after + 2 * MAX_OVERTAKES for _ in range(400))


def test_decodes_go_on_while_a_long_prompt_is_prefilled_in_chunks():
    calls = make_calls(**ROOMY)
    add(calls, 4, 40)
    calls.step()
    add(calls, 300, 5, phrase=2)
    calls.step()
    step = calls.engine.runner.steps[-1]
    assert [(e.sequence.request_id, e.start, e.num_tokens, e.samples) for e in step] == [
        (0, 4, 1, True),
        (1, 0, 63, False),
    ]
    chunks = [1]
    while calls.engine.scheduler.prefilling:
        calls.step()
        chunks.append(calls.engine.runner.steps[-1].num_decodes)
    assert chunks == [1] * 5, "300 tokens in chunks of 63, a decode beside each of them"


def test_without_chunking_a_prompt_runs_whole_and_decodes_wait():
    calls = make_calls(**ROOMY, enable_chunked_prefill=False)
    add(calls, 4, 40)
    calls.step()
    add(calls, 64, 5, phrase=2)
    calls.step()
    assert [(e.sequence.request_id, e.num_tokens) for e in calls.engine.runner.steps[-1]] == [(1, 64)]
    with pytest.raises(ValueError, match="65 tokens are more than max_num_batched_tokens=64"):
        add(calls, 65, 5)
    assert len(run_all(calls)) == 2


def test_a_step_too_small_for_one_token_of_every_sequence_is_refused():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(7\) is less than max_num_seqs \(8\)"):
        Scheduler(**ROOMY | {"max_num_batched_tokens": 7})


def test_a_tight_pool_costs_bounded_recomputation():
    calls = make_calls(num_blocks=40, block_size=4, max_num_seqs=16, max_num_batched_tokens=64)
    requests = [make_request(i, prompt_of(8, i + 1), 60, ignore_eos=True) for i in range(16)]
    for request in requests:
        calls.add_request(request, streams=False)
    outputs = run_all(calls)
    assert [outputs[i]["token_ids"] for i in range(16)] == [answer_alone(r, 161)[0] for r in requests]
    stats = calls.stats()
    assert stats["num_preemptions"] > 0, "or the pool is not tight"
    useful = 16 * (8 + 59)
    assert stats["num_recomputed_tokens"] <= useful // 2
    assert stats["num_preemptions"] <= 16


def test_each_preemption_doubles_what_must_stay_free_at_the_return():
    calls = make_calls(**ROOMY)
    sequence = BatchSequence(completion_of(prompt_of(8)))
    assert calls.engine.scheduler.watermark(sequence) == 0, "nobody runs who could grow"
    add(calls, 4, 40)
    calls.step()
    found = []
    for sequence.num_preemptions in range(7):
        found.append(calls.engine.scheduler.watermark(sequence))
    assert found == [8, 16, 32, 64, 128, 200, 200], "16 tokens for each of two, in blocks of 4, up to the whole pool"


def test_a_sequence_counts_its_preemptions():
    calls = make_calls(num_blocks=300, block_size=1, max_num_seqs=4, max_num_batched_tokens=64)
    for i in range(4):
        add(calls, 8, 200, phrase=i + 2)
    sequences = calls.engine.scheduler.unfinished
    run_all(calls)
    times = [sequence.num_preemptions for sequence in sequences]
    assert sum(times) == calls.engine.counters.num_preemptions and max(times) == 2


def test_a_preempted_sequence_finds_its_own_prefix_again():
    calls = make_calls(num_blocks=14, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    requests = [make_request(i, prompt_of(12, i + 1), 20, ignore_eos=True) for i in range(2)]
    for request in requests:
        calls.add_request(request, streams=False)
    sequences = calls.engine.scheduler.unfinished
    outputs = run_all(calls)
    assert [sequence.num_preemptions for sequence in sequences] == [0, 1] and calls.engine.counters.num_preemptions == 1
    resumed = [step for step in calls.engine.runner.steps if step.admitted and step.number > 0]
    assert resumed[-1].starts[-1] > 0, "its first blocks were still in the cache"
    assert outputs[1]["token_ids"] == answer_alone(requests[1], 49)[0]


def test_the_latest_arrival_is_preempted_and_the_step_says_why():
    calls = make_calls(num_blocks=14, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    for i in range(2):
        add(calls, 12, 20, phrase=i + 1)
    while not (preempted := calls.engine.runner.steps[-1].preempted if calls.engine.runner.steps else []):
        calls.step()
    [preemption] = preempted
    assert preemption.sequence.request_id == 1
    assert preemption.reason == "sequence 0 needs a block and none is free"
    assert "preempted 1" in str(calls.engine.runner.steps[-1])
    assert calls.engine.runner.steps[-1].sequences, "the step still runs someone"


def test_a_prompt_under_way_is_preempted_before_an_older_decode():
    calls = make_calls(num_blocks=34, block_size=4, max_num_seqs=4, max_num_batched_tokens=4)
    for i in range(3):
        add(calls, 3, 60, phrase=i + 1)
    while len(calls.engine.scheduler.decoding) < 3:
        calls.step()
    add(calls, 40, 4, phrase=4)  # one token per step is left for it
    while not calls.engine.runner.steps[-1].preempted:
        calls.step()
    [preemption] = calls.engine.runner.steps[-1].preempted
    assert preemption.sequence.request_id == 3
    assert 0 < preemption.num_tokens < 40
    assert calls.engine.runner.steps[-1].num_decodes == 3


def test_a_step_that_preempts_admits_nobody():
    calls = make_calls(num_blocks=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=128)
    add(calls, 4, 100)
    add(calls, 90, 40, phrase=2)
    while calls.engine.scheduler.block_manager.num_free > 8:
        calls.step()
    short = add(calls, 4, 4, phrase=3)
    while not calls.engine.runner.steps[-1].preempted:
        calls.step()
        assert not calls.engine.runner.steps[-1].admitted
    calls.step()
    admitted = calls.engine.runner.steps[-1].admitted
    assert [s.request_id for s in admitted] == [short], "it fits, but only in the next step"


def test_a_newcomer_is_looked_at_although_nothing_fitted_before():
    calls = make_calls(num_blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    add(calls, 30, 30)
    calls.step()
    add(calls, 60, 4, phrase=2)
    calls.step()
    short = add(calls, 4, 4, phrase=3)
    calls.step()
    assert [sequence.request_id for sequence in calls.engine.runner.steps[-1].admitted] == [short]


def test_no_sequence_is_queued_that_could_outgrow_the_pool_by_more_than_its_last_token():
    for prompt, fits in (([1] * 6, True), ([1] * 7, False)):
        scheduler = make_calls(**ROOMY | {"num_blocks": 2, "block_size": 4}).engine.scheduler
        sequence = BatchSequence(completion_of(prompt, SamplingParams(max_tokens=3)))
        assert sequence.max_total_tokens == len(prompt) + 3
        with nullcontext() if fits else pytest.raises(ValueError, match="10 tokens could outgrow a pool of 8"):
            scheduler.add(sequence)
        assert scheduler.has_unfinished() == fits


def test_an_idle_step_says_why():
    calls = make_calls(**ROOMY)
    assert calls.engine.scheduler.schedule().idle_reason == "nothing to do"
    calls = make_calls(**ROOMY | {"num_blocks": 2})
    add(calls, 8, 1)
    calls.engine.scheduler.block_manager.allocate(BatchSequence(completion_of([1])), 1)
    assert calls.engine.scheduler.schedule().idle_reason == "no request that waits fits"


@pytest.mark.parametrize(("num_blocks", "admitted"), [(11, True), (10, False)])
def test_a_request_is_admitted_if_it_leaves_exactly_the_watermark(num_blocks: int, admitted: bool):
    calls = make_calls(num_blocks=num_blocks, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    add(calls, 4, 20)
    calls.step()
    add(calls, 3, 2, phrase=2)
    calls.step()  # the first takes its second block; the watermark of two sequences is 2 * 16 tokens, 8 blocks
    assert bool(calls.engine.runner.steps[-1].admitted) == admitted


def test_short_requests_pass_one_that_does_not_fit_but_not_for_ever():
    calls = make_calls(num_blocks=40, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    add(calls, 60, 90)
    calls.step()
    long = add(calls, 120, 4, phrase=2)
    finished = []
    for i in range(60):
        add(calls, 4, 3, phrase=3 + i % 7)
        finished += [event.request_id for event in calls.step() if event.output]
    finished += run_all(calls)
    admitted = [sequence.request_id for step in calls.engine.runner.steps for sequence in step.admitted]
    overtakers = admitted[: admitted.index(long)][1:]
    assert len(overtakers) == MAX_OVERTAKES
    assert len(finished) == 62


def add_penalised(calls, max_tokens: int, phrase: int = 1) -> int:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, repetition_penalty=1.1)
    return calls.add_request(Request(0, prompt_of(5, phrase), params, seed=0), streams=False)


def test_of_requests_with_penalties_as_many_run_as_have_a_row_of_counts_and_others_pass_those_that_wait():
    calls = make_calls(**ROOMY, max_num_penalty_seqs=2)
    penalised = {add_penalised(calls, 6, phrase) for phrase in range(1, 7)}
    plain = {add(calls, 5, 6, phrase) for phrase in range(7, 13)}
    calls.step()
    assert {s.request_id for s in calls.engine.runner.steps[0].sequences} == {0, 1} | plain, "all eight slots are taken"
    outputs = run_all(calls)
    assert outputs.keys() == penalised | plain
    for step in calls.engine.runner.steps:
        slots = [s.batch_slot for s in step.admitted if s.request_id in penalised]
        assert len([s for s in step.sequences if s.request_id in penalised]) <= 2 and set(slots) <= {-1, 0, 1}
    admitted = [s.request_id for step in calls.engine.runner.steps for s in step.admitted if s.request_id in penalised]
    assert admitted == sorted(penalised), "those with penalties are admitted in order of arrival"


def test_requests_without_penalties_leave_the_rows_of_counts_to_others_while_they_can():
    calls = make_calls(**ROOMY | {"max_num_seqs": 4}, max_num_penalty_seqs=2)
    for phrase in (1, 2):
        add(calls, 5, 4, phrase)
    calls.step()
    for phrase in (3, 4):
        add_penalised(calls, 4, phrase)
    calls.step()
    assert calls.engine.scheduler.num_running == 4, "both slots with a row of counts were free"
    run_all(calls)
    for _ in range(2):
        for phrase in range(1, 5):
            add(calls, 5, 4, phrase)
        calls.step()
        assert calls.engine.scheduler.num_running == 4, "without penalties any slot will do"
        run_all(calls)


def test_a_request_that_waits_for_a_row_of_counts_is_passed_no_more_often_than_any_other():
    calls = make_calls(**ROOMY, max_num_penalty_seqs=1)
    add_penalised(calls, 80)
    calls.step()
    late = add_penalised(calls, 4, phrase=2)
    finished = []
    for i in range(60):
        add(calls, 4, 3, phrase=3 + i % 7)
        finished += [event.request_id for event in calls.step() if event.output]
    finished += run_all(calls)
    admitted = [sequence.request_id for step in calls.engine.runner.steps for sequence in step.admitted]
    assert admitted.index(late) == 1 + MAX_OVERTAKES
    assert sorted(finished) == list(range(62))


def test_many_admitted_in_one_step_do_not_pass_a_waiting_one_more_often_than_allowed():
    calls = make_calls(num_blocks=400, block_size=4, max_num_seqs=80, max_num_batched_tokens=400)
    add(calls, 40, 40)
    calls.step()
    long = add(calls, 1560, 4, phrase=2)
    for i in range(70):
        add(calls, 2, 2, phrase=i % 50 + 3)
    calls.step()
    assert len(calls.engine.runner.steps[-1].admitted) == MAX_OVERTAKES
    outputs = run_all(calls)
    assert len(outputs) == 72
    admitted = [sequence.request_id for step in calls.engine.runner.steps for sequence in step.admitted]
    assert admitted.index(long) == 1 + MAX_OVERTAKES


def test_of_several_that_wait_the_one_that_was_passed_most_often_sets_the_limit():
    calls = make_calls(num_blocks=400, block_size=4, max_num_seqs=80, max_num_batched_tokens=400)
    add(calls, 40, 40)
    calls.step()
    longs = [add(calls, 1560, 4, phrase=2)]
    for num_short, num_admitted in ((10, 10), (70, MAX_OVERTAKES - 10)):
        for i in range(num_short):
            add(calls, 2, 2, phrase=i % 50 + 3)
        calls.step()
        assert len(calls.engine.runner.steps[-1].admitted) == num_admitted
        longs.append(add(calls, 1560, 4, phrase=2))
    assert [calls.engine.scheduler.find(i).times_overtaken for i in longs] == [MAX_OVERTAKES, MAX_OVERTAKES - 10, 0]


def test_without_chunking_a_prompt_takes_no_more_of_a_step_than_is_left_to_run():
    calls = make_calls(**ROOMY, enable_chunked_prefill=False)
    add(calls, 40, 1)
    run_all(calls)
    fresh, cached = add(calls, 60, 1, phrase=2), add(calls, 40, 1)
    calls.step()
    assert [(e.sequence.request_id, e.num_tokens) for e in calls.engine.runner.steps[-1]] == [(fresh, 60), (cached, 4)]


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "most_steps", "most_recomputed"), [(30, 256, 7000, 25_000), (120, 64, 5400, 35_000)]
)
def test_large_blocks_cost_little_concurrency(num_blocks, block_size, most_steps, most_recomputed):
    """The watermark is in tokens: in blocks of 256 it would keep two thirds of this pool empty."""
    lengths = random.Random(4)
    calls = make_calls(
        runner=CountingRunner(),
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
    )
    for i in range(300):
        prompt_len, max_tokens = lengths.randint(20, 200), lengths.randint(100, 600)
        calls.add_request(make_request(i, [i % 60, i // 60, *[1] * (prompt_len - 2)], max_tokens, True), streams=False)
    run_all(calls, limit=most_steps)
    assert calls.engine.counters.num_finished == 300
    assert calls.engine.counters.num_recomputed_tokens < most_recomputed


def test_a_step_costs_the_same_with_200_or_20000_requests_waiting():
    """Elements of the waiting queue that are read or moved, counted."""

    def touched(num_waiting: int) -> int:
        calls = make_calls(
            runner=CountingRunner(), num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32
        )
        for i in range(num_waiting):
            prompt = [i % 60, i // 60 % 60, i // 3600, *[1] * 5]
            calls.add_request(make_request(i, prompt, 60, ignore_eos=True), streams=False)
        scheduler = calls.engine.scheduler
        scheduler.waiting = waiting = counting(type(scheduler.waiting))(scheduler.waiting)
        most = 0
        for _ in range(200):
            waiting.touched = 0
            calls.step()
            most = max(most, waiting.touched)
        assert calls.engine.counters.num_finished > 10 and calls.engine.counters.num_preemptions > 0
        return most

    assert touched(20_000) <= touched(200) + 20, "or a step looks at more than the front of the queue"


def test_a_step_costs_a_call_of_5000_prompts_no_more_than_one_of_200():
    """Python's instructions per step, of the whole way from the call through the engine, counted."""

    def instructions(num_prompts: int) -> float:
        calls = make_calls(
            runner=CountingRunner(), num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32
        )
        prompts = [[i % 60, i // 60 % 60, i // 3600] for i in range(num_prompts)]
        requests = [make_request(i, prompt, 10, ignore_eos=True) for i, prompt in enumerate(prompts)]
        events = serve(calls, requests, streams=False)
        next(events)
        count = -calls.engine.counters.num_steps
        executed = 0

        def trace(frame, event, arg):
            nonlocal executed
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            executed += event == "opcode"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for _ in range(60):
                next(events)
        finally:
            sys.settrace(before)
        count += calls.engine.counters.num_steps
        events.close()
        assert calls.stats()["num_waiting"] == 0
        return executed / count

    assert instructions(5_000) < 1.2 * instructions(200)


def test_prompts_that_wait_are_hashed_once():
    num_hashed, packed = 0, []

    def count(frame, event, _):
        nonlocal num_hashed
        if event == "call" and frame.f_code is block_manager.block_key.__code__:
            num_hashed += 1
        elif event == "call" and frame.f_code is block_manager.pack.__code__:
            packed.extend(frame.f_locals["token_ids"])

    calls = make_calls(num_blocks=40, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    prefix = prompt_of(64)
    before = sys.getprofile()
    sys.setprofile(count)
    add(calls, 64, 60)
    calls.step()
    for i in range(40):  # each has 16 blocks of the cached prefix and 30 of its own: none fits
        calls.add_request(make_request(i, [*prefix, *prompt_of(90, i % 50 + 2)], 4), streams=False)
        calls.step()
    sys.setprofile(before)
    assert calls.engine.scheduler.num_running == 1 and len(calls.engine.scheduler.waiting) == 40, "they wait for blocks"
    waiting = 40 * (64 // 4 + 90 // 4)
    running = 40 // 4 + 64 // 4 + 1
    assert 0 < num_hashed <= waiting + running and len(packed) <= 4 * (waiting + 40 + running), (
        "40 have a part of a block"
    )


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_counters_add_up_after_preemptions(prefix_caching):
    pool = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    calls = make_calls(**pool, enable_prefix_caching=prefix_caching)
    for i in range(16):  # the first block is the same in all
        calls.add_request(make_request(i, [1, 2, 3, 4, *prompt_of(4, i + 2)], 60, ignore_eos=True), streams=False)
    outputs = run_all(calls)
    counters, steps = calls.engine.counters, calls.engine.runner.steps
    preempted = [preemption for step in steps for preemption in step.preempted]
    assert counters.num_preemptions == len(preempted) > 0
    cached = 15 * 4 if prefix_caching else 0
    assert counters.num_cached_tokens == cached, "what a preempted one finds again is not new"
    assert sum(output["metrics"]["num_cached_tokens"] for output in outputs.values()) == cached
    assert counters.num_generated_tokens == 16 * 60
    assert counters.num_prefill_tokens == 16 * 8 - cached + len(preempted), "and at each return the token sampled last"
    assert all(output["metrics"]["prefill_time"] > 0 for output in outputs.values()), "not since the return"
    decodes = sum(step.num_decodes for step in steps)
    assert counters.num_prefill_tokens + counters.num_recomputed_tokens + decodes == calls.engine.runner.num_tokens_run
    lost = sum(preemption.num_tokens for preemption in preempted)
    if prefix_caching:
        assert counters.num_recomputed_tokens < lost
    else:
        assert counters.num_recomputed_tokens == lost


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fails_at", [0, 1, 2, 4])
def test_a_prompt_is_counted_once_though_it_is_preempted_at_once_or_its_step_breaks_off(late, fails_at):
    pool = {"num_blocks": 20, "block_size": 64, "max_num_seqs": 32, "max_num_batched_tokens": 4000}
    calls = make_calls(late=late, fail_at=frozenset({fails_at}), **pool)
    for i in range(16):  # all of them need a block in the step after their admission
        calls.add_request(make_request(i, prompt_of(64, i), 10, ignore_eos=True), streams=False)
    while calls.has_unfinished():
        with suppress(RuntimeError):
            calls.step()
    assert calls.engine.counters.num_prompt_tokens == 16 * 64 and calls.engine.counters.num_cached_tokens == 0
    assert calls.engine.runner.steps[1].preempted or fails_at == 1


def test_an_idle_engine_notices_a_leaked_block():
    calls = make_calls(**ROOMY)
    add(calls, 4, 3)
    assert calls.engine.scheduler.block_manager.allocate(BatchSequence(completion_of([1, 2])), 2)  # nobody frees it
    with pytest.raises(RuntimeError, match="idle but 1 blocks"):
        run_all(calls)


def test_identical_prompts_of_one_step_share_their_blocks():
    calls = make_calls(**ROOMY)
    for _ in range(3):
        add(calls, 17, 4)
    calls.step()
    tables = [s.block_table for s in calls.engine.scheduler.decoding]
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert len({table[4] for table in tables}) == 3
    outputs = run_all(calls)
    assert len({tuple(o["token_ids"]) for o in outputs.values()}) == 1
    assert [o["metrics"]["num_cached_tokens"] for o in outputs.values()] == [0, 16, 16]


@pytest.mark.parametrize(("max_tokens", "cached"), [(20, 28), (21, 32)], ids=["part of a block left", "full blocks"])
def test_a_next_turn_finds_the_blocks_of_the_answer_before(max_tokens, cached):
    calls = make_calls(**ROOMY)
    add(calls, 12, max_tokens)
    [answer] = run_all(calls).values()  # its last token was never run: 12 + max_tokens - 1 have K and V
    calls.add_request(make_request(0, [*answer["prompt_token_ids"], *answer["token_ids"], 3], 2), streams=False)
    [turn] = run_all(calls).values()
    assert turn["metrics"]["num_cached_tokens"] == cached


def test_an_answer_under_way_is_shared_block_by_block():
    calls = make_calls(**ROOMY)
    add(calls, 12, 40)
    [running] = calls.engine.scheduler.unfinished
    while running.num_computed_tokens < 25:
        calls.step()
    second = calls.add_request(make_request(0, [*running.token_ids, 3], 2), streams=False)
    assert run_all(calls)[second]["metrics"]["num_cached_tokens"] == 24


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "decoding", "preempted"])
def test_a_request_is_aborted_at_any_moment_and_only_once(moment):
    calls = make_calls(num_blocks=15, block_size=4, max_num_seqs=2, max_num_batched_tokens=8)
    other = add(calls, 12, 20)
    victim = add(calls, 16, 20, phrase=2)
    sequence = calls.engine.scheduler.unfinished[1]
    wanted = State.WAITING if moment == "preempted" else State(moment)
    while sequence.state is not wanted or (moment == "preempted") != (sequence.num_preemptions > 0):
        calls.step()
    assert calls.abort(victim)
    assert not calls.abort(victim)
    assert not calls.abort(12345)
    assert list(run_all(calls)) == [other]
    assert calls.stats()["num_used_blocks"] == 0
    assert calls.stats()["num_aborted"] == 1


def test_without_chunking_prompts_are_first_again_after_a_step_of_decodes():
    pool = {"num_blocks": 4000, "block_size": 4, "max_num_seqs": 300, "max_num_batched_tokens": 300}
    calls = make_calls(**pool, enable_chunked_prefill=False)
    for i in range(3 * (MAX_PROMPT_STEPS + 1)):
        add(calls, 8, 30, phrase=i + 2)
        calls.step()
    kinds = "".join("d" if step.num_decodes else "p" for step in calls.engine.runner.steps)
    assert kinds == ("p" * MAX_PROMPT_STEPS + "d") * 3, "although a new prompt comes at every step"
    assert all(step.num_decodes in (0, len(step)) for step in calls.engine.runner.steps), "no step mixes the two"


def test_a_trace_tells_every_step_and_can_be_drawn(tmp_path):
    calls = make_calls(num_blocks=14, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    calls.engine.trace = Trace(tmp_path / "trace.jsonl")
    for i in range(2):
        add(calls, 12, 20, phrase=i + 1)
    run_all(calls)
    records = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert len(records) == calls.engine.counters.num_steps
    assert sum(record["num_tokens"] for record in records) == calls.engine.runner.num_tokens_run
    assert [p["id"] for record in records for p in record["preempted"]] == [1]
    assert {"id": 0, "reason": "length"} in [f for record in records for f in record["finished"]]
    assert records[0]["sequences"][0] == {"id": 0, "start": 0, "tokens": 12, "samples": True, "blocks": 3}
    assert timeline.draw(timeline.read_trace(tmp_path / "trace.jsonl")).png.startswith(b"\x89PNG")


def test_a_trace_that_another_thread_closes_while_a_call_runs_raises_nothing(tmp_path):
    calls = make_calls(**ROOMY)
    calls.engine.trace = Trace(tmp_path / "trace.jsonl")
    add(calls, 9, 5)
    calls.step()
    calls.engine.trace.close()
    run_all(calls)
    assert calls.engine.counters.num_finished == 1
    [record] = (tmp_path / "trace.jsonl").read_text().splitlines()
    assert json.loads(record)["step"] == 0


def test_a_trace_tells_nothing_of_steps_that_broke_off(tmp_path):
    calls = make_calls(**ROOMY, fail_at=frozenset({2}))
    calls.engine.trace = Trace(tmp_path / "trace.jsonl")
    add(calls, 9, 5)
    with pytest.raises(RuntimeError, match="the device failed"):
        run_all(calls)
    run_all(calls)
    assert not any(value for value in vars(calls.engine.trace).values() if isinstance(value, dict)), "a record is kept"
    numbers = [json.loads(line)["step"] for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert numbers == [0, *range(2, 2 + len(numbers) - 1)], "the second broke off"


def test_what_is_computed_again_is_counted_although_its_recomputation_was_broken_off():
    calls = make_calls(**ROOMY | {"max_num_batched_tokens": 16}, fail_at=frozenset({6, 8}))
    add(calls, 60, 5)
    for _ in range(8):
        with suppress(RuntimeError):
            calls.step()  # the sixth runs token 61 and fails; the seventh runs 16 again; the eighth fails
    run_all(calls)
    assert calls.engine.counters.num_recomputed_tokens == 16 + 62
