"""An exception at any line of a call costs at most that call: the next call is correct, and no block is held.

A signal's handler may raise between any two lines, so every line of a call is a case; the tests take a sample of them.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from interrupts import interrupt_after
from stand_ins import forked_ranks

from contract.engines import NOTHING, PROMPTS, held
from stage_a_naive import SamplingParams
from stage_a_naive.contract.errors import EngineBroken

PARAMS = [
    SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.9, seed=3, max_tokens=6, ignore_eos=True, stop="zzz"),
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, repetition_penalty=1.1),
]
SHORT = [PROMPTS[0], PROMPTS[3], PROMPTS[2]]


def answers(llm, lines: int = 0) -> tuple[list, int]:
    """A call's answers, with an interrupt before line number `lines`, and how many lines were run."""
    with interrupt_after(lines) as countdown:
        outputs = llm.generate(SHORT, PARAMS, False)
    return [(output["token_ids"], output["text"]) for output in outputs], countdown.seen


def added_answers(llm, prompts: list, lines: int = 0, params: list = PARAMS) -> tuple[dict[int, list[int] | None], int]:
    """The answers to added requests by the prompt's index, with one interrupt, and how many lines were run.

    None: the request was added, and no step returned its answer.
    """
    indices: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    with interrupt_after(lines) as countdown:
        for index, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
            with suppress(KeyboardInterrupt):
                indices[llm.add_request(prompt, asked)] = index
        finished, num_steps = False, 0
        while not finished:
            num_steps += 1
            assert num_steps < 100, "a request is waited for that never runs"
            with suppress(KeyboardInterrupt):
                found |= {indices[request]: ids for request, ids in llm.step()[0] if request in indices}
                finished = llm.is_finished()
    return {index: found.get(index) for index in indices.values()}, countdown.seen


def some_of(num_lines: int, sample: int) -> range:
    return range(1, num_lines, max(1, num_lines // sample))


def test_an_interrupt_at_any_line_of_a_call_costs_the_next_one_nothing(engine) -> None:
    with forked_ranks():
        llm = engine.make()
    answers(llm)  # warm-up, and the prefix cache
    expected, num_lines = answers(llm)
    precision = torch.get_float32_matmul_precision()
    for lines in some_of(num_lines, sample=8 if "one process" in engine.has else 3):
        with suppress(KeyboardInterrupt, EngineBroken):  # an interrupt after the last token may be too late
            answers(llm, lines)
        try:
            found, _ = answers(llm)
        except EngineBroken:
            assert "one process" not in engine.has, "only ranks that lost one another need a new engine"
            llm.close()
            with forked_ranks():
                llm = engine.make()
            found, _ = answers(llm)
        assert found == expected, f"after an interrupt at line {lines} of {num_lines}"
        assert torch.is_grad_enabled() and torch.get_float32_matmul_precision() == precision
    llm.close()


@pytest.mark.needs("pool", "one process")
def test_an_interrupt_at_any_line_of_a_step_costs_no_request_a_token(engine) -> None:
    with engine.made(num_kvcache_blocks=24, kvcache_block_size=4, max_num_batched_tokens=8, max_num_seqs=4) as llm:
        expected, num_lines = added_answers(llm, SHORT)
        for lines in some_of(num_lines, sample=20):
            found, _ = added_answers(llm, SHORT, lines)
            assert found.items() <= expected.items(), f"line {lines} of {num_lines}"
            assert len(found) >= len(expected) - 1, "only a request whose id was not returned has no answer"
            assert held(llm) == NOTHING


@pytest.mark.slow
@pytest.mark.needs("pool", "one process")
def test_an_interrupt_at_any_line_of_an_only_step_is_no_error_of_the_steps_after(engine, llm) -> None:
    """Interrupt every line once, for a request that arrives and ends in one step."""
    one = [SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)]
    expected, num_lines = added_answers(llm, SHORT[:1], params=one)
    for lines in range(1, num_lines + 1):
        found, _ = added_answers(llm, SHORT[:1], lines, one)
        assert found in (expected, {}) and llm.is_finished(), f"line {lines} of {num_lines}"
