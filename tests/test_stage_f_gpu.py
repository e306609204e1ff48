"""On GPUs: graphs, overlap, fused kernels and several ranks, in any combination, give the tokens of a CPU."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import stage_e_batching
import stage_f_graph_tp
from stage_a_naive.sampling import SamplingParams
from stage_f_graph_tp.parallel import RankGroup
from stage_f_graph_tp.worker import WorkerError

QUESTIONS = ("What is a KV cache?", "用要点概述：如何从零实现一个迷你版 vLLM 推理循环？", "What is prefill?")
ASKED = [[{"role": "user", "content": question}] for question in QUESTIONS]
PROMPTS = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (3, 33, 17, 9, 50)]
PARAMS = SamplingParams(temperature=0, max_tokens=48)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL = {"device": "cuda", "gpu_memory_utilization": 0.1, "max_num_seqs": 16}  # many engines in one test run

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def ids(outputs) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def answers(prompts, params, **options) -> list[dict]:
    """Of an engine that is gone afterwards: it would hold all the memory that the next one may use."""
    return stage_f_graph_tp.LLM("tutor", dtype="float32", **SMALL, **options).generate(prompts, params, False)


@pytest.fixture(scope="module")
def tutors_answers() -> list[list[int]]:
    return ids(stage_e_batching.LLM("tutor", device="cpu").chat(ASKED, PARAMS, False))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"fused": False},
        {"enforce_eager": True},
        {"enforce_eager": True, "overlap": False, "fused": False},
        {"max_num_batched_tokens": 16, "max_num_seqs": 3},
        {"kvcache_block_size": 16, "num_kvcache_blocks": 24},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_combination_gives_the_tutors_tokens(tutors_answers, options, dtype):
    llm = stage_f_graph_tp.LLM("tutor", dtype=dtype, **(SMALL | options))
    assert (llm.runner.graphs is None) == options.get("enforce_eager", False)
    for _ in range(2):  # the second time with cached prefixes
        assert ids(llm.chat(ASKED, PARAMS, False)) == tutors_answers
    assert ids(llm.chat(ASKED * 5, PARAMS, False)) == tutors_answers * 5
    assert llm.engine.stats()["num_used_pages"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_of_a_one_launch_step_that_gave_up_never_reach_the_caller(tutors_answers, overlap):
    llm = stage_f_graph_tp.LLM("tutor", dtype="bfloat16", overlap=overlap, **SMALL)
    assert ids(llm.chat(ASKED[0], PARAMS, False)) == tutors_answers[:1]
    llm.runner.fused_decode.failure.fill_(3 * 16 + 2 + 1)
    with pytest.raises(RuntimeError, match="layer 3, phase 2; its tokens are void"):
        llm.chat(ASKED[0], PARAMS, False)
    assert ids(llm.chat(ASKED[0], PARAMS, False)) == tutors_answers[:1], "the next request starts afresh"
    assert llm.engine.stats()["num_used_pages"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [12, 20, 100])
def test_graphs_of_any_ladder_give_the_eager_tokens(rows):
    prompts = [[5 + i % 50, 6, 7 + i % 9] for i in range(rows)]
    params = [SamplingParams(temperature=0, max_tokens=4 + i % 5, ignore_eos=True) for i in range(rows)]
    found = []
    for enforce_eager in (False, True):
        options = SMALL | {"max_num_seqs": rows, "enforce_eager": enforce_eager}
        found.append(ids(stage_f_graph_tp.LLM("tutor", dtype="float32", **options).generate(prompts, params, False)))
    assert found[0] == found[1]


@pytest.mark.gpu
def test_everything_a_sampler_can_do_goes_through_graphs():
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=10, ignore_eos=True),
        SamplingParams(temperature=1.1, top_k=20, min_p=0.01, seed=2, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.5, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=3, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=5, max_tokens=11, ignore_eos=True),
    ]
    found = [answers(PROMPTS, params, **options) for options in ({}, {"enforce_eager": True, "overlap": False})]
    assert ids(found[0]) == ids(found[1])
    assert [list(top) for top in found[0][3]["logprobs"]] == [list(top) for top in found[1][3]["logprobs"]]


@pytest.mark.gpu
def test_a_backend_that_cannot_be_recorded_runs_eagerly_and_says_so(tutors_answers, capfd):
    llm = stage_f_graph_tp.LLM("tutor", attention_backend="reference", **SMALL)
    assert llm.runner.graphs is None and "CUDA graphs: not used" in capfd.readouterr().err
    assert ids(llm.chat(ASKED, PARAMS, False)) == tutors_answers


@pytest.mark.gpu
def test_recording_writes_no_kv_and_its_memory_is_reported(capfd):
    llm = stage_f_graph_tp.LLM("tutor", num_kvcache_blocks=64, **SMALL)
    assert not llm.kv_cache.tensor.any()
    assert "CUDA graphs: " in capfd.readouterr().err
    assert llm.runner.graphs.num_bytes >= 0


@pytest.mark.gpu
def test_a_long_prompt_in_small_chunks_is_read_right():
    """Chunks that sample nothing are ordered one after another: the input of one may not be overwritten too early."""
    prompt = [(i * 7919) % 4000 + 5 for i in range(3000)]
    found = [ids(answers([prompt], GREEDY, max_num_batched_tokens=tokens)) for tokens in (16, 4096)]
    assert found[0] == found[1]


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True, "overlap": False, "fused": False}], ids=str)
def test_two_ranks_give_the_tutors_tokens(tutors_answers, options):
    llm = stage_f_graph_tp.LLM("tutor", dtype="bfloat16", tensor_parallel_size=2, **SMALL, **options)
    try:
        assert (llm.runner.graphs is None) == bool(options)
        for _ in range(2):
            assert ids(llm.chat(ASKED, PARAMS, False)) == tutors_answers
    finally:
        llm.close()


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("preset", ["qwen3-tiny", "llama-tiny"])
def test_two_ranks_give_one_gpus_tokens(preset):
    """Not a CPU's: random weights are other ones there."""
    options = SMALL | {"num_kvcache_blocks": 64, "dtype": "float32"}
    expected = ids(stage_e_batching.LLM(f"random:{preset}", **options).generate(PROMPTS, GREEDY, False))
    llm = stage_f_graph_tp.LLM(f"random:{preset}", tensor_parallel_size=2, **options)
    try:
        assert ids(llm.generate(PROMPTS, GREEDY, False)) == expected
    finally:
        llm.close()


