"""Recorded steps of pipeline stages: the tokens of one rank, with as many replays on every stage as there are steps.

A CPU has no CUDA graphs, but the code around them is the same: `EagerRecorder` stands in for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from contract.engines import GREEDY, MODEL, ask
from ranks import MIXED, SHARING, admit_whoever_fits, recording_ranks
from stand_ins import countdown
from test_beyond_scale_out_pipeline import TIGHT

import stage_e_batching
from beyond.options import Options
from beyond.ranks import Job
from beyond.scale_out import LLM
from beyond.scale_out.pipeline_ranks import most_decodes


@pytest.fixture
def replays() -> Iterator[Callable[[int], dict[int, int]]]:
    """Let every rank record its steps when it is built; tells how often each of them was replayed."""
    with recording_ranks([1, 2, 4], [16, 20], Job) as replays_of:
        yield replays_of


def test_every_stage_replays_every_decode_step_and_stage_0_the_sampling_too(replays):
    single = stage_e_batching.LLM(MODEL, device="cpu", num_kvcache_blocks=256)
    with closing(LLM(MODEL, device="cpu", pipeline_parallel_size=2, num_kvcache_blocks=256)) as llm:
        prompts, params = countdown(8)  # two batches of 4, 3, 2 and 1 sequences
        assert ask(llm, prompts, params) == ask(single, prompts, params)
    first, second = map(replays, range(2))
    assert second.keys() == {1, 2, 4}, "the prefill is recorded by the step that needs it"
    assert first == {rows: 2 * count for rows, count in second.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipeline_parallel_size": 3, "num_micro_batches": 4},
        {"tensor_parallel_size": 2, "num_micro_batches": 1},
    ],
    ids=str,
)
def test_recorded_stages_give_one_ranks_tokens_under_preemption_and_with_cached_prefixes(replays, options):
    single = stage_e_batching.LLM("tutor", device="cpu", num_kvcache_blocks=256)
    with closing(LLM("tutor", device="cpu", **{"pipeline_parallel_size": 2} | TIGHT | options)) as llm:
        admit_whoever_fits(llm)
        for params in (GREEDY, MIXED, GREEDY):
            assert ask(llm, SHARING, params) == ask(single, SHARING, params)
        assert llm.engine.counters.num_preemptions > 0 and llm.engine.counters.num_cached_tokens > 0
    for rank in range(llm.options.num_ranks):
        found = replays(rank)
        assert found[16] and found[20] and sum(found.get(rows, 0) for rows in (1, 2, 4)) > 10, found


def test_a_step_of_more_sequences_than_a_share_is_not_recorded():
    options = Options(pipeline_parallel_size=2, max_num_seqs=65)
    assert most_decodes(options) == 33
    assert most_decodes(replace(options, num_micro_batches=1)) == 65
