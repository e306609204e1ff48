"""Steps with prompt tokens run in graphs padded to a number of tokens, whatever their mixture, and change no token.

A graph is recorded by the first step that needs it, so only later steps count as replays.

`EagerRecorder` stands in for CUDA graphs, which a CPU does not have; all that surrounds them is the same there.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from contract.engines import GREEDY, PROMPTS, ask, one_by_one
from stand_ins import forwards_of
from test_stage_f_graphs import build

import stage_e_batching
from stage_f_graph_tp.cuda_graph import DecodeGraphs
from stage_f_graph_tp.last_tokens import LastTokens
from stage_f_graph_tp.prefill_graphs import PrefillGraphs, prefill_sizes
from stage_f_graph_tp.step_input import StepShape, host_views


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    llm = stage_e_batching.LLM("random:qwen2-tiny", device="cpu", kvcache_block_size=4, num_kvcache_blocks=512)
    return ask(llm, PROMPTS)


@pytest.mark.parametrize("limit", [2, 15, 16, 17, 1000, 4096, 16384])
def test_sizes_end_with_the_largest_step_or_4096(limit):
    sizes = prefill_sizes(limit)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(limit, 4096)


def test_every_mixture_has_room_for_its_sequences_and_one_of_padding():
    graphs = PrefillGraphs([4, 16, 64], max_num_seqs=8, table_width=6, max_model_len=64, tokens=None)
    recorded = {(shape.num_tokens, shape.num_seqs) for shape in graphs.shapes}
    for tokens in range(1, 66):
        for seqs in range(1, min(tokens, 8) + 1):
            shape = StepShape(tokens, seqs, seqs, 2, seqs - 1, tokens - seqs + 1, tokens)
            padded = graphs.takes(shape)
            if tokens > 64:
                assert padded is None
                continue
            assert (padded.num_tokens, padded.num_seqs) in recorded and padded.num_decodes == seqs - 1
            assert padded.num_tokens == min(size for size in (4, 16, 64) if size >= tokens)
            assert (padded.num_seqs == 1) == (seqs == 1 and tokens > 1)
            assert padded.num_seqs == 1 or padded.num_seqs > seqs
            assert (padded.table_width, padded.max_context_len) == (6, 64)
            assert graphs.takes(padded) == padded


@pytest.mark.parametrize("seqs", [1, 4, 8])
def test_padding_is_one_more_sequence_with_the_tokens_that_are_left_and_then_empty_ones(seqs):
    tokens = LastTokens(8, torch.device("cpu"))
    graphs = PrefillGraphs([16], max_num_seqs=8, table_width=6, max_model_len=64, tokens=tokens)
    exact = StepShape(12, seqs, seqs - 1, 2, seqs - 1, 13 - seqs, 12)
    shape = graphs.takes(exact._replace(num_seqs=max(seqs, 2)))
    host = host_views(np.full(shape.num_bytes, 99, np.uint8), shape)  # as an earlier step may have left it
    ends = [*range(seqs), 12]
    host.cu_seqlens_q[: seqs + 1] = ends
    graphs.pad(host, exact)
    assert host.cu_seqlens_q.tolist() == ends + [16] * (9 - seqs)
    assert host.context_lens[seqs:].tolist() == [0] * (9 - seqs) and host.slot_mapping[12:].tolist() == [-1] * 4
    assert host.sample_slots[seqs - 1 :].tolist() == [8] * (10 - seqs), "no request's"
    assert not host.sample_tokens[seqs - 1 :].any() and not host.sampling.rules[seqs - 1 :].any()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [7, 16, 50, 512])
def test_chunks_beside_decodes_give_stage_es_tokens(expected, overlap, budget):
    llm, replays = build(
        [1, 2, 4, 8],
        prefills=prefill_sizes(budget),
        max_num_seqs=8,
        max_num_batched_tokens=max(budget, 8),
        kvcache_block_size=4,
        num_kvcache_blocks=512,
        without="" if overlap else "overlap",
    )
    for _ in range(2):  # the second time with a prefix cache
        assert ask(llm, PROMPTS) == expected
    assert one_by_one(llm) == expected
    chunks = sum(count for name, count in replays.items() if isinstance(name, str))
    assert chunks >= (5 if budget == 16 else 1)
    assert llm.calls.stats()["num_used_blocks"] == 0


def test_steps_of_one_token_have_no_prefill_graph(expected):
    sizes = prefill_sizes(1)
    llm, replays = build(
        [1], prefills=sizes, max_num_seqs=1, max_num_batched_tokens=1, kvcache_block_size=4, num_kvcache_blocks=512
    )
    assert not sizes and not forwards_of(llm.runner, PrefillGraphs)
    assert ask(llm, PROMPTS[:2], GREEDY) == expected[:2]
    assert replays[1] > 0, "decode steps have their graph all the same"


def test_larger_steps_run_eagerly(expected):
    llm, replays = build([8], prefills=(4, 16), max_num_seqs=8, kvcache_block_size=4, num_kvcache_blocks=512)
    assert ask(llm, PROMPTS) == expected
    assert set(replays) == {8}
    for _ in range(3):
        assert ask(llm, PROMPTS[:1], GREEDY) == expected[:1]
    assert replays[1] == 2, "the prompt's three tokens, and the sampled one"


def test_more_decodes_than_the_largest_decode_graph_run_in_one_of_prefill():
    prompts = [[i % 4000 + 1] for i in range(6)]
    llm, replays = build([1, 2], prefills=(16,), max_num_seqs=6, kvcache_block_size=4, num_kvcache_blocks=64)
    stage_e = stage_e_batching.LLM("random:qwen2-tiny", device="cpu")
    assert ask(llm, prompts, GREEDY) == ask(stage_e, prompts, GREEDY)
    assert replays["16 tokens"] == GREEDY.max_tokens - 1


def test_a_closed_engine_holds_no_graph():
    llm, _ = build([1, 2], prefills=(16,), max_num_seqs=6, kvcache_block_size=4, num_kvcache_blocks=64)
    assert forwards_of(llm.runner, DecodeGraphs) and forwards_of(llm.runner, PrefillGraphs)
    llm.close()
    assert llm.runner.forwards == [llm.runner.layers], "NCCL waits for graphs that hold it"
