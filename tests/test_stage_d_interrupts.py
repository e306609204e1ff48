"""Ctrl-C at any line of stage D costs at most what the interrupted call would have returned."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import interrupt_after

from stage_a_naive.outputs import Completion
from stage_d_paged import LLM, SamplingParams

PROMPTS = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (3, 12, 9, 5)]
PARAMS = [SamplingParams(temperature=0, max_tokens=3 + i, ignore_eos=True, logprobs=1) for i in range(len(PROMPTS))]


def answer_added(llm: LLM, lines: int) -> tuple[dict[int, list[int]], int]:
    """Add the prompts and step until all are answered, with an interrupt before line number `lines`.

    Returns:
        The answers by the prompt's index, and how many lines were run.
    """
    indices: dict[int, int] = {}
    answers: dict[int, list[int]] = {}
    with interrupt_after(lines) as countdown:
        for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            with suppress(KeyboardInterrupt):
                indices[llm.add_request(prompt, params)] = index
        finished, num_steps = False, 0
        while not finished:
            num_steps += 1
            assert num_steps < 100, "a request is waited for that never runs"
            with suppress(KeyboardInterrupt):
                answers |= {indices[request_id]: ids for request_id, ids in llm.step()[0] if request_id in indices}
                finished = llm.is_finished()
    return answers, countdown.seen


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=24, kvcache_block_size=4, max_num_batched_tokens=8)


@pytest.fixture(scope="module")
def undisturbed(llm: LLM) -> tuple[dict[int, list[int]], int]:
    return answer_added(llm, 0)


@settings(max_examples=100, deadline=None)
@given(part=st.floats(0, 1))
def test_an_interrupt_at_any_line_costs_no_request_a_token(llm: LLM, undisturbed: tuple, part: float) -> None:
    expected, lines = undisturbed
    found, _ = answer_added(llm, int(part * lines))
    assert found.items() <= expected.items() and len(found) >= len(expected) - 1


def test_an_interrupt_behind_the_last_token_of_all_is_not_the_next_steps_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    request = llm.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Completion, "finish", interrupted)
        llm.step()
    [(found, token_ids)], _ = llm.step()
    assert found == request and len(token_ids) == 1
    assert llm.is_finished()


def test_a_request_that_an_interrupt_kept_from_arriving_is_not_waited_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(type(llm.engine.waiting)):
        def append(self, _: object) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine, "waiting", Interrupted())
        llm.add_request([1, 2, 3], PARAMS[0])
    assert llm.is_finished()
