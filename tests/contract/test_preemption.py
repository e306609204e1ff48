"""A pool that is too small refuses, shortens or preempts, and changes no token."""

from __future__ import annotations

import pytest

from contract.engines import GREEDY, PROMPTS, ask, one_by_one


@pytest.mark.needs("pool", "one process")
def test_a_pool_that_is_too_small_refuses_shortens_or_preempts_and_changes_no_token(engine) -> None:
    with engine.made(num_kvcache_blocks=2, kvcache_block_size=4) as small:
        with pytest.raises(ValueError, match="prompt 1: 9 tokens take 3 blocks of 4 tokens, and the KV pool has 2"):
            ask(small, [PROMPTS[0], [1] * 9])
        outputs = small.generate([PROMPTS[0]] * 2, GREEDY, False)
    with engine.made(num_kvcache_blocks=16, kvcache_block_size=4) as tight:
        expected = one_by_one(tight)
        assert [o["token_ids"] for o in outputs] == [expected[0][:6]] * 2, "eight slots, and the last token needs none"
        assert {output["finish_reason"] for output in outputs} == {"length"}
        assert ask(tight, PROMPTS) == expected
