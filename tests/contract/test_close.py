"""A closed engine refuses calls, in the same words everywhere."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from contract.engines import GREEDY, PROMPTS, ask, waiting_call

CLOSED = "^this engine is closed; make a new LLM$"


def test_a_closed_engine_refuses_in_the_same_words_and_closes_twice(engine) -> None:
    with engine.made() as llm:
        llm.close()
    llm.close()
    others = [getattr(llm, name) for name in ("stream", "add_request") if hasattr(llm, name)]
    for call in (llm.generate, llm.chat, lambda text: llm.chat([{"content": text}]), *others):
        with pytest.raises(RuntimeError, match=CLOSED):
            call("abc")
    if hasattr(llm, "step"):
        with pytest.raises(RuntimeError, match=CLOSED):
            llm.step()


@pytest.mark.needs("calls in turn")
def test_a_call_that_waited_for_its_turn_while_the_engine_was_closed_is_refused(engine) -> None:
    llm = engine.make()
    with ThreadPoolExecutor(1) as threads, waiting_call(llm, PROMPTS[0]) as (first, go_on):
        second = threads.submit(ask, llm, "abc")
        time.sleep(0.05)  # until it waits for its turn; if it comes later still, it is refused as well
        llm.close()
        go_on.set()
        with pytest.raises(RuntimeError, match=CLOSED):
            second.result(60)
        assert len(first.result(60)[0]) == GREEDY.max_tokens
