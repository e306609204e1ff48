"""A request that is aborted ends alone, and is nobody else's error."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from contract.engines import GREEDY, PROMPTS, ask, finish

pytestmark = pytest.mark.needs("side by side")


def test_an_abort_from_another_thread_is_an_error_of_the_call_that_waits(llm, expected) -> None:
    begun, aborted = threading.Event(), threading.Event()

    def wait_for_the_abort(*_: object) -> None:
        begun.set()
        assert aborted.wait(60)

    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(llm.generate, [PROMPTS[1]], GREEDY, False, wait_for_the_abort)
        assert begun.wait(60)
        [sequence] = llm.engine.scheduler.unfinished
        assert llm.calls.abort(sequence.request_id)
        aborted.set()
        with pytest.raises(RuntimeError, match=r"request \d+ was aborted by another call"):
            call.result(60)
    assert ask(llm, PROMPTS[:1]) == expected[:1]


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_request_that_was_added_and_aborted_is_no_error_of_the_steps_after(llm, expected, num_steps: int) -> None:
    aborted = llm.add_request(PROMPTS[0], replace(GREEDY, max_tokens=100))
    kept = llm.add_request(PROMPTS[1], GREEDY)
    outputs: dict[int, list[int]] = {}
    for _ in range(num_steps):
        outputs.update(llm.step()[0])
    assert llm.calls.abort(aborted) and not llm.calls.abort(aborted)
    assert outputs | finish(llm) == {kept: expected[1]}
