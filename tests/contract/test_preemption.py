"""A pool that is too small refuses, shortens or preempts, and changes no token."""

from __future__ import annotations

import pytest

from contract.engines import GREEDY, NOTHING, PROMPTS, ask, held, ids, one_by_one
from stage_a_naive import SamplingParams

LONG = [  # two of them do not fit into a pool of 64 slots, and both are admitted
    SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=45, ignore_eos=True, repetition_penalty=1.2)
    for i in range(3)
]
SHORT = [PROMPTS[0], PROMPTS[3], PROMPTS[0][::-1]]


@pytest.mark.needs("pool", "one process")
def test_what_a_pool_cannot_hold_is_refused_and_what_outgrows_it_ends_there(engine, expected) -> None:
    with engine.made(num_kvcache_blocks=2, kvcache_block_size=4) as small:
        with pytest.raises(ValueError, match="prompt 1: 9 tokens take 3 blocks of 4 .* KV pool has 2; .*num_kvcache"):
            ask(small, [PROMPTS[0], [1] * 9])
        assert small.is_finished()
        outputs = small.generate([PROMPTS[0]] * 2, GREEDY, False)
        assert ids(outputs) == [expected[0][:6]] * 2, "eight slots, three of the prompt, and the last token needs none"
        assert {output["finish_reason"] for output in outputs} == {"length"}
        assert held(small) == NOTHING


@pytest.mark.needs("pool", "one process")
def test_a_request_that_outgrows_the_pool_ends_in_the_step_of_its_last_token(engine, expected) -> None:
    with engine.made(num_kvcache_blocks=2, kvcache_block_size=4) as small:
        request = small.add_request(PROMPTS[0], GREEDY)
        steps = [small.step()[0]]
        while not small.is_finished():
            steps.append(small.step()[0])
        assert steps[-1] == [(request, expected[0][:6])] and not any(steps[:-1])


@pytest.mark.needs("pool", "one process")
def test_a_tight_pool_changes_no_token(engine, expected) -> None:
    with engine.made(num_kvcache_blocks=16, kvcache_block_size=4) as tight:
        assert ask(tight, PROMPTS) == expected
        assert held(tight) == NOTHING


@pytest.mark.needs("side by side", "one process")
def test_preempted_requests_with_seeds_and_penalties_get_the_tokens_that_they_get_alone(engine) -> None:
    with engine.made(num_kvcache_blocks=16, kvcache_block_size=4) as tight:
        alone = one_by_one(tight, LONG, SHORT)
        assert tight.calls.stats()["num_preemptions"] == 0
        assert ask(tight, SHORT, LONG) == alone
        assert tight.calls.stats()["num_preemptions"] > 0, "or the pool is not tight"
        assert held(tight) == NOTHING
