"""The fused kernels against stage D's layers: in Triton's interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from test_stage_d_attention import BATCHES, make_batch
from test_stage_d_attention import check as check_attention

import stage_e_batching
import stage_f_graph_tp
from stage_a_naive.loading import resolve
from stage_a_naive.sampling import SamplingParams
from stage_d_paged.attention.reference import store
from stage_d_paged.config import ModelConfig
from stage_d_paged.layers import QKNorm, RotaryEmbedding, rotate
from stage_d_paged.options import EngineOptions
from stage_f_graph_tp.kernels import choose_layers

CPU, CUDA, F32 = torch.device("cpu"), torch.device("cuda"), torch.float32
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_the_kernels_are_right_in_the_interpreter")
pytestmark = pytest.mark.usefixtures("guarded_memory", "shuffled_programs") if INTERPRETED else []
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 5e-2}
SHAPES = [(4, 2, 16), (14, 2, 64), (3, 3, 24), (7, 1, 20), (16, 8, 128)]  # heads, KV heads, head_dim
SLOTS = [5, -1, 0, 11, -1, 7]
PROMPTS = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (3, 9, 17)]


def check_rotate_and_store(heads, kv_heads, head_dim, with_norm, device, dtype, blocks_before=0):
    """`blocks_before` the three that are written to, the pool has blocks that nothing may touch."""
    from stage_f_graph_tp.kernels.elementwise import rotate_and_store

    torch.manual_seed(heads)
    total = heads + 2 * kv_heads
    config = ModelConfig.from_hf(resolve("random:qwen3-tiny").config)
    object.__setattr__(config, "head_dim", head_dim)
    rotary = RotaryEmbedding(config, 50, dtype, device)
    norm = QKNorm(heads, kv_heads, head_dim, 0.1, dtype, device)
    norm.weight[:heads], norm.weight[heads:] = 1 + torch.rand(2, 1, head_dim, device=device)
    wide = torch.randn(len(SLOTS), total + 1, head_dim, device=device).to(dtype)  # a token's heads, and a gap
    qkv, positions = wide[:, :total], torch.tensor([3, 0, 49, 7, 1, 20], device=device)
    slots = torch.tensor(SLOTS, device=device)
    slot_shape = kv_heads, head_dim
    whole = [
        [torch.empty(blocks + 3, 4, *slot_shape, device=device, dtype=dtype) for _ in "kv"]
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

    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    assert query.shape == (len(SLOTS), heads, head_dim) and query.is_contiguous()
    torch.testing.assert_close(query, expected, **tolerance)
    torch.testing.assert_close(pools[1], pools[0], **tolerance)
    untouched = [slot for slot in range(12) if slot not in SLOTS]
    assert all((cache.flatten(0, 1)[untouched] == 7.0).all() for cache in pools[1]), "a slot of no token was written"
    assert torch.equal(pools[1][1], pools[0][1]), "values are copied, not computed"


def check_silu_and_multiply(rows, intermediate, device, dtype):
    from stage_f_graph_tp.kernels.elementwise import silu_and_multiply

    gate_up = torch.randn(rows, 2 * intermediate, device=device).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    found = silu_and_multiply(gate_up)
    assert found.shape == (rows, intermediate) and found.dtype == dtype
    expected = F.silu(gate.float()) * up.float()
    torch.testing.assert_close(found.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def check_products_of_rows_not_yet_normalised(rows, size, device, dtype):
    """The product of the rows as they are, then the kernel, gives what the product of the normalised rows gives."""
    from stage_f_graph_tp.kernels.elementwise import Rows, rotate_and_store, silu_and_multiply

    torch.manual_seed(rows)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    x = (3 * torch.randn(rows, size + 8, device=device)).to(dtype)[:, :size]  # the rows do not lie side by side
    normalised = F.rms_norm(x.float(), (size,), None, 0.1)
    weight = (torch.randn(80, size, device=device) / size**0.5).to(dtype)
    gate, up = (normalised @ weight.float().T).chunk(2, dim=-1)
    found = silu_and_multiply(F.linear(x, weight), Rows(x, 0.1))
    torch.testing.assert_close(found.float(), F.silu(gate) * up, **tolerance)

    bias, rotary = torch.randn(80, device=device).to(dtype), torch.randn(2, 9, 2, 8, device=device).to(dtype)
    positions, slots = torch.arange(rows, device=device) % 9, torch.arange(rows, device=device)
    results = []
    whole = (normalised @ weight.float().T + bias.float()).to(dtype)
    for product, rest in (whole, ()), (F.linear(x, weight), (None, Rows(x, 0.1), bias)):
        pool = torch.zeros(2, 76, 4, 1, 16, device=device, dtype=dtype)
        query = rotate_and_store(product.view(rows, 5, 16), 3, tuple(rotary), positions, tuple(pool), slots, *rest)
        results.append((query.float(), pool.float()))
    torch.testing.assert_close(results[1], results[0], **tolerance)


def check_rms_norm(rows, size, device, dtype):
    from stage_f_graph_tp.kernels.elementwise import rms_norm

    x = torch.randn(rows, size + 8, device=device).to(dtype)[:, :size]  # the rows do not lie side by side
    weight = torch.rand(size, device=device).to(dtype)
    found, expected = rms_norm(x, weight, 0.1), F.rms_norm(x.double(), (size,), weight.double(), 0.1)
    assert found.shape == x.shape and found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.skipif(INTERPRETED, reason="this is the inner run")
def test_the_kernels_are_right_in_the_interpreter(run_interpreted_tests):
    run_interpreted_tests(__file__)


@interpreted
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_interpreted_norm_rotation_and_store_are_stage_ds(heads, kv_heads, head_dim, with_norm):
    check_rotate_and_store(heads, kv_heads, head_dim, with_norm, CPU, F32, blocks_before=5)


@interpreted
@pytest.mark.parametrize(("rows", "intermediate"), [(1, 4864), (3, 320), (5, 20)])
def test_interpreted_activation_is_stage_ds(rows, intermediate):
    check_silu_and_multiply(rows, intermediate, CPU, F32)


@interpreted
@pytest.mark.parametrize(("rows", "size"), [(1, 896), (5, 20)])
def test_interpreted_norm_after_the_product_is_the_norm_before_it(rows, size):
    check_products_of_rows_not_yet_normalised(rows, size, CPU, F32)


@interpreted
@pytest.mark.parametrize(("rows", "size"), [(1, 896), (3, 128), (2, 1024), (2, 20)])
def test_interpreted_norm_is_the_definition(rows, size):
    check_rms_norm(rows, size, CPU, F32)


@interpreted
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_interpreted_dependent_attention_is_the_definition(batch):
    from stage_f_graph_tp.kernels.decode_attention import DependentAttention

    backend = DependentAttention(CPU, F32, 24)
    check_attention(backend, make_batch(*batch, 7, 1, 24, 16))
    assert not backend.arrival_counters(1).any(), "the counters must be left as they were"


@interpreted
def test_interpreted_dependent_attention_combines_splits_of_unequal_contexts():
    from stage_f_graph_tp.kernels.decode_attention import DependentAttention

    backend = DependentAttention(CPU, F32, 24)
    backend.sm_count = 16  # 5, 3, 2 and 1 splits
    check_attention(backend, make_batch([1] * 4, [300, 130, 70, 0], 6, 2, 24, 16))
    assert not backend.arrival_counters(1).any(), "the counters must be left as they were"


@interpreted
@pytest.mark.parametrize("preset", ["qwen2-tiny", "qwen3-tiny", "llama-tiny"])
def test_interpreted_whole_models_give_stage_es_tokens(preset, draw_norm_weights):
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
    ("options", "fused", "message"),
    [({}, True, "needs fused=False"), ({"tensor_parallel_size": 2}, False, "needs whole layers")],
)
def test_stage_cs_operator_is_refused_where_it_cannot_be_used(options, fused, message):
    options = EngineOptions(fused_mlp="on", **options)
    with pytest.raises(ValueError, match=message):
        choose_layers(None, options, CUDA, fused)


@pytest.mark.gpu
def test_on_a_gpu_decode_attention_is_a_dependent_launch_where_the_gpu_can():
    llm = stage_f_graph_tp.LLM("tutor", device="cuda", dtype="bfloat16", gpu_memory_utilization=0.1)
    names = {type(layer.backend).__name__ for layer in llm.runner.model.layers}
    can = torch.cuda.get_device_capability() >= (9, 0)
    assert names == {"DependentAttention" if can else "TritonAttention"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_on_a_gpu_norm_rotation_and_store_are_stage_ds(heads, kv_heads, head_dim, with_norm, dtype):
    check_rotate_and_store(heads, kv_heads, head_dim, with_norm, CUDA, dtype)


@pytest.mark.gpu
def test_on_a_gpu_keys_are_stored_behind_2_to_the_31_elements():
    check_rotate_and_store(6, 3, 64, True, CUDA, torch.bfloat16, blocks_before=2**31 // (4 * 3 * 64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "intermediate"), [(1, 4864), (300, 3072), (5, 20)])
def test_on_a_gpu_the_activation_is_stage_ds(rows, intermediate, dtype):
    check_silu_and_multiply(rows, intermediate, CUDA, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 896), (300, 1024), (5, 20)])
def test_on_a_gpu_the_norm_after_the_product_is_the_norm_before_it(rows, size, dtype):
    check_products_of_rows_not_yet_normalised(rows, size, CUDA, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 896), (300, 1024), (2, 2048), (2, 20)])
def test_on_a_gpu_the_norm_is_the_definition(rows, size, dtype):
    check_rms_norm(rows, size, CUDA, dtype)
