"""Whatever arrives, is guessed, is aborted, fails or is interrupted: every answer is the one it would get alone.

On the fake model, for every way in which an engine works ahead. Stage E's own such tests are in `test_stage_e_fuzz.py`
and `test_stage_e_interrupts.py`.
"""

from __future__ import annotations

import pytest
from fake_engines import ROWS, Make
from fake_model import check_books, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import answer_all
from test_stage_e_fuzz import arrivals, run_and_compare, settings_of_engine

from stage_e_batching.calls import Calls

ROW_PARAMS = [pytest.param(row, marks=() if row == "guesses of the device" else pytest.mark.fast) for row in ROWS]

requests = st.lists(arrivals, min_size=1, max_size=20)
seeds, error_rates = st.integers(0, 2**16), st.sampled_from([0.0, 0.2, 0.6, 1.0])


@pytest.mark.parametrize("row", ROW_PARAMS)
@settings(max_examples=60, deadline=None)
@given(requests, settings_of_engine(), seeds, error_rates, st.booleans())
def test_whatever_arrives_aborts_or_fails_every_answer_is_the_one_it_would_get_alone(
    row, requests, options, seed, rate, whole_prompts
):
    if whole_prompts and row in ("one step ahead", "guesses, no overlap", "stages"):  # the others wait with it
        options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], 40)
        options["enable_chunked_prefill"] = False
    run_and_compare(requests, options, ROWS[row](seed, rate))


LENGTHS = (5, 1, 9, 3, 7)  # of the prompts; together with the answers more than the pool holds
REQUESTS = [make_request(i, [(7 * i + j) % 50 + 3 for j in range(n)], 8 + i, True) for i, n in enumerate(LENGTHS)]
SMALL = {"num_blocks": 14, "block_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 24}


def small_engine(make: Make) -> Calls:
    calls = make(**SMALL)
    calls.engine.scheduler.watermark = lambda sequence: 0  # whoever fits comes in, and has to go again
    return calls


@pytest.fixture(scope="module", params=ROW_PARAMS[1:])  # of the first one: test_stage_e_interrupts.py
def make_and_expected(request: pytest.FixtureRequest) -> tuple[Make, tuple[dict, int]]:
    make = lambda **options: ROWS[request.param](0, 0.2)(**options)  # noqa: E731  # guesses begin anew
    calls = small_engine(make)
    expected = answer_all(calls, REQUESTS, 0)
    assert calls.engine.counters.num_preemptions > 0
    assert getattr(calls.engine.counters, "num_accepted_tokens", 2) > 1
    return make, expected


@settings(max_examples=25, deadline=None)
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
