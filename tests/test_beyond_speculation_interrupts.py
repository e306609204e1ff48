"""Ctrl-C at any line of a step with guesses costs no request a token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_model import check_books, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import answer_all
from test_beyond_speculation import HashDrafter
from test_beyond_speculation import make_engine as make_guessing_host
from test_beyond_speculation_ahead import make_engine as make_guessing_device

from stage_e_batching.engine import Engine

LENGTHS = (5, 1, 9, 3, 7)  # of the prompts; together with the answers more than the pool holds
REQUESTS = [make_request(i, [(7 * i + j) % 50 + 3 for j in range(n)], 8 + i, True) for i, n in enumerate(LENGTHS)]
POOL = {"num_blocks": 14, "block_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 24}
HOST = {"draft_tokens": 4, **POOL}
ENGINES = {
    "on the host": lambda: make_guessing_host(drafter=HashDrafter(0, 0.2, 4), **HOST),
    "on the host, no overlap": lambda: make_guessing_host(drafter=HashDrafter(0, 0.2, 4), overlap=False, **HOST),
    "on the device": lambda: make_guessing_device(error_rate=0.2, **POOL),
}


def outputs_of(engine: Engine, lines: int) -> tuple[dict[int, list[int]], int]:
    engine.scheduler.watermark = lambda sequence: 0  # whoever fits comes in, and has to go again
    return answer_all(engine, REQUESTS, lines)


@pytest.fixture(scope="module", params=ENGINES)
def make_and_expected(request: pytest.FixtureRequest) -> tuple[Callable[[], Engine], tuple[dict, int]]:
    make = ENGINES[request.param]
    engine = make()
    expected = outputs_of(engine, 0)
    assert engine.counters.num_accepted_tokens > 5 and engine.counters.num_preemptions > 0
    return make, expected


@settings(max_examples=25, deadline=None)
@given(part=st.floats(0, 1))
def test_an_interrupt_at_any_line_costs_no_request_a_token(make_and_expected: tuple, part: float) -> None:
    make, (expected, lines) = make_and_expected
    engine = make()
    found, _ = outputs_of(engine, int(part * lines))
    assert found.items() <= expected.items(), "what the interrupted call itself would have returned may be missing"
    assert len(found) >= len(expected) - 1 and engine.counters.num_aborted == 0
    assert engine.stats()["num_used_blocks"] == 0
    check_books(engine)
    assert sorted(engine.scheduler._free_table_slots) == [0, 1, 2, 3]
