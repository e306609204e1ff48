"""Several batches in flight, and yet exactly the tokens of the engine that waits for each: on a fake model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import islice

import pytest
from fake_model import (
    EOS,
    VOCAB,
    FakeRunner,
    FakeTokenizer,
    LateTokens,
    answer_alone,
    completion_of,
    make_request,
    run_all,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import answer_all
from test_stage_e_fuzz import arrivals, run_and_compare, settings_of_engine

from beyond.scale_out.pipeline_engine import PipelineEngine
from beyond.scale_out.pipeline_scheduler import PipelineScheduler, PipelineSequence
from stage_a_naive.outputs import Request
from stage_e_batching.scheduler import LOOKAHEAD
from stage_e_batching.step import ScheduledStep
from stage_e_batching.waiting_order import Priority

INTERRUPTED = [make_request(i, [i + 3] * n, 5 + i, ignore_eos=True) for i, n in enumerate((5, 1, 9, 3, 7))]
ROOMY = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}


class Returning:
    """A step on its way through the stages."""

    def __init__(self, runner: StagesRunner, step: ScheduledStep, late: LateTokens, tokens: list[int]) -> None:
        self.runner, self.late, self.done = runner, late, False
        self.rows = [(e.sequence, e.sequence.batch_slot) for e in step if e.samples]
        self.tokens = tokens

    def sample(self) -> LateTokens:
        self.done = True
        for (sequence, slot), token in zip(self.rows, self.tokens, strict=True):
            assert self.runner.occupants[slot] is sequence, "the sampler's row belongs to another request already"
            self.runner.last_tokens[slot] = token
        return self.late


class StagesRunner(FakeRunner):
    """The fake model on stages: a step's layers run when it is launched, its sampler when the engine asks for it."""

    def __init__(self, scheduler: PipelineScheduler, fail_at: frozenset[int] = frozenset()) -> None:
        super().__init__(scheduler, fail_at)
        self.occupants = {}
        self.in_flight: deque[Returning] = deque()

    def launch(self, step: ScheduledStep) -> Returning:
        assert not any(
            not other.done and set(step.sequences[: step.num_decodes]) & {s for s, _ in other.rows}
            for other in self.in_flight
        ), "a sequence ran before its last token was sampled"
        self.occupants |= {sequence.batch_slot: sequence for sequence in step.admitted}
        known = list(self.last_tokens)
        late = super().launch(step)
        tokens = [self.last_tokens[e.sequence.batch_slot] for e in step if e.samples]
        self.last_tokens = known
        self.in_flight.append(Returning(self, step, late, tokens))
        return self.in_flight[-1]

    def discard_in_flight(self) -> None:
        for step in self.in_flight:
            if not step.done:
                with suppress(RuntimeError):
                    step.sample().wait()
        self.in_flight.clear()


def make_pipeline(
    *, fail_at: frozenset[int] = frozenset(), max_model_len: int = 4096, num_micro_batches: int = 3, **options: object
) -> PipelineEngine:
    scheduler = PipelineScheduler(num_micro_batches=num_micro_batches, **options)
    runner = StagesRunner(scheduler, fail_at)
    eos = frozenset({EOS})
    return PipelineEngine(scheduler, runner, tokenizer=FakeTokenizer(), eos_token_ids=eos, max_model_len=max_model_len)


@settings(max_examples=100, deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=20), settings_of_engine())
def test_whatever_arrives_aborts_or_fails_every_answer_is_the_one_it_would_get_alone(requests, options):
    run_and_compare(requests, options, make_pipeline)


@settings(max_examples=30, deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=20), settings_of_engine())
def test_and_so_it_is_with_whole_prompts(requests, options):
    options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], 40)
    run_and_compare(requests, options | {"enable_chunked_prefill": False}, make_pipeline)


@settings(max_examples=50, deadline=None)
@given(part=st.floats(0, 1))
def test_an_interrupt_at_any_line_costs_no_request_a_token(part):
    engines = [make_pipeline(num_blocks=14, block_size=2, max_num_seqs=4, max_num_batched_tokens=12) for _ in range(2)]
    expected, lines = answer_all(engines[0], INTERRUPTED, 0)
    found, _ = answer_all(engines[1], INTERRUPTED, int(part * lines))
    assert found.items() <= expected.items(), "what the interrupted call itself would have returned may be missing"
    assert len(found) >= len(expected) - 1 and engines[1].counters.num_aborted == 0
    assert engines[1].stats()["num_used_blocks"] == 0
    assert sorted(engines[1].scheduler._free_table_slots) == [0, 1, 2, 3]


def run_and_count(engine: PipelineEngine, requests: list[Request], count: Callable[[], int], longest: int) -> int:
    """Check every answer; returns the sum of `count()` over all steps."""
    for request in requests:
        engine.add_request(request, streams=False)
    total, outputs = 0, {}
    while engine.has_unfinished():
        outputs |= {event.request_id: event.output for event in engine.step() if event.output}
        total += count()
    assert [outputs[r.index]["token_ids"] for r in requests] == [answer_alone(r, longest)[0] for r in requests]
    return total


def test_a_sequence_preempted_in_flight_waits_for_its_token_and_keeps_its_batch_slot_until_then():
    engine = make_pipeline(**ROOMY | {"num_blocks": 12}, enable_prefix_caching=False)
    scheduler = engine.scheduler
    scheduler.watermark = lambda sequence: 0
    ends = (22, 9, 22)  # the second ends, and frees its blocks, while the preempted one is still in flight
    requests = [make_request(i, [i + 1] * 8, end, ignore_eos=True) for i, end in enumerate(ends)]

    def held() -> int:
        number = sum(sequence.num_in_flight > 0 for sequence in scheduler.waiting)
        assert not number or len(scheduler._free_table_slots) + scheduler.num_running < scheduler.max_num_seqs
        return number

    assert run_and_count(engine, requests, held, 4096), "no sequence was preempted in flight"


