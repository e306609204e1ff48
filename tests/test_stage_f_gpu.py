"""On a GPU: graphs, overlap and fused kernels, in any combination, give the tokens of a CPU."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import pytest
import torch
from contract.engines import CHATS, ids
from stand_ins import forwards_of

import stage_e_batching
import stage_f_graph_tp
from stage_a_naive.sampling import SamplingParams
from stage_f_graph_tp.cuda_graph import DecodeGraphs
from stage_f_graph_tp.megakernel_steps import MegakernelSteps
from stage_f_graph_tp.options import IDEAS

ASKED = [*CHATS, [{"role": "user", "content": "What is prefill?"}]]
PROMPTS = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (3, 33, 17, 9, 50)]
PARAMS = SamplingParams(temperature=0, max_tokens=48)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL = {"device": "cuda", "gpu_memory_utilization": 0.1, "max_num_seqs": 16}  # many engines in one test run


def answers(prompts, params, **options) -> list[dict]:
    """Answers of an engine that is deleted afterwards, because it would hold all memory that the next one needs."""
    return stage_f_graph_tp.LLM("tutor", dtype="float32", **SMALL, **options).generate(prompts, params, False)


@pytest.fixture(scope="module")
def tutors_answers() -> list[list[int]]:
    return ids(stage_e_batching.LLM("tutor", device="cpu").chat(ASKED, PARAMS, False))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        *({"without": idea} for idea in IDEAS),
        {"without": "fused_layers,skinny_gemm,megakernel"},
        {"enforce_eager": True},
        {"without": tuple(IDEAS)},
        {"max_num_batched_tokens": 16, "max_num_seqs": 3},
        {"kvcache_block_size": 16, "num_kvcache_blocks": 24},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_combination_gives_the_tutors_tokens(tutors_answers, options, dtype):
    llm = stage_f_graph_tp.LLM("tutor", dtype=dtype, **(SMALL | options))
    if "without" not in options:
        has_graphs = not options.get("enforce_eager") and "max_num_seqs" not in options  # the megakernel takes up to 8
        assert bool(forwards_of(llm.runner, DecodeGraphs)) == has_graphs
    for _ in range(2):  # the second time with cached prefixes
        assert ids(llm.chat(ASKED, PARAMS, False)) == tutors_answers
    assert ids(llm.chat(ASKED * 5, PARAMS, False)) == tutors_answers * 5
    assert llm.calls.stats()["num_used_blocks"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_of_a_megakernel_that_gave_up_never_reach_the_caller(tutors_answers, overlap):
    llm = stage_f_graph_tp.LLM("tutor", dtype="bfloat16", without="" if overlap else "overlap", **SMALL)
    assert ids(llm.chat(ASKED[0], PARAMS, False)) == tutors_answers[:1]
    [megakernel] = forwards_of(llm.runner, MegakernelSteps)
    megakernel.kernel.failure.fill_(3 * 16 + 2 + 1)
    with pytest.raises(RuntimeError, match="layer 3, phase 2; its tokens are invalid"):
        llm.chat(ASKED[0], PARAMS, False)
    assert ids(llm.chat(ASKED[0], PARAMS, False)) == tutors_answers[:1], "the next request starts afresh"
    assert llm.calls.stats()["num_used_blocks"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [True, False])
def test_the_megakernel_samples_what_the_sampler_does_from_its_logits(overlap):
    llm = stage_f_graph_tp.LLM("tutor", dtype="bfloat16", without="" if overlap else "overlap", **SMALL)
    prompts = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (3, 33, 17, 9, 50, 1, 64, 20)]
    [megakernel] = forwards_of(llm.runner, MegakernelSteps)
    for rows in range(1, megakernel.most_rows + 1):
        for seed, temperature in enumerate((0.0, 0.3, 1.0, 2.0)):
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=48, ignore_eos=True)
            asking = dataclasses.replace(params, logprobs=1)  # its rows go through stage E's sampler
            expected = ids(llm.generate(prompts[:rows], asking, False))
            assert ids(llm.generate(prompts[:rows], params, False)) == expected


@pytest.mark.gpu
def test_everything_a_sampler_can_do_goes_through_graphs():
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=10, ignore_eos=True),
        SamplingParams(temperature=1.1, top_k=20, min_p=0.01, seed=2, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.5, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=3, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=5, max_tokens=11, ignore_eos=True),
    ]
    found = [answers(PROMPTS, params, **options) for options in ({}, {"enforce_eager": True, "without": "overlap"})]
    assert ids(found[0]) == ids(found[1])
    assert [list(top) for top in found[0][3]["logprobs"]] == [list(top) for top in found[1][3]["logprobs"]]


@pytest.mark.gpu
def test_a_single_prompts_graph_samples_what_the_sampler_does_without_it():
    """Three times each: the first time it is recorded, and a penalty must count the token of that run once."""
    params = [
        SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.4, frequency_penalty=0.7, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=2, max_tokens=6, ignore_eos=True),
    ]
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 32}
    found = []
    for eager in ({}, {"enforce_eager": True, "without": "overlap"}):
        llm = stage_f_graph_tp.LLM("tutor", dtype="float32", **SMALL, **options, **eager)
        found.append([ids(llm.generate([PROMPTS[i]], p, False)) for p in params for i in (1, 3, 4) for _ in range(3)])
        llm.close()
        del llm
    assert found[0] == found[1]


@pytest.mark.gpu
def test_compiling_kernels_launches_none_of_them():
    compile_kernels = pytest.importorskip("stage_f_graph_tp.compile_kernels").compile_kernels
    elementwise = pytest.importorskip("stage_f_graph_tp.kernels.elementwise")
    x, weight = torch.randn(2, 7, 96, device="cuda"), torch.rand(96, device="cuda")
    kernel = elementwise._rms_norm_kernel
    before = len(kernel.device_caches[0][0])
    torch.cuda.synchronize()
    out: list[torch.Tensor] = []
    with patch.object(torch, "empty_like", lambda like: torch.full_like(like, 5.0)):
        compile_kernels(lambda: out.append(elementwise.rms_norm(x[0], weight, 1e-6)))
    assert (out[0] == 5.0).all() and len(kernel.device_caches[0][0]) == before + 1
    expected = torch.nn.functional.rms_norm(x[1], (96,), weight, 1e-6)
    torch.testing.assert_close(elementwise.rms_norm(x[1], weight, 1e-6), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_backend_that_cannot_be_recorded_runs_eagerly_and_says_so(tutors_answers, capfd):
    llm = stage_f_graph_tp.LLM("tutor", attention_backend="reference", **SMALL)
    assert not forwards_of(llm.runner, DecodeGraphs) and "CUDA graphs: not used" in capfd.readouterr().err
    assert ids(llm.chat(ASKED, PARAMS, False)) == tutors_answers


@pytest.mark.gpu
def test_recording_writes_no_kv_and_its_memory_is_reported(capfd):
    llm = stage_f_graph_tp.LLM("tutor", num_kvcache_blocks=64, **SMALL)
    assert not llm.kv_cache.tensor.any()
    assert "CUDA graphs: " in capfd.readouterr().err
    [graphs] = forwards_of(llm.runner, DecodeGraphs)
    assert graphs.num_bytes >= 0


@pytest.mark.gpu
def test_a_long_prompt_in_small_chunks_is_read_right():
    """Chunks that sample nothing are launched one after another: the input of one must not be overwritten too early."""
    prompt = [(i * 7919) % 4000 + 5 for i in range(3000)]
    found = [ids(answers([prompt], GREEDY, max_num_batched_tokens=tokens)) for tokens in (16, 4096)]
    assert found[0] == found[1]
