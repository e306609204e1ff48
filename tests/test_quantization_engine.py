"""The engine in 8 bits: the tutor's answers, less memory, and everything that stage F does unchanged."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from contract.engines import CHATS
from kernel_cases import CPU
from stand_ins import forked_ranks, forwards_of
from test_stage_f_parallel import config_of, on_ranks, random_weights, run_model

import beyond.quantization
import stage_f_graph_tp
from beyond.options import Options
from beyond.quantization import SamplingParams
from beyond.quantization.formats import dequantize_matrix
from beyond.quantization.parts import make_formats
from stage_f_graph_tp.cuda_graph import DecodeGraphs
from stage_f_graph_tp.megakernel_steps import MegakernelSteps

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SMALL = {"num_kvcache_blocks": 64, "max_model_len": 256}
ALL = {"quantization": "int8", "kv_cache_dtype": "int8", "quantize_lm_head": True}


def make(model: str = "tutor", **options: object) -> beyond.quantization.LLM:
    return beyond.quantization.LLM(model, **{"device": "cpu"} | SMALL | options)


def ids(llm: stage_f_graph_tp.LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    try:
        return [output["token_ids"] for output in llm.chat(CHATS, params)]
    finally:
        llm.close()


@pytest.fixture(scope="module")
def tutors_answers() -> list[list[int]]:
    return ids(stage_f_graph_tp.LLM("tutor", device="cpu", **SMALL))


ANYWHERE = [
    {"quantization": "int8"},
    {"quantization": "int8", "quantization_group_size": 128},
    {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "int8"},
    ALL,
]
ON_A_CPU = [
    {"kv_cache_dtype": "fp8", "enable_prefix_caching": False},
    ALL | {"without": "overlap", "kvcache_block_size": 5},
    {"quantization": "int8", "quantization_group_size": 128, "kv_cache_dtype": "int8", "tensor_parallel_size": 2},
]
ON_A_GPU = [
    ALL | {"without": "fused_layers,skinny_gemm"},
    ALL | {"enforce_eager": True},
    ALL | {"max_num_batched_tokens": 8, "max_num_seqs": 2},
    ALL | {"attention_backend": "reference"},
]


@pytest.mark.parametrize(
    "options",
    [
        *({"device": "cpu"} | options for options in ANYWHERE + ON_A_CPU),
        *(pytest.param({"device": "cuda"} | options, marks=pytest.mark.gpu) for options in ANYWHERE + ON_A_GPU),
    ],
    ids=str,
)
def test_every_combination_gives_the_tutors_tokens(tutors_answers, options):
    with forked_ranks():
        assert ids(make(**options)) == tutors_answers


@pytest.mark.parametrize("group_size", [None, 128])
def test_ranks_whose_columns_end_within_a_group_give_the_whole_models_logits(group_size):
    """300 of 600 intermediate features each: groups of 128, 128 and 44; the whole matrix has four and one of 88."""
    options = Options(quantization="int8", quantization_group_size=group_size)
    config = config_of("qwen2-tiny", intermediate_size=600)
    run = partial(run_model, config, random_weights())
    whole, formats = run(), make_formats(options, CPU)
    shards = on_ranks(2, lambda group: run(group, formats=formats))
    assert torch.equal(*shards)
    assert (shards[0] - whole).norm() < 0.03 * whole.norm()


def test_the_model_and_the_pool_take_as_many_bytes_as_the_formats_say():
    plain = make(dtype="float32")
    small = make(dtype="float32", **ALL)
    config = plain.runtime.config
    assert small.kv_cache.num_blocks == plain.kv_cache.num_blocks
    per_head = (config.head_dim + 4) / (4 * config.head_dim)  # 8-bit values and a scale, of float32
    assert small.kv_cache.num_bytes == plain.kv_cache.num_bytes * per_head
    assert small.runtime.bytes_per_token == plain.runtime.bytes_per_token * per_head
    sizes = [
        sum(p.numel() * p.element_size() for p in llm.runtime.model.parameters() if p.dim() == 2)
        for llm in (plain, small)
    ]
    assert 3.8 * sizes[1] < sizes[0] < 4 * sizes[1]


def test_the_floor_counts_the_bytes_that_are_there():
    for options in ({}, {"quantization": "int8", "quantization_group_size": 128}, ALL | {"quantization": "fp8"}):
        llm = make(dtype="float32", **options)
        model = llm.runtime.model
        stored = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())  # tied: the table is the head
        assert llm.model_bytes.weight_bytes == stored
        assert llm.model_bytes.kv_bytes_per_token == llm.runtime.bytes_per_token


def test_an_lm_head_in_8_bits_leaves_the_table_of_an_untied_model_alone():
    model = make("random:llama-tiny", **ALL).runtime.model
    assert model.lm_head.matrix.values.dtype == torch.int8
    assert model.embed_tokens is not model.lm_head and model.embed_tokens.weight.is_floating_point()


@pytest.mark.parametrize("options", [{}, {"quantization_group_size": 128}, {"quantization": "fp8"}], ids=str)
def test_a_token_is_looked_up_in_the_dequantised_table(options):
    """The norm after the table hides a wrong scale from the tutor's answers."""
    table = make(**ALL | options).runtime.model.embed_tokens
    ids = torch.tensor([3, 4000, 7])
    assert torch.equal(table(ids), dequantize_matrix(table.matrix.weight, table.dtype, table.matrix.group_size)[ids])


@pytest.mark.usefixtures("pretended_gpus")
@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}])
def test_fp8_is_refused_on_a_gpu_that_cannot_convert_it(options):
    with pytest.raises(ValueError, match=r"fp8 needs compute capability \(8, 9\), this GPU has \(8, 6\); use 'int8'"):
        make_formats(Options(**options), torch.device("cuda", 86))


@pytest.mark.gpu
def test_on_a_gpu_the_megakernel_is_left_out_and_the_notes_say_so(capfd):
    llm = beyond.quantization.LLM("tutor", device="cuda", **SMALL, quantization="int8")
    assert not forwards_of(llm.runner, MegakernelSteps) and forwards_of(llm.runner, DecodeGraphs)
    assert capfd.readouterr().err.count("persistent megakernel: not used (it reads 16-bit weights") == 1
    llm.close()
