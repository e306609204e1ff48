"""The kernels that read and write 8 bits, against their definitions: in Triton's interpreter and on a GPU.

In the pool, the scale of every slot that no sequence owns is NaN, so a kernel that reads too much shows it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import CASE, CPU, F32, interpreted, on_a_gpu, relative_error
from no_gpu import H200, RTX_4090, compiled_for_hopper, recorded_launches
from test_stage_d_attention import BATCHES as FLOAT_BATCHES
from test_stage_d_attention import make_batch as make_float_batch

from beyond.quantization.attention.reference import QuantizedReferenceAttention
from beyond.quantization.formats import FORMATS, Quantized, dequantize_matrix, quantize_matrix, quantize_rows
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.attention.decode_plan import plan_decode
from stage_d_paged.layers import rotate

BF16, OTHERS = [torch.bfloat16], [torch.float16, F32]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
EPS = 0.1  # large enough to be noticed
PRODUCTS = [(1, 32, 48), (5, 200, 40), (67, 136, 20)]  # tokens, in features, out features
REAL = [(1, 3584, 4608), (32, 896, 1152), (64, 4864, 896), (300, 896, 4864), (8, 3584, 18944), (32, 3584, 4608)]
LARGE = [(16, 18944, 3584), (32, 3584, 18944), (64, 3584, 18944), (128, 18944, 3584), (300, 3584, 4608)]
# query lengths, context lengths; heads, KV heads, head_dim
BATCHES = {name: FLOAT_BATCHES[name] for name in ("decode with padding rows", "prefill after a cached prefix", "mixed")}
BATCHES |= {"decode": ([1, 1, 1, 1], [1, 15, 16, 37]), "no decode": ([5, 3], [9, 3])}
HEADS = [(4, 2, 16), (7, 1, 24)]
REAL_BATCHES = {
    "decode": ([1] * 32, [100 + 61 * i for i in range(32)]),
    "one long decode": ([1], [5000]),
    "prefill": ([300, 77], [300, 500]),
    "mixed": ([200, 1, 1, 90], [333, 1000, 64, 90]),
}
REAL_HEADS = [(28, 4, 128), (14, 2, 64), (16, 8, 128)]
STORED = [("int8", None), ("int8", 128), ("fp8", None)]  # format, group


def close(found, expected, dtype):
    error = relative_error(found, expected)
    assert found.shape == expected.shape and error < TOLERANCE[dtype], f"relative error {error:.2e}"


def normed(x, gain):
    return F.rms_norm(x.double(), gain.shape, gain.double(), EPS)


def make_weight(rows, columns, name, group, device, dtype):
    """A quantised matrix, and the numbers that it stands for."""
    weight = quantize_matrix(torch.randn(rows, columns, device=device).to(dtype), FORMATS[name], group)
    return weight, dequantize_matrix(weight, torch.float64, group)


def check_products(tokens, in_features, out_features, name, group, device, dtype, tiles=None):
    """The four products of a layer, with random tokens and weights."""
    from beyond.quantization import products

    torch.manual_seed(tokens)
    x = torch.randn(tokens, in_features + 3, device=device).to(dtype)[:, :in_features]
    gain, bias = torch.rand(in_features, device=device).to(dtype), torch.randn(out_features, device=device).to(dtype)
    weight, exact = make_weight(out_features, in_features, name, group, device, dtype)
    close(products.product(x, weight, bias, tiles), x.double() @ exact.t() + bias.double(), dtype)
    close(products.dequantize(weight, dtype), exact, dtype)

    stream = products.scale_rows(x, gain)
    found = products.normed_product(stream, EPS, weight, bias, tiles)
    close(found, normed(x, gain) @ exact.t() + bias.double(), dtype)

    pair, exact_pair = make_weight(2 * out_features, in_features, name, group, device, dtype)
    gate, up = (normed(x, gain) @ exact_pair.t()).chunk(2, dim=-1)
    close(products.gate_up_silu(stream, EPS, pair, tiles), F.silu(gate) * up, dtype)

    residual = torch.randn(tokens, out_features + 1, device=device).to(dtype)[:, :out_features]
    expected = residual.double() + x.double() @ exact.t()
    counters = torch.zeros(4096, dtype=torch.int32, device=device)
    next_gain = torch.rand(out_features, device=device).to(dtype)
    stream = products.product_add(x, weight, residual, next_gain, counters, tiles)
    assert stream.x is residual and not counters.any(), "the counters must be left as they were"
    close(residual, expected, dtype)
    close(stream.scaled, residual.double() * next_gain.double(), dtype)
    close(stream.squares.sum(0), residual.double().square().sum(1), dtype)
    expected = residual.double() + x.double() @ exact.t()
    assert products.product_add(x, weight, residual, None, counters, tiles) is residual  # the last layer's: no norm
    close(residual, expected, dtype)


def test_the_kernels_are_right_in_the_interpreter(run_interpreted_tests):
    run_interpreted_tests(__file__)


# A shape, format and group; and tiles of 16 rows, by splits and slices.
TILED = product([(5, 300, 40)], ["int8"], [None, 128], [(2, 1), (2, 4)])
LARGE_TILED = product([(5, 4864, 896)], FORMATS, [None, 128], [(4, 1), (1, 2), (2, 4)])


@pytest.mark.parametrize(
    CASE,
    [
        *interpreted(*((shape, *stored, None) for shape, stored in product(PRODUCTS, STORED)), *TILED),
        *on_a_gpu(
            *((shape, *stored, None) for shape, stored in product([*PRODUCTS[1:], *REAL, *LARGE], STORED)),
            *LARGE_TILED,
            dtypes=BF16,
        ),
        *on_a_gpu((REAL[1], "int8", None, None), (REAL[1], "int8", 128, None), dtypes=OTHERS),
    ],
)
def test_products_are_the_definition(case, device, dtype):
    shape, name, group, cut = case
    tiles = None
    if cut:
        from beyond.quantization.tiles import Tiles

        splits, slices = cut
        tiles = Tiles(16, slices * (group or 16), 4 if slices == 1 else slices, 2, splits, slices)
    check_products(*shape, name, group, device, dtype, tiles)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.usefixtures("pretended_gpus")
@pytest.mark.parametrize(("rows", "columns", "height", "splits"), [(3584, 18944, 1, True), (18944, 3584, 2, False)])
@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
def test_tiles_of_large_matrices_give_the_same(tokens, rows, columns, height, splits):
    """Those that Qwen2.5-7B's down product, and its gate and up, have on an H200 with this many tokens."""
    from beyond.quantization.tiles import choose_tiles

    tiles = choose_tiles(rows, columns, tokens, 2, 0, H200, height, splits)
    check_products(tokens - 3, 600, 80, "int8", None, CPU, F32, tiles)


