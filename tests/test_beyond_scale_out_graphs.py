"""Recorded steps of pipeline stages: the tokens of one rank, with as many replays on every stage as there are steps.

A CPU has no CUDA graphs, but all that surrounds them is the same there: `EagerRecorder` stands in for them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from multiprocessing import RawArray

import pytest
from test_beyond_scale_out_pipeline import GREEDY, MIXED, PROMPTS, TIGHT, ids
from test_stage_f_graphs import EagerRecorder, countdown

import stage_e_batching
from beyond.scale_out import LLM
from beyond.scale_out.options import ScaleOutOptions
from beyond.scale_out.pipeline_ranks import PipelineJob
from beyond.scale_out.pipeline_runner import PipelineRunner
from labs.tests.forks import fork_worker
from stage_f_graph_tp.tensor_parallel import workers

RANKS, MOST = 4, 64  # of the replays that are counted: by rank, and rows of what was replayed


@pytest.fixture
def replays(monkeypatch) -> RawArray:
    """Let every rank record its steps when it is built; returns how often each of them was replayed."""
    counts, build = RawArray("i", RANKS * MOST), PipelineJob.build

    def build_and_record(self, rendezvous, others=None):
        runtime, runner = build(self, rendezvous, others)
        recorder = EagerRecorder(SharedCounter(counts, rendezvous.rank))
        runner.capture(recorder, [1, 2, 4], [16, 20])
        return runtime, runner

    monkeypatch.setattr(PipelineJob, "build", build_and_record)
    monkeypatch.setattr(workers, "_start_worker", fork_worker)
    return counts


class SharedCounter(Counter):
    """The counter of one rank, kept where rank 0 can read it."""

    def __init__(self, counts: RawArray, rank: int) -> None:
        super().__init__()
        self.counts, self.rank = counts, rank

    def __setitem__(self, key: int | str, value: int) -> None:
        super().__setitem__(key, value)
        rows = key if isinstance(key, int) else int(key.removesuffix(" tokens"))
        self.counts[self.rank * MOST + rows] = sum(self[same] for same in (rows, f"{rows} tokens"))


def replays_of(counts: RawArray, rank: int) -> dict[int, int]:
    own = counts[rank * MOST : (rank + 1) * MOST]
    return {rows: count for rows, count in enumerate(own) if count}


def test_every_stage_replays_every_decode_step_and_stage_0_the_sampling_too(replays):
    single = stage_e_batching.LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=256)
    llm = LLM("random:qwen2-tiny", device="cpu", pipeline_parallel_size=2, num_kvcache_blocks=256)
    try:
        prompts, params = countdown(8)  # two batches of 4, 3, 2 and 1 sequences
        assert ids(llm.generate(prompts, params, False)) == ids(single.generate(prompts, params, False))
    finally:
        llm.close()
    first, second = (replays_of(replays, rank) for rank in range(2))
    assert second.keys() == {1, 2, 4, 16}, "the last of the prefill"
    assert first == {rows: count if rows == 16 else 2 * count for rows, count in second.items()}


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
    llm = LLM("tutor", device="cpu", **{"pipeline_parallel_size": 2} | TIGHT | options)
    llm.engine.scheduler.watermark = lambda sequence: 0
    try:
        for params in (GREEDY, MIXED, GREEDY):
            assert ids(llm.generate(PROMPTS, params, False)) == ids(single.generate(PROMPTS, params, False))
        assert llm.engine.counters.num_preemptions > 0 and llm.engine.counters.num_cached_tokens > 0
    finally:
        llm.close()
    for rank in range(llm.options.num_ranks):
        found = replays_of(replays, rank)
        assert found[16] and found[20] and sum(found.get(rows, 0) for rows in (1, 2, 4)) > 10, found


def test_a_step_of_more_sequences_than_a_share_is_not_recorded():
    options = ScaleOutOptions(pipeline_parallel_size=2, max_num_seqs=65)
    assert PipelineRunner.most_decodes(None, options) == 33
    assert PipelineRunner.most_decodes(None, replace(options, num_micro_batches=1)) == 65
