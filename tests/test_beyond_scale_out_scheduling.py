"""Several batches in flight, and yet exactly the tokens of the engine that waits for each: on a fake model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice

import pytest
from fake_engines import make_pipeline
from fake_model import VOCAB, answer_alone, completion_of, make_request, run_all
from ranks import admit_whoever_fits

from stage_a_naive.contract.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.calls import Calls
from stage_e_batching.scheduler import LOOKAHEAD
from stage_e_batching.step import BatchSequence
from stage_e_batching.waiting_order import Priority

pytestmark = pytest.mark.fast

ROOMY = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def run_and_count(calls: Calls, requests: list[Request], count: Callable[[], int], longest: int) -> int:
    """Check every answer; returns the sum of `count()` over all steps."""
    for request in requests:
        calls.add_request(request, streams=False)
    total, outputs = 0, {}
    while calls.has_unfinished():
        outputs |= {event.request_id: event.output for event in calls.step() if event.output}
        total += count()
    assert [outputs[r.index]["token_ids"] for r in requests] == [answer_alone(r, longest)[0] for r in requests]
    return total


def test_a_sequence_preempted_in_flight_waits_for_its_token_and_keeps_its_batch_slot_until_then():
    calls = make_pipeline(**ROOMY | {"num_blocks": 12}, enable_prefix_caching=False)
    scheduler = calls.engine.scheduler
    admit_whoever_fits(calls)
    ends = (22, 9, 22)  # the second ends, and frees its blocks, while the preempted one is still in flight
    requests = [make_request(i, [i + 1] * 8, end, ignore_eos=True) for i, end in enumerate(ends)]

    def held() -> int:
        number = sum(sequence.num_in_flight > 0 for sequence in scheduler.waiting)
        assert not number or len(scheduler.free_slots_like(0)) + scheduler.num_running < scheduler.max_num_seqs
        return number

    assert run_and_count(calls, requests, held, 4096), "no sequence was preempted in flight"


def test_a_sequence_preempted_in_flight_waits_for_its_token_also_where_the_order_takes_it_from_far_behind():
    calls = make_pipeline(**ROOMY | {"num_blocks": 12}, enable_prefix_caching=False)
    scheduler = calls.engine.scheduler
    admit_whoever_fits(calls)
    scheduler.order = Priority(len)
    requests = [make_request(i, [i % VOCAB] * 48, 1) for i in range(LOOKAHEAD)]  # as many tokens as the pool has
    requests += [make_request(LOOKAHEAD + i, [i + 1] * 8, end, ignore_eos=True) for i, end in enumerate((22, 9, 22))]

    def held_far_behind() -> int:
        return sum(sequence.num_in_flight > 0 for sequence in islice(scheduler.waiting, LOOKAHEAD, None))

    assert run_and_count(calls, requests, held_far_behind, 49), "no sequence was preempted in flight"


def test_chunks_of_a_prompt_are_in_flight_together():
    calls = make_pipeline(**ROOMY | {"max_num_batched_tokens": 8})
    calls.add_request(make_request(0, [3] * 24, 1), streams=False)
    for expected in ([False], [False] * 2, [False] * 3, [True, False, False]):  # after three the first is sampled
        calls.step()
        assert [step.done for step in calls.engine.runner.in_flight] == expected


def test_no_more_batches_wait_for_their_samples_than_there_are_stages():
    calls = make_pipeline(**ROOMY | {"max_num_batched_tokens": 8})
    calls.add_request(make_request(0, [3] * 40, 1), streams=False)  # five chunks for three stages
    for sampled in (0, 0, 0, 1, 2):
        calls.step()
        assert [step.done for step in calls.engine.runner.in_flight].count(True) == sampled


def test_a_request_that_arrives_is_prefilled_before_another_ones_batch_is_sampled():
    calls = make_pipeline(**ROOMY)
    for number in range(1, 4):
        calls.add_request(make_request(number, [number], 9, ignore_eos=True), streams=False)
        calls.step()
        assert [step.done for step in calls.engine.runner.in_flight] == [False] * number


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_one_request_runs_on_before_its_last_token_is_on_the_host(batches):
    calls = make_pipeline(num_micro_batches=batches, **ROOMY)
    calls.add_request(make_request(0, [3], 9, ignore_eos=True), streams=False)
    for number in range(1, 10):
        calls.step()
        steps = calls.engine.runner.in_flight
        assert len(steps) == number, "every call launches a step"
        assert [step.late.waited for step in steps] == [True] * (number - 1) + [False]


@pytest.mark.parametrize("batches", [1, 2, 3, 4, 5])
def test_running_sequences_are_divided_into_equal_batches(batches):
    calls = make_pipeline(num_micro_batches=batches, **ROOMY | {"max_num_seqs": 30})
    for i in range(30):
        calls.add_request(make_request(i, [i + 1], 20, ignore_eos=True), streams=False)
    run_all(calls)
    sizes = [len(step) for step in calls.engine.runner.steps[1:]]
    for start in range(0, 9 * batches, batches):  # all of them in every round, and the last batch is the smallest
        *others, last = sizes[start : start + batches]
        assert set(others) <= {-(-30 // batches)} and sum(others) + last == 30


def test_a_sequence_that_gave_its_blocks_to_another_of_its_batch_does_not_run():
    calls = make_pipeline(num_micro_batches=1, **ROOMY | {"num_blocks": 3}, enable_prefix_caching=False)
    admit_whoever_fits(calls)
    requests = [make_request(i, [i + 1] * n, 5, ignore_eos=True) for i, n in enumerate((4, 2, 1))]
    for request in requests:  # a block each; then the first one takes the third one's, which needs none itself
        calls.add_request(request, streams=False)
    outputs = run_all(calls)
    assert calls.engine.counters.num_preemptions > 0
    assert [outputs[i]["token_ids"] for i in range(3)] == [answer_alone(r, 4096)[0] for r in requests]


@pytest.mark.parametrize("fails", [False, True])
def test_batch_slots_come_back_when_their_tokens_have_arrived_or_the_step_has_failed(fails):
    calls = make_pipeline(**ROOMY | {"max_num_seqs": 2}, fail_at=frozenset({2}) if fails else frozenset())
    scheduler = calls.engine.scheduler
    left = calls.add_request(make_request(0, [1], 9, ignore_eos=True), streams=False)
    calls.step()
    calls.abort(left)
    assert len(scheduler.free_slots_like(0)) == 1, "its token is in flight"
    calls.add_request(make_request(1, [2], 9, ignore_eos=True), streams=False)
    with pytest.raises(RuntimeError, match="the device failed") if fails else nullcontext():
        run_all(calls)
    assert sorted(scheduler.free_slots_like(0)) == [0, 1]


def test_a_row_of_counts_that_comes_back_late_admits_the_request_that_waits_for_it():
    calls = make_pipeline(num_micro_batches=1, max_num_penalty_seqs=1, **ROOMY)
    for i in range(2):  # the first one meets its stop token while its next token is in flight
        third = answer_alone(make_request(i, [i + 1], 3, ignore_eos=True), 4096)[0][2]
        params = SamplingParams(presence_penalty=0.5, ignore_eos=True, stop_token_ids=(third,))
        calls.add_request(Request(i, [i + 1], params, seed=i), streams=False)
    assert sorted(run_all(calls, limit=20)) == [0, 1]


def test_a_scheduler_that_begins_again_remembers_no_batch_slot_that_was_in_use():
    scheduler = make_pipeline(**ROOMY | {"max_num_seqs": 2}).engine.scheduler
    sequence = BatchSequence(completion_of([1, 2, 3]))
    scheduler.add(sequence)
    scheduler.schedule()
    sequence.num_in_flight = 1
    scheduler.remove(sequence)
    scheduler.forget()
    scheduler.schedule()
    assert sorted(scheduler.free_slots_like(0)) == [0, 1]