def test_a_sequence_preempted_in_flight_waits_for_its_token_also_where_the_order_takes_it_from_far_behind():
    engine = make_pipeline(**ROOMY | {"num_blocks": 12}, enable_prefix_caching=False)
    scheduler = engine.scheduler
    scheduler.watermark = lambda sequence: 0
    scheduler.order = Priority(len)
    requests = [make_request(i, [i % VOCAB] * 48, 1) for i in range(LOOKAHEAD)]  # as many tokens as the pool has
    requests += [make_request(LOOKAHEAD + i, [i + 1] * 8, end, ignore_eos=True) for i, end in enumerate((22, 9, 22))]

    def held_far_behind() -> int:
        return sum(sequence.num_in_flight > 0 for sequence in islice(scheduler.waiting, LOOKAHEAD, None))

    assert run_and_count(engine, requests, held_far_behind, 49), "no sequence was preempted in flight"


def test_chunks_of_a_prompt_are_in_flight_together():
    engine = make_pipeline(**ROOMY | {"max_num_batched_tokens": 8})
    engine.add_request(make_request(0, [3] * 24, 1), streams=False)
    for expected in ([False], [False] * 2, [False] * 3, [True, False, False]):  # after three the first is sampled
        engine.step()
        assert [step.done for step in engine.runner.in_flight] == expected


def test_no_more_batches_wait_for_their_samples_than_there_are_stages():
    engine = make_pipeline(**ROOMY | {"max_num_batched_tokens": 8})
    engine.add_request(make_request(0, [3] * 40, 1), streams=False)  # five chunks for three stages
    for sampled in (0, 0, 0, 1, 2):
        engine.step()
        assert [step.done for step in engine.runner.in_flight].count(True) == sampled


def test_a_request_that_arrives_is_prefilled_before_another_ones_batch_is_sampled():
    engine = make_pipeline(**ROOMY)
    for number in range(1, 4):
        engine.add_request(make_request(number, [number], 9, ignore_eos=True), streams=False)
        engine.step()
        assert [step.done for step in engine.runner.in_flight] == [False] * number


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_one_request_runs_on_before_its_last_token_is_on_the_host(batches):
    engine = make_pipeline(num_micro_batches=batches, **ROOMY)
    engine.add_request(make_request(0, [3], 9, ignore_eos=True), streams=False)
    for number in range(1, 10):
        engine.step()
        steps = engine.runner.in_flight
        assert len(steps) == number, "every call launches a step"
        assert [step.late.waited for step in steps] == [True] * (number - 1) + [False]


@pytest.mark.parametrize("batches", [1, 2, 3, 4, 5])
def test_running_sequences_are_divided_into_equal_batches(batches):
    engine = make_pipeline(num_micro_batches=batches, **ROOMY | {"max_num_seqs": 30})
    for i in range(30):
        engine.add_request(make_request(i, [i + 1], 20, ignore_eos=True), streams=False)
    run_all(engine)
    sizes = [len(step) for step in engine.runner.steps[1:]]
    for start in range(0, 9 * batches, batches):  # all of them in every round, and the last batch is the smallest
        *others, last = sizes[start : start + batches]
        assert set(others) <= {-(-30 // batches)} and sum(others) + last == 30


def test_a_sequence_that_gave_its_blocks_to_another_of_its_batch_does_not_run():
    engine = make_pipeline(num_micro_batches=1, **ROOMY | {"num_blocks": 3}, enable_prefix_caching=False)
    engine.scheduler.watermark = lambda sequence: 0
    requests = [make_request(i, [i + 1] * n, 5, ignore_eos=True) for i, n in enumerate((4, 2, 1))]
    for request in requests:  # a block each; then the first one takes the third one's, which needs none itself
        engine.add_request(request, streams=False)
    outputs = run_all(engine)
    assert engine.counters.num_preemptions > 0
    assert [outputs[i]["token_ids"] for i in range(3)] == [answer_alone(r, 4096)[0] for r in requests]


@pytest.mark.parametrize("fails", [False, True])
def test_batch_slots_come_back_when_their_tokens_have_arrived_or_the_step_has_failed(fails):
    engine = make_pipeline(**ROOMY | {"max_num_seqs": 2}, fail_at=frozenset({2}) if fails else frozenset())
    scheduler = engine.scheduler
    left = engine.add_request(make_request(0, [1], 9, ignore_eos=True), streams=False)
    engine.step()
    engine.abort(left)
    assert len(scheduler._free_table_slots) == 1, "its token is in flight"
    engine.add_request(make_request(1, [2], 9, ignore_eos=True), streams=False)
    with pytest.raises(RuntimeError, match="the device failed") if fails else nullcontext():
        run_all(engine)
    assert sorted(scheduler._free_table_slots) == [0, 1]


def test_a_scheduler_that_begins_again_remembers_no_batch_slot_that_was_in_use():
    scheduler = make_pipeline(**ROOMY | {"max_num_seqs": 2}).scheduler
    sequence = PipelineSequence(completion_of([1, 2, 3]))
    scheduler.add(sequence)
    scheduler.schedule()
    sequence.num_in_flight = 1
    scheduler.remove(sequence)
    scheduler.recover()
    sequence.num_in_flight = 0
    scheduler.release_slots()
    assert sorted(scheduler._free_table_slots) == [0, 1]