@pytest.mark.interpreted
def test_products_of_many_tokens_are_made_with_the_dequantised_matrix(monkeypatch):
    from beyond.quantization import products

    launches = recorded_launches(monkeypatch, products, "product_kernel")
    x, residual, counters = torch.randn(129, 200), torch.randn(129, 40), torch.zeros(1, dtype=torch.int32)
    weight, exact = make_weight(40, 200, "int8", 128, CPU, F32)
    expected = x.double() @ exact.t()
    close(products.product(x, weight), expected, F32)
    close(products.product_add(x, weight, residual.clone(), None, counters), residual + expected, F32)
    stream = products.product_add(x, weight, residual.clone(), torch.ones(40), counters)  # the norm is of its own sums
    close(stream.x, residual + expected, F32)
    assert not launches, "multiplied in 8 bits"


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("preset", "options", "is_share"),
    [
        ("qwen2-tiny", {"quantization": "int8", "kv_cache_dtype": "int8"}, True),
        pytest.param("qwen3-tiny", {"kv_cache_dtype": "int8"}, False, marks=pytest.mark.slow),
        pytest.param(
            "llama-tiny", {"quantization": "int8", "quantization_group_size": 128}, False, marks=pytest.mark.slow
        ),
    ],
)
def test_whole_models_give_the_references_tokens(preset, options, is_share, draw_norm_weights):
    """`is_share`: as a rank's share whose sum over the ranks is its own part."""
    import beyond.quantization
    from beyond.quantization import SamplingParams, fused_layers
    from beyond.quantization.layers import QuantizedLinear
    from stage_f_graph_tp.tensor_parallel.sharding import RowParallelLinear

    prompts = [[5, 6, 7] * 21, [9, 10]]  # together more than few tokens
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    options |= {"device": "cpu", "num_kvcache_blocks": 32, "kvcache_block_size": 4}
    reference, llm = (beyond.quantization.LLM(f"random:{preset}", **options) for _ in range(2))
    for engine in reference, llm:
        draw_norm_weights(engine.runner.model)
    expected = reference.generate(prompts, params, False)
    model = llm.runner.model
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.product = fused_layers.QuantizedProducts(CPU)
    sums = []
    group = SimpleNamespace(all_reduce=lambda x, residual: sums.append(x) or residual.add_(x))
    for layer in model.layers if is_share else []:
        layer.self_attn.o_proj = RowParallelLinear(layer.self_attn.o_proj, group)
        layer.mlp.down_proj = RowParallelLinear(layer.mlp.down_proj, group)
    fused_layers.fuse_layers(model, llm.options)
    found = llm.generate(prompts, params, False)
    assert [o["token_ids"] for o in found] == [o["token_ids"] for o in expected]
    assert bool(sums) == is_share


