"""Whatever arrives, is guessed, is aborted, fails or is interrupted: every answer is the one it would get alone.

On the fake model, for every way in which an engine works ahead. Stage E's own such tests are in `test_stage_e_fuzz.py`
and `test_stage_e_interrupts.py`.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
from examples import examples
from fake_engines import ROWS, Make
from fake_model import check_books, make_calls, make_request
from hypothesis import given
from hypothesis import strategies as st
from interrupts import answer_all
from test_stage_e_fuzz import arrivals, arrivals_of, run_and_compare, settings_of_engine

from beyond.windows.blocks import HybridBlockManager
from stage_e_batching.calls import Calls
from stage_e_batching.scheduler import WATERMARK, Scheduler
from stage_e_batching.step import ScheduledStep

ROW_PARAMS = [pytest.param(row, marks=() if row == "guesses of the device" else pytest.mark.fast) for row in ROWS]

requests = st.lists(arrivals, min_size=1, max_size=20)
seeds, error_rates = st.integers(0, 2**16), st.sampled_from([0.0, 0.2, 0.6, 1.0])


@pytest.mark.parametrize("row", ROW_PARAMS)
@examples(20)
@given(requests, settings_of_engine(), seeds, error_rates, st.booleans())
def test_whatever_arrives_aborts_or_fails_every_answer_is_the_one_it_would_get_alone(
    row, requests, options, seed, rate, whole_prompts
):
    if whole_prompts and row in ("one step ahead", "guesses, no overlap", "stages"):  # the others wait with it
        options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], 40)
        options["enable_chunked_prefill"] = False
    run_and_compare(requests, options, ROWS[row](seed, rate))


# ---- a waiting request comes in as soon as it fits -------------------------------------------------------------------


@st.composite
def tight_settings(draw) -> dict[str, object]:
    """An engine with room for one or two requests, one of them with penalties, and often one token per step."""
    max_num_seqs, block_size = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 5]))
    return {
        "block_size": block_size,
        "num_blocks": -(-5 // block_size) + draw(st.integers(0, 4)),
        "max_num_seqs": max_num_seqs,
        "max_num_penalty_seqs": 1,
        "max_num_batched_tokens": draw(st.sampled_from([max_num_seqs, 2, 16])),
        "enable_prefix_caching": draw(st.booleans()),
        "max_model_len": 4096,
        "fail_at": frozenset(draw(st.lists(st.integers(1, 20), max_size=1))),
    }


def check_first_in_line(scheduler: Scheduler, step: ScheduledStep) -> None:
    """Fail if the step leaves the first waiting request out although it fits."""
    full = step.total_tokens == scheduler.max_num_batched_tokens
    if not scheduler.waiting or step.preempted or full:
        return
    first = scheduler.waiting[0]
    needed = scheduler.block_manager.blocks_for(len(first)) + scheduler.watermark(first)
    fits = scheduler.free_slots_for(first) and needed <= scheduler.block_manager.num_free
    if isinstance(scheduler.block_manager, HybridBlockManager):
        fits = fits and scheduler.block_manager.windows.has_room(first)
    lacks_token = any(sequence.num_in_flight for sequence in scheduler.waiting)  # it is computed again with that one
    assert lacks_token or not fits, f"request {first.request_id} fits and waits: {step}"


@pytest.mark.parametrize("row", ["one step at a time", *ROWS])
@examples(14)
@given(
    st.lists(arrivals_of(5, 10), min_size=1, max_size=8),
    tight_settings(),
    seeds,
    error_rates,
    st.integers(1, 3),
    st.sampled_from([1, WATERMARK]),
)
def test_a_waiting_request_comes_in_as_soon_as_it_fits_and_few_schedules_make_each_token(
    row, requests, options, seed, rate, batches, watermark
):
    make, num_schedules = make_calls if row == "one step at a time" else ROWS[row](seed, rate), 0
    if "stages" in row:
        options["num_micro_batches"] = batches

    def make_watched(**options: object) -> Calls:
        calls = make(**options)
        scheduler = calls.engine.scheduler
        schedule = scheduler.schedule

        def watched() -> ScheduledStep:
            nonlocal num_schedules
            num_schedules += 1
            step = schedule()
            check_first_in_line(scheduler, step)
            return step

        scheduler.schedule = watched
        return calls

    with patch("stage_e_batching.scheduler.WATERMARK", watermark):  # with the usual one few requests run together here
        run_and_compare(requests, options, make_watched)
    num_tokens = sum(len(request.prompt) + request.max_tokens for request in requests)
    last_arrival = max(request.step for request in requests)
    assert num_schedules <= last_arrival + 3 * num_tokens


# ---- interrupts ------------------------------------------------------------------------------------------------------

LENGTHS = (5, 1, 9, 3, 7)  # of the prompts; together with the answers more than the pool holds
REQUESTS = [make_request(i, [(7 * i + j) % 50 + 3 for j in range(n)], 8 + i, True) for i, n in enumerate(LENGTHS)]
SMALL = {"num_blocks": 14, "block_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 24}


def small_engine(make: Make) -> Calls:
    calls = make(**SMALL)
    calls.engine.scheduler.watermark = lambda sequence: 0  # every request that fits is admitted, and preempted again
    return calls


@pytest.fixture(scope="module", params=ROW_PARAMS[1:])  # of the first one: test_stage_e_interrupts.py
def make_and_expected(request: pytest.FixtureRequest) -> tuple[Make, tuple[dict, int]]:
    make = lambda **options: ROWS[request.param](0, 0.2)(**options)  # noqa: E731  # guesses begin anew
    calls = small_engine(make)
    expected = answer_all(calls, REQUESTS, 0)
    assert calls.engine.counters.num_preemptions > 0
    assert getattr(calls.engine.counters, "num_accepted_tokens", 2) > 1
    return make, expected


@examples(9)
@given(part=st.floats(0, 1))
def test_an_interrupt_at_any_line_costs_no_request_a_token(make_and_expected, part):
    make, (expected, lines) = make_and_expected
    calls = small_engine(make)
    found, _ = answer_all(calls, REQUESTS, int(part * lines))
    assert found.items() <= expected.items(), "what the interrupted call itself would have returned may be missing"
    assert len(found) >= len(expected) - 1 and calls.engine.counters.num_aborted == 0
    assert calls.stats()["num_used_blocks"] == 0
    check_books(calls)
    assert sorted(calls.engine.scheduler.free_slots_like(0)) == [0, 1, 2, 3]
