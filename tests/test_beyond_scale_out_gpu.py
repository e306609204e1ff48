"""Pipeline stages on GPUs: the tokens of one GPU, busy times of kernels, an error when a stage is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from contract.engines import GREEDY, ids
from ranks import MIXED, admit_whoever_fits, children
from ranks import SHARING as PROMPTS
from stand_ins import countdown

import stage_e_batching
from beyond.scale_out import LLM
from beyond.scale_out.spans import idle_share, read_spans
from stage_a_naive.sampling import SamplingParams
from stage_f_graph_tp.tensor_parallel import WorkerError

ASKED = [[{"role": "user", "content": question}] for question in ("What is a KV cache?", "What is prefill?")]
PARAMS = SamplingParams(temperature=0, max_tokens=48)
SMALL = {"device": "cuda", "gpu_memory_utilization": 0.1, "max_num_seqs": 16}
TIGHT = {"num_kvcache_blocks": 24, "kvcache_block_size": 16, "max_num_batched_tokens": 20, "max_num_seqs": 6}


def needs(gpus: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(torch.cuda.device_count() < gpus, reason=f"needs {gpus} GPUs")


pytestmark = pytest.mark.gpu


@needs(2)
@pytest.mark.parametrize("options", [{}, {"without": "fused_layers,skinny_gemm", "num_micro_batches": 3}], ids=str)
def test_two_stages_give_the_tutors_tokens(options):
    expected = ids(stage_e_batching.LLM("tutor", device="cpu").chat(ASKED, PARAMS, False))
    with closing(LLM("tutor", dtype="bfloat16", pipeline_parallel_size=2, **SMALL, **options)) as llm:
        for _ in range(2):
            assert ids(llm.chat(ASKED, PARAMS, False)) == expected


@needs(2)
@pytest.mark.parametrize("preset", ["qwen3-tiny", "llama-tiny"])
def test_two_stages_give_one_gpus_tokens_with_small_chunks_and_cached_prefixes(preset):
    single = stage_e_batching.LLM(f"random:{preset}", device="cuda", dtype="float32", num_kvcache_blocks=64)
    with closing(LLM(f"random:{preset}", device="cuda", dtype="float32", pipeline_parallel_size=2, **TIGHT)) as llm:
        for params in (GREEDY, MIXED, GREEDY):
            assert ids(llm.generate(PROMPTS, params, False)) == ids(single.generate(PROMPTS, params, False))


@needs(2)
@pytest.mark.parametrize("preset", ["qwen2-tiny", "qwen3-tiny"])
def test_stages_with_and_without_graphs_give_one_gpus_tokens_for_every_number_of_decodes(preset, capfd):
    prompts, params = countdown(20)
    params[3], params[17] = (replace(params[i], temperature=0.8, top_p=0.9, seed=i, logprobs=2) for i in (3, 17))
    single = stage_e_batching.LLM(f"random:{preset}", device="cuda", dtype="float32", num_kvcache_blocks=64)
    options = {"dtype": "float32", "num_kvcache_blocks": 64, "max_num_seqs": 20, "pipeline_parallel_size": 2}
    found = {}
    for enforce_eager in (False, True):
        with closing(LLM(f"random:{preset}", device="cuda", enforce_eager=enforce_eager, **options)) as llm:
            found[enforce_eager] = [ids(llm.generate(prompts, params, False)) for _ in range(2)]
        errors = capfd.readouterr().err
        recorded = [f"stage {stage}: CUDA graphs: 5 for decode" in errors for stage in range(2)]
        assert recorded == [not enforce_eager] * 2 and "unbatched P2P" not in errors
    expected = ids(single.generate(prompts, params, False))
    assert found == {False: [expected] * 2, True: [expected] * 2}


@needs(2)
def test_replaying_stages_give_one_gpus_tokens_under_preemption():
    single = stage_e_batching.LLM("random:qwen2-tiny", device="cuda", dtype="float32", num_kvcache_blocks=64)
    options = TIGHT | {"num_kvcache_blocks": 12}
    with closing(LLM("random:qwen2-tiny", device="cuda", dtype="float32", pipeline_parallel_size=2, **options)) as llm:
        admit_whoever_fits(llm)
        for params in (GREEDY, MIXED, GREEDY):
            assert ids(llm.generate(PROMPTS, params, False)) == ids(single.generate(PROMPTS, params, False))
        assert llm.engine.counters.num_preemptions > 0


@needs(4)
def test_two_stages_of_two_ranks_give_the_tutors_tokens():
    expected = ids(stage_e_batching.LLM("tutor", device="cpu").chat(ASKED, PARAMS, False))
    with closing(LLM("tutor", dtype="bfloat16", pipeline_parallel_size=2, tensor_parallel_size=2, **SMALL)) as llm:
        assert ids(llm.chat(ASKED, PARAMS, False)) == expected


@needs(2)
def test_the_stages_record_the_times_of_their_kernels(tmp_path):
    trace = str(tmp_path / "trace.jsonl")
    llm = LLM("tutor", pipeline_parallel_size=2, trace=trace, **SMALL)
    start = time.monotonic()
    llm.generate(PROMPTS, GREEDY, False)
    torch.cuda.synchronize()
    end = time.monotonic()
    llm.close()
    stages = [read_spans(f"{trace}.stage{stage}") for stage in range(2)]
    for spans in stages:
        assert all(start - 0.1 < span["start"] <= span["end"] < end + 0.1 for span in spans)
    assert 0 < idle_share(stages) < 1


@needs(2)
def test_a_stage_that_is_killed_is_an_error_within_seconds_and_a_new_engine_answers():
    for _ in range(2):
        before = children()
        llm = LLM("tutor", pipeline_parallel_size=2, **SMALL)
        [process] = children() - before
        threading.Timer(0.5, os.kill, [process, signal.SIGKILL]).start()
        start = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1 of 2 died .SIGKILL."):
            for _ in range(10_000):
                llm.generate(PROMPTS, GREEDY, False)
        llm.close()
        assert time.monotonic() - start < 20
        assert children() == before