def make_batch(query_lens, context_lens, heads, kv_heads, head_dim, name, block_size, device, dtype):
    """Stage D's batch, with keys and values in 8 bits."""
    shape = heads, kv_heads, head_dim, block_size
    query, *caches, metadata = make_float_batch(query_lens, context_lens, *shape, device, dtype)
    stored = [quantize_rows(cache.float(), FORMATS[name]) for cache in caches]
    pools = (Quantized(values, scales.transpose(1, 2).contiguous()) for values, scales in stored)
    return query, *pools, metadata


def behind(num_blocks, cache):
    """The same blocks in a pool after `num_blocks` others whose slots have no scale."""
    sizes = [(num_blocks + len(part), *part.shape[1:]) for part in cache]
    larger = Quantized(cache.values.new_empty(sizes[0]), cache.scales.new_full(sizes[1], float("nan")))
    larger.values[num_blocks:], larger.scales[num_blocks:] = cache
    return larger


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_the_reference_reads_no_table_entry_behind_a_context(batch):
    query, k_cache, v_cache, metadata = make_batch(*batch, *HEADS[0], "int8", 16, CPU, F32)
    attention = QuantizedReferenceAttention(CPU)
    expected = attention.attend(query, k_cache, v_cache, metadata, 0.2)
    metadata.block_tables[metadata.block_tables < 0] = 2**30  # what a step before left there
    assert torch.equal(attention.attend(query, k_cache, v_cache, metadata, 0.2), expected)