def _add_up_on_a_rank(rank: int, port: int) -> None:
    from stage_f_graph_tp.exchange import BLOCK, CAPACITY, PROGRAMS

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = RankGroup(dist.TCPStore("127.0.0.1", port, is_master=False), rank, 2, device)
    group.connect()
    assert group.exchange is not None, "these GPUs cannot read one another's memory"

    def numbers(of_rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(10 * count + of_rank)
        return torch.randn(count, generator=generator, device=device).to(dtype)

    for dtype in (torch.bfloat16, torch.float32):
        longest = CAPACITY // dtype.itemsize
        for count in (1, 896, 2048, 5 * 2048 + 3, longest // 2, longest, longest + 8):
            own, other = numbers(rank, count, dtype), numbers(1 - rank, count, dtype)
            assert group.exchange.takes(own) == (count <= min(longest, BLOCK * PROGRAMS))
            residual = torch.ones_like(own)
            expected, onto = (own.float() + other.float()).to(dtype), (own.float() + other.float() + 1).to(dtype)
            torch.testing.assert_close(group.all_reduce(own.clone(), residual), onto, atol=2**-6, rtol=2**-6)
            x, total = torch.zeros_like(own), torch.empty_like(own)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(7):
                    total.copy_(group.all_reduce(x.clone()))
            for _ in range(20):
                x.copy_(own)
                total.zero_()
                graph.replay()
                torch.testing.assert_close(total, expected)
    torch.cuda.synchronize()


@pytest.mark.gpu
@two_gpus
def test_short_and_long_tensors_are_added_up_in_graphs_and_out():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(_add_up_on_a_rank, (store.port,), nprocs=2)


@pytest.mark.gpu
@two_gpus
def test_the_all_reduces_of_a_step_are_inside_its_graph(monkeypatch):
    llm = stage_f_graph_tp.LLM("tutor", tensor_parallel_size=2, **SMALL)
    try:
        llm.generate([[5, 6, 7]], GREEDY, False)
        calls = []
        all_reduce = llm.runner.group.all_reduce
        monkeypatch.setattr(llm.runner.group, "all_reduce", lambda *x: calls.append(x) or all_reduce(*x))
        llm.generate([[5, 6, 7]], GREEDY, False)
        # Two a layer and one for the embedding, ordered by the prefill; the decode steps order none.
        assert len(calls) == 2 * llm.runtime.config.num_layers + 1
    finally:
        llm.close()


@pytest.mark.gpu
@two_gpus
def test_a_killed_worker_is_an_error_within_seconds_and_a_new_engine_starts(tutors_answers):
    options = SMALL | {"dtype": "bfloat16", "tensor_parallel_size": 2, "num_kvcache_blocks": 64}
    llm = stage_f_graph_tp.LLM("tutor", **options)
    [worker] = _workers()
    threading.Timer(0.5, os.kill, [worker, signal.SIGKILL]).start()
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 of 2"):
        for _ in range(10_000):
            llm.chat(ASKED, PARAMS, False)
    llm.close()
    assert time.monotonic() - start < 15
    assert not _workers()
    again = stage_f_graph_tp.LLM("tutor", **options)
    try:
        assert ids(again.chat(ASKED, PARAMS, False)) == tutors_answers
    finally:
        again.close()


def _workers() -> list[int]:
    """Living children of this process that run a rank."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_text()
        except OSError:  # ended meanwhile
            continue
        if int(parent) == os.getpid() and state != "Z" and "stage_f_graph_tp.worker" in command:
            found.append(int(folder.name))
    return found
