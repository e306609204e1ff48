"""The fused kernels against stage D's layers: in Triton's interpreter on a CPU, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import CASE, CPU, CUDA, F32, interpreted, on_a_gpu, rotary_and_norm
from test_stage_d_attention import BATCHES, expected_attention, make_batch
from test_stage_d_attention import check as check_attention

import stage_e_batching
import stage_f_graph_tp
from stage_a_naive.sampling import SamplingParams
from stage_d_paged.attention.reference import store
from stage_d_paged.layers import rotate
from stage_f_graph_tp.kernels import choose_layers
from stage_f_graph_tp.options import GraphOptions

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 5e-2}
SHAPES = [(4, 2, 16), (14, 2, 64), (3, 3, 24), (7, 1, 20), (16, 8, 128)]  # heads, KV heads, head_dim
SLOTS = [5, -1, 0, 11, -1, 7]
PROMPTS = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (3, 9, 17)]


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape and found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_the_kernels_are_right_in_the_interpreter(run_interpreted_tests):
    run_interpreted_tests(__file__)


# A shape, with a norm or without, and blocks of the pool before those that are written to, which nothing may touch.
ROTATED = list(product(SHAPES, (False, True)))
FAR = [((6, 3, 64), True, 2**31 // (4 * 3 * 64))]


@pytest.mark.parametrize(
    CASE,
    [
        *interpreted(*((*row, 5) for row in ROTATED)),
        *on_a_gpu(*((*row, 0) for row in ROTATED)),
        *on_a_gpu(*FAR, dtypes=[torch.bfloat16]),
    ],
)
def test_norm_rotation_and_store_are_stage_ds(case, device, dtype):
    from stage_f_graph_tp.kernels.elementwise import rotate_and_store

    (heads, kv_heads, head_dim), with_norm, blocks_before = case
    torch.manual_seed(heads)
    total = heads + 2 * kv_heads
    rotary, norm = rotary_and_norm(heads, kv_heads, head_dim, 0.1, dtype, device)
    wide = torch.randn(len(SLOTS), total + 1, head_dim, device=device).to(dtype)  # a token's heads, and a gap
    qkv, positions = wide[:, :total], torch.tensor([3, 0, 49, 7, 1, 20], device=device)
    slots = torch.tensor(SLOTS, device=device)
    whole = [
        [torch.empty(blocks + 3, 4, kv_heads, head_dim, device=device, dtype=dtype) for _ in "kv"]
        for blocks in (0, blocks_before)
    ]
    pools = [[cache[-3:].fill_(7.0) for cache in caches] for caches in whole]
    slots_behind = torch.where(slots < 0, slots, slots + 4 * blocks_before)

    qk, value = qkv.split((heads + kv_heads, kv_heads), dim=1)
    turned = rotate(norm(qk) if with_norm else qk, *rotary(positions))
    expected, key = turned.split((heads, kv_heads), dim=1)
    store(key, value, *pools[0], slots)
    weight = (norm.weight, norm.eps) if with_norm else None
    tables = rotary.cos, rotary.sin
    query = rotate_and_store(qkv, heads, tables, positions, tuple(whole[1]), slots_behind, weight)

    close(query, expected, dtype)
    close(torch.stack(pools[1]), torch.stack(pools[0]), dtype)
    untouched = [slot for slot in range(12) if slot not in SLOTS]
    assert all((cache.flatten(0, 1)[untouched] == 7.0).all() for cache in pools[1]), "a slot of no token was written"
    assert torch.equal(pools[1][1], pools[0][1]), "values are copied, not computed"


# Rows and intermediate size; then rows and hidden size.
ACTIVATED = interpreted((1, 4864), (3, 320), (5, 20)) + on_a_gpu((1, 4864), (300, 3072), (5, 20))
NORMALISED = interpreted((1, 896), (3, 128), (2, 1024), (2, 20)) + on_a_gpu((1, 896), (300, 1024), (2, 2048), (2, 20))
NOT_YET = interpreted((1, 896), (5, 20)) + on_a_gpu((1, 896), (300, 1024), (5, 20), dtypes=[torch.bfloat16, F32])


@pytest.mark.parametrize(CASE, ACTIVATED)
def test_the_activation_is_stage_ds(case, device, dtype):
    from stage_f_graph_tp.kernels.elementwise import silu_and_multiply

    rows, intermediate = case
    gate_up = torch.randn(rows, 2 * intermediate, device=device).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    close(silu_and_multiply(gate_up), F.silu(gate) * up, dtype)


@pytest.mark.parametrize(CASE, NOT_YET)
def test_the_norm_after_the_product_is_the_norm_before_it(case, device, dtype):
    from stage_f_graph_tp.kernels.elementwise import Rows, rotate_and_store, silu_and_multiply

    rows, size = case
    torch.manual_seed(rows)
    x = (3 * torch.randn(rows, size + 8, device=device)).to(dtype)[:, :size]  # the rows do not lie side by side
    normalised = F.rms_norm(x.float(), (size,), None, 0.1)
    weight = (torch.randn(80, size, device=device) / size**0.5).to(dtype)
    gate, up = (normalised @ weight.float().T).chunk(2, dim=-1)
    close(silu_and_multiply(F.linear(x, weight), Rows(x, 0.1)), F.silu(gate) * up, dtype)

    bias, rotary = torch.randn(80, device=device).to(dtype), torch.randn(2, 9, 2, 8, device=device).to(dtype)
    positions, slots = torch.arange(rows, device=device) % 9, torch.arange(rows, device=device)
    results = []
    whole = (normalised @ weight.float().T + bias.float()).to(dtype)
    for product_of_rows, rest in (whole, ()), (F.linear(x, weight), (None, Rows(x, 0.1), bias)):
        pool = torch.zeros(2, 76, 4, 1, 16, device=device, dtype=dtype)
        qkv = product_of_rows.view(rows, 5, 16)
        results.append((rotate_and_store(qkv, 3, tuple(rotary), positions, tuple(pool), slots, *rest), pool))
    for expected, found in zip(*results, strict=True):
        close(found, expected, dtype)


@pytest.mark.parametrize(CASE, NORMALISED)
def test_the_norm_is_the_definition(case, device, dtype):
    from stage_f_graph_tp.kernels.elementwise import rms_norm

    rows, size = case
    x = torch.randn(rows, size + 8, device=device).to(dtype)[:, :size]  # the rows do not lie side by side
    weight = torch.rand(size, device=device).to(dtype)
    close(rms_norm(x, weight, 0.1), F.rms_norm(x.double(), (size,), weight.double(), 0.1), dtype)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("batch", "heads", "multiprocessors"),
    # The last one has 5, 3, 2 and 1 splits.
    [*((batch, (7, 1), 1) for batch in BATCHES.values()), (([1] * 4, [300, 130, 70, 0]), (6, 2), 16)],
    ids=[*BATCHES, "splits of unequal contexts"],
)
def test_dependent_attention_is_the_definition(batch, heads, multiprocessors):
    from stage_d_paged.attention.triton_paged import TritonAttention
    from stage_f_graph_tp.kernels.decode_attention import DEPENDENT

    backend = TritonAttention(CPU, F32, 24, DEPENDENT)
    backend.sm_count = multiprocessors
    *inputs, metadata = make_batch(*batch, *heads, 24, 16)
    for one_new_key, window in (False, 70), (True, 0), (True, 7):
        metadata = replace(metadata, one_new_key=one_new_key)
        check_attention(backend, (*inputs, metadata), window=window)
    assert not backend.arrival_counters(1).any(), "the counters must be left as they were"


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "preset",
    [
        "qwen3-tiny",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2-tiny", "llama-tiny", "mistral-tiny")),
    ],
)
def test_whole_models_give_stage_es_tokens(preset, draw_norm_weights):
    from stage_f_graph_tp.kernels.fused_layers import FusedLayer, fuse_layers

    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)  # a decode step after another
    options = {"device": "cpu", "num_kvcache_blocks": 64, "kvcache_block_size": 4}
    stage_e, llm = (package.LLM(f"random:{preset}", **options) for package in (stage_e_batching, stage_f_graph_tp))
    for engine in stage_e, llm:
        draw_norm_weights(engine.runner.model)
    expected = stage_e.generate(PROMPTS, params, False)
    model = llm.runner.model
    addresses = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    fuse_layers(model, skinny_max_tokens=10)  # a prompt is more than few tokens
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == addresses, "a weight was copied"
    assert all(isinstance(layer, FusedLayer) for layer in model.layers)
    found = llm.generate(PROMPTS, params, False)
    assert [o["token_ids"] for o in found] == [o["token_ids"] for o in expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs without='fused_layers,skinny_gemm'"),
        ({"without": "skinny_gemm"}, "needs without="),
        ({"tensor_parallel_size": 2, "without": "fused_layers,skinny_gemm"}, "needs whole layers"),
    ],
)
def test_stage_cs_operator_is_refused_where_it_cannot_be_used(options, message):
    with pytest.raises(ValueError, match=message):
        choose_layers(None, GraphOptions(fused_mlp="on", **options), CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("contexts", [[640] * 32, [1, 64, 65, 640], [3000, 40, 700]], ids=["one tile", "edges", "many"])
def test_on_a_gpu_decode_attention_sees_the_key_that_the_kernel_in_front_writes_last(contexts):
    from late_writer import write_late

    from stage_d_paged.attention.triton_paged import TritonAttention
    from stage_f_graph_tp.kernels.decode_attention import DEPENDENT
    from stage_f_graph_tp.kernels.pdl import pdl_settings

    backend = TritonAttention(CUDA, torch.bfloat16, 64, DEPENDENT)
    query, keys, values, metadata = make_batch([1] * len(contexts), contexts, 14, 2, 64, 64, CUDA, torch.bfloat16)
    newest = torch.tensor(contexts, device=CUDA) - 1
    blocks = metadata.block_tables[range(len(contexts)), newest // 64].long()
    number = (blocks * 64 + newest % 64)[:, None] * 128 + torch.arange(128, device=CUDA)  # of the pool's
    new = torch.randn(number.shape, device=CUDA).bfloat16()
    expected = [pool.flatten().index_copy(0, number.flatten(), new.flatten()).view_as(pool) for pool in (keys, values)]
    metadata = replace(metadata, one_new_key=True)
    backend.attend(query, keys, values, metadata, 0.2)  # compiled before it matters
    before = keys.clone(), values.clone()
    for waits in (0, 2000):
        keys.copy_(before[0]), values.copy_(before[1])
        write_late[(1,)](keys, values, number, new, number.numel(), waits, **pdl_settings(CUDA), BLOCK=1024)
        found = backend.attend(query, keys, values, metadata, 0.2)
    close(found, expected_attention(query, *expected, metadata, 0.2), torch.bfloat16)


@pytest.mark.gpu
def test_on_a_gpu_decode_attention_is_a_dependent_launch_where_the_gpu_can():
    llm = stage_f_graph_tp.LLM("tutor", device="cuda", dtype="bfloat16", gpu_memory_utilization=0.1)
    names = {layer.backend.kernels.decode.__name__ for layer in llm.runner.model.layers}
    can = torch.cuda.get_device_capability() >= (9, 0)
    assert names == {"dependent_decode" if can else "decode"}