# A batch, heads, format and block size; blocks of the pool before those of the batch; and the window.
ATTENTION = [
    *(
        (batch, heads, name, 16 if heads[2] == 16 else 32, 3, 0)
        for batch, heads, name in product(BATCHES, HEADS, FORMATS)
    ),
    *(("mixed", heads, "int8", 32, 0, 0) for heads in [(12, 1, 20), (3, 3, 16)]),  # wider than a tile; single heads
    *((batch, HEADS[0], "int8", 16, 3, 9) for batch in BATCHES),
]
REAL_ATTENTION = [
    (batch, heads, name, 64, 0, window)
    for batch, heads, name in product(REAL_BATCHES, REAL_HEADS, FORMATS)
    for window in (0, 200)
]
REAL_ATTENTION += [(batch, (4, 1, 256), name, 64, 0, 200) for batch, name in product(REAL_BATCHES, FORMATS)]
FAR = [(batch, (6, 3, 64), "int8", 64, 2**31 // (64 * 3 * 64), 0) for batch in ("decode", "mixed")]


@pytest.mark.parametrize(
    CASE,
    [
        *interpreted(*ATTENTION),
        *on_a_gpu(*REAL_ATTENTION, *FAR, dtypes=BF16),
        *on_a_gpu(*(("mixed", REAL_HEADS[1], name, 64, 0, 0) for name in FORMATS), dtypes=OTHERS),
    ],
)
def test_attention_is_the_reference(case, device, dtype):
    from beyond.quantization.attention.triton_paged import KERNELS
    from beyond.quantization.attention.triton_prefill import SCRATCH_BYTES
    from stage_d_paged.attention.triton_paged import TritonAttention

    batch, heads, name, block_size, blocks_before, window = case
    batch = (BATCHES if device == CPU else REAL_BATCHES)[batch]
    query, k_cache, v_cache, metadata = make_batch(*batch, *heads, name, block_size, device, dtype)
    expected = QuantizedReferenceAttention(device).attend(query.float(), k_cache, v_cache, metadata, 0.2, window)
    backend = TritonAttention(device, dtype, heads[2], KERNELS)
    k_cache, v_cache = behind(blocks_before, k_cache), behind(blocks_before, v_cache)
    tables = metadata.block_tables
    tables[tables >= 0] += blocks_before
    # A prefill with and without scratch memory: for tables as wide as this it would take too much.
    columns = SCRATCH_BYTES // (block_size * heads[2] * tables.shape[0])
    for wide in (0, columns)[: 2 if max(batch[0]) > 1 and name == "int8" else 1]:
        tables = F.pad(metadata.block_tables, (0, wide), value=-1)
        found = backend.attend(query, k_cache, v_cache, replace(metadata, block_tables=tables), 0.2, window)
        assert found.dtype == dtype
        close(found, expected, dtype)


@pytest.mark.parametrize("more", [0, 1])
def test_a_prefill_copies_blocks_that_fit_into_scratch_memory_and_no_more(more, monkeypatch):
    triton_prefill = pytest.importorskip("beyond.quantization.attention.triton_prefill")
    from stage_d_paged.attention import triton_prefill as in_16_bits

    launches = recorded_launches(monkeypatch, triton_prefill, "dequantize_blocks_kernel")
    attended = recorded_launches(monkeypatch, in_16_bits, "_prefill_kernel")
    with torch.device("meta"):
        query, scales = torch.empty(8, 4, 16), torch.empty(9, 2, 4)
        cache = Quantized(torch.empty(9, 4, 2, 16, dtype=torch.int8), scales)
        tables = torch.empty(1, triton_prefill.SCRATCH_BYTES // (2 * 4 * 2 * 16 * 4) + more).int()
        metadata = AttentionMetadata(*(torch.empty(1).int() for _ in range(3)), tables, 8, 8)
        triton_prefill.prefill(query, cache, cache, metadata, 0.2, query)
    [attention] = attended
    assert len(launches) == 1 - more and (attention.arguments[4] is scales) == bool(more)
    if not more:
        keys, values = launches[0].arguments[:2]
        assert keys.nbytes + values.nbytes == triton_prefill.SCRATCH_BYTES


# KV heads, head_dim, format, query heads (0: keys are stored as they are), a norm of heads, blocks before.
# int8 alone: Triton 3.7's interpreter rounds 31.9 to 16 in e4m3 (it drops the carry into the exponent).
INTERPRETED_STORES = [(2, 24, "int8", heads, norm, 3) for heads, norm in [(0, False), (4, False), (6, True)]]
STORES = [(4, 128, name, *rest, 0) for name, rest in product(FORMATS, [(0, False), (14, False), (28, True)])]
FAR_STORES = [(3, 64, "int8", heads, False, 2**31 // (4 * 3 * 64)) for heads in (0, 6)]


@pytest.mark.parametrize(
    CASE,
    [
        *interpreted(*INTERPRETED_STORES),
        *on_a_gpu(*STORES, dtypes=[torch.bfloat16, F32]),
        *on_a_gpu(*FAR_STORES, dtypes=BF16),
    ],
)
def test_store_is_the_reference(case, device, dtype):
    """Both store kernels write the reference's values into the slots of the mapping, and no other."""
    from beyond.quantization.attention import triton_store

    kv_heads, head_dim, name, heads, norm, blocks_before = case
    torch.manual_seed(head_dim)
    tokens, block_size = 5, 4
    wide = torch.randn(tokens, heads + 2 * kv_heads + 1, head_dim, device=device).to(dtype)
    qkv = wide[:, :-1]  # a gap behind each token
    qkv[1, heads] = 0.0  # a key of zeros
    slots = torch.tensor([5, 7, 0, 11, -1], device=device)
    positions = torch.randint(0, 9, (tokens,), device=device)
    cosine, sine = torch.randn(2, 9, 1, head_dim // 2, device=device).to(dtype)
    cos, sin = torch.cat((cosine, cosine), 1), torch.cat((-sine, sine), 1)
    weight = torch.rand(heads + kv_heads, head_dim, device=device).to(dtype)
    pools = [
        [
            Quantized(
                torch.full((3, block_size, kv_heads, head_dim), 7.0, device=device).to(FORMATS[name]),
                torch.full((3, kv_heads, block_size), 7.0, device=device),
            )
            for _ in "kv"
        ]
        for _ in range(2)
    ]
    whole = [behind(blocks_before, cache) for cache in pools[0]]
    slots_behind = torch.where(slots < 0, slots, slots + block_size * blocks_before)
    pools[0] = [Quantized(cache.values[blocks_before:], cache.scales[blocks_before:]) for cache in whole]
    qk, value = qkv.float().split((heads + kv_heads, kv_heads), dim=1)
    if heads:
        if norm:
            qk = F.rms_norm(qk, (head_dim,), None, EPS) * weight.float()
        qk = rotate(qk, cos.float()[positions].unsqueeze(1), sin.float()[positions].unsqueeze(1))
        head_norm = (weight, EPS) if norm else None
        query = triton_store.rotate_and_store(qkv, heads, (cos, sin), positions, tuple(whole), slots_behind, head_norm)
        close(query, qk[:, :heads], dtype)
    else:
        triton_store.store(qkv[:, :kv_heads].contiguous(), qkv[:, kv_heads:], *whole, slots_behind)
    QuantizedReferenceAttention(device).store(qk[:, heads:], value, *pools[1], slots)
    for found, expected in zip(*pools, strict=True):
        torch.testing.assert_close(found.scales, expected.scales, rtol=1e-5, atol=0)
        assert found.values.dtype == FORMATS[name]
        # A number that is almost halfway between two values may be rounded to either.
        step = 1.0 if name == "int8" else 32.0  # the largest distance between two
        difference = (found.values.float() - expected.values.float()).abs()
        assert difference.max() <= step and (difference > 0).float().mean() < 0.02


def test_keys_and_values_whose_heads_are_not_adjacent_are_refused():
    pytest.importorskip("triton")
    from beyond.quantization.attention import triton_store

    rows, turned = torch.zeros(2, 4, 4), torch.zeros(2, 4, 4).transpose(1, 2)
    gaps = torch.zeros(2, 32).as_strided((2, 4, 4), (32, 4, 2))
    for name, key, value in (("key", turned, rows), ("value", rows, turned), ("value", rows, gaps)):
        with pytest.raises(ValueError, match=f"{name} has strides .* must be adjacent"):
            triton_store.store(key, value, None, None, None)


@pytest.mark.usefixtures("pretended_gpus")
@pytest.mark.parametrize(("gpu", "shared_memory"), [(H200, 233472), (RTX_4090, 101376)], ids=["H200", "RTX 4090"])
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 33, 64, 128, 256])
def test_tiles_fit_into_shared_memory_and_no_two_warps_convert_the_same_weight(tokens, group, gpu, shared_memory):
    pytest.importorskip("triton")
    from beyond.quantization import fused_layers
    from beyond.quantization import tiles as module

    matrices = [(1152, 896), (896, 4864), (4608, 3584), (3584, 18944), (152064, 3584), (4864, 896), (4096, 14336)]
    for (rows, columns), (height, splits) in product(matrices, [(1, False), (2, False), (1, True)]):
        tiles = module.choose_tiles(rows, columns, tokens, 2, group, gpu, height, splits)
        assert tiles.slices in (1, tiles.warps), "every warp has a slice, or none has"
        assert tiles.slices == 1 or columns % tiles.columns == 0, "no slice is cut off"
        assert tiles.rows * height * tiles.slices >= 16 * tiles.warps, "a warp multiplies 16 rows"
        assert tiles.columns == group * tiles.slices or not group, "a tile, or a slice, has one scale per row"
        block_m = module.token_block(tokens)
        assert tiles.stages * (tiles.rows * height + 2 * block_m) * tiles.columns <= shared_memory
        programs = -(-rows // tiles.rows) * -(-tokens // block_m)
        assert tiles.splits == 1 or splits and programs <= fused_layers.MAX_TILES
        cut = tiles.splits == 8 or columns // (tiles.columns * tiles.splits) < 4  # as far as it may be
        assert not splits or cut or gpu != H200 or programs * tiles.splits >= 132, "multiprocessors are left idle"


@pytest.mark.usefixtures("pretended_gpus")
@pytest.mark.parametrize("tokens", [33, 64, 65, 128])
def test_two_programs_with_many_rows_of_a_large_matrix_share_a_multiprocessors_memory(tokens):
    """One converts weights while the other multiplies. A stage less than was asked for is allocated."""
    pytest.importorskip("triton")
    from beyond.quantization import tiles as module

    for rows, columns, height, splits in (18944, 3584, 2, False), (37888, 3584, 1, False), (3584, 18944, 1, True):
        tiles = module.choose_tiles(rows, columns, tokens, 2, 0, H200, height, splits)
        assert tiles.rows * height == 64 and tiles.warps == 4, "a warp group's instruction is 64 high"
        assert 2 * (tiles.stages - 1) * (64 + 2 * module.token_block(tokens)) * tiles.columns <= 233472


@pytest.mark.parametrize("stored", ["*i8", "*fp8e4nv"])
def test_compiled_for_hopper_no_value_is_read_from_shared_memory_by_the_byte(stored):
    """The decode kernel."""
    pytest.importorskip("triton")
    from beyond.quantization.attention.triton_decode import choose_quantized_config, quantized_decode_kernel

    config = choose_quantized_config(128, 128, 2, torch.int8 if stored == "*i8" else torch.float8_e4m3fn)
    plan = plan_decode(32, 4096, 28, 64, 4, 128, torch.bfloat16, 132, config)
    constants = plan.constants | {"MIXED": False, "GROUP_PAD": 8}
    settings = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    types = dict.fromkeys(quantized_decode_kernel.arg_names, "i32")
    types |= {"out": "*bf16", "query": "*bf16", "k_values": stored, "v_values": stored, "scale_log2": "fp32"}
    types |= dict.fromkeys(("k_scales", "v_scales", "partial_out", "partial_lse"), "*fp32")
    types |= dict.fromkeys(("block_tables", "context_lens", "cu_seqlens_q", "arrival_counters"), "*i32")
    strides = "query_stride", "slot_stride"
    found = compiled_for_hopper(quantized_decode_kernel, types, constants, strides, **settings)
    assert "ldmatrix" in found and ".trans" in found and "ld.shared.b8" not in found
