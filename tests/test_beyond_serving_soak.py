"""The soak over HTTP, for seconds: clients that leave, err or are too many, and correct answers for all others."""

from __future__ import annotations

import asyncio
import os
from contextlib import closing

import pytest
from serving import assert_idle, running

import stage_e_batching
from tools.soak.over_http import HttpSoak, questions
from tools.soak.tally import verdict


@pytest.mark.slow
def test_random_clients_get_right_answers_or_a_reason_and_leave_nothing_behind():
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "max_model_len": 160, "kvcache_block_size": 8}
    with closing(stage_e_batching.LLM("tutor", device="cpu", dtype="float32", num_kvcache_blocks=48, **options)) as llm:
        asked = questions(llm, seed=0, most_tokens=24)
        with running(llm, max_queue=40) as server:
            soak = HttpSoak(server.url, os.getpid(), 48, asked, seed=0)

            async def load() -> None:
                await soak.send(50)
                await soak.note(0.0)
                await soak.ask_all()
                await soak.note(1.0)

            asyncio.run(load())
            assert server.llm.num_unfinished == 0
        tally = soak.tally
        assert verdict(tally) == [] and tally.compared > len(asked) and tally.finished and tally.refused
        assert_idle(llm)
