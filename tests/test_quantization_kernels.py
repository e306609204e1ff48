"""The kernels that read and write 8 bits, against their definitions: in Triton's interpreter and on a GPU.

In the pool, the scale of every slot that no sequence owns is NaN, so a kernel that reads too much shows it.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hopper import compiled_for_hopper

from beyond.quantization.attention.reference import QuantizedReferenceAttention
from beyond.quantization.formats import FORMATS, Quantized, dequantize_matrix, quantize_matrix, quantize_rows
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.attention.decode_plan import plan_decode
from stage_d_paged.layers import rotate

CPU, CUDA, F32 = torch.device("cpu"), torch.device("cuda"), torch.float32
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_the_kernels_are_right_in_the_interpreter")
pytestmark = pytest.mark.usefixtures("guarded_memory", "shuffled_programs") if INTERPRETED else []
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
EPS = 0.1  # large enough to be noticed
PRODUCTS = [(1, 32, 48), (5, 200, 40), (67, 136, 20)]  # tokens, in features, out features
REAL = [(1, 3584, 4608), (32, 896, 1152), (64, 4864, 896), (300, 896, 4864), (8, 3584, 18944), (32, 3584, 4608)]
LARGE = [(16, 18944, 3584), (32, 3584, 18944), (64, 3584, 18944), (128, 18944, 3584), (300, 3584, 4608)]
# query lengths, context lengths; heads, KV heads, head_dim
BATCHES = {
    "decode": ([1, 1, 1, 1], [1, 15, 16, 37]),
    "decode with padding rows": ([1, 1, 1], [20, 0, 0]),
    "prefill after a cached prefix": ([5, 16], [37, 64]),
    "mixed": ([7, 1, 1, 20, 1], [40, 33, 1, 20, 16]),
    "no decode": ([5, 3], [9, 3]),
}
HEADS = [(4, 2, 16), (7, 1, 24)]
REAL_BATCHES = {
    "decode": ([1] * 32, [100 + 61 * i for i in range(32)]),
    "one long decode": ([1], [5000]),
    "prefill": ([300, 77], [300, 500]),
    "mixed": ([200, 1, 1, 90], [333, 1000, 64, 90]),
}
REAL_HEADS = [(28, 4, 128), (14, 2, 64), (16, 8, 128)]


def close(found, expected, dtype):
    """Compare as a whole: single numbers of a rounded sum may be far off where they cancel."""
    error = ((found.double() - expected.double()).norm() / expected.double().norm()).item()
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


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


def check_small_tiles(*shape, splits, slices):
    """The same with tiles of 16 rows."""
    from beyond.quantization.tiles import Tiles

    columns, warps = slices * (shape[4] or 16), 4 if slices == 1 else slices
    check_products(*shape, Tiles(16, columns, warps, 2, splits, slices))


def make_batch(query_lens, context_lens, heads, kv_heads, head_dim, name, block_size, device, dtype):
    """(query, k_cache, v_cache, metadata) with blocks in a shuffled order."""
    torch.manual_seed(sum(context_lens))
    needed = [-(-length // block_size) for length in context_lens]
    order = torch.randperm(sum(needed)).int()
    tables = torch.full((len(needed), max(needed) + 1), -1, dtype=torch.int32)
    owned = torch.zeros(sum(needed), block_size, dtype=torch.bool)
    for s, (length, count) in enumerate(zip(context_lens, needed, strict=True)):
        tables[s, :count], order = order[:count], order[count:]
        for i in range(count):
            owned[tables[s, i], : length - i * block_size] = True
    caches = []
    for _ in "kv":
        values, scales = quantize_rows(
            torch.randn(sum(needed), block_size, kv_heads, head_dim) * torch.rand(block_size, kv_heads, 1) * 4,
            FORMATS[name],
        )
        scales = scales.masked_fill(~owned[..., None], float("nan")).transpose(1, 2).contiguous()
        caches.append(Quantized(values.to(device), scales.to(device)))
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32).to(device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        slot_mapping=torch.full((sum(query_lens),), -1, device=device),
        block_tables=tables.to(device),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )
    qkv = torch.randn(sum(query_lens), heads + 1, head_dim).to(device, dtype)
    return qkv[:, 1:], *caches, metadata


def behind(num_blocks, cache):
    """The same blocks in a pool with `num_blocks` before them, of which no slot has a scale."""
    sizes = [(num_blocks + len(part), *part.shape[1:]) for part in cache]
    larger = Quantized(cache.values.new_empty(sizes[0]), cache.scales.new_full(sizes[1], float("nan")))
    larger.values[num_blocks:], larger.scales[num_blocks:] = cache
    return larger


def check_attention(batch, heads, kv_heads, head_dim, name, block_size, device, dtype, blocks_before=0):
    from beyond.quantization.attention import triton_prefill
    from beyond.quantization.attention.triton_paged import QuantizedTritonAttention

    query, k_cache, v_cache, metadata = make_batch(*batch, heads, kv_heads, head_dim, name, block_size, device, dtype)
    expected = QuantizedReferenceAttention(device).attend(query.float(), k_cache, v_cache, metadata, 0.2)
    backend = QuantizedTritonAttention(device, dtype, head_dim)
    k_cache, v_cache = behind(blocks_before, k_cache), behind(blocks_before, v_cache)
    metadata.block_tables[metadata.block_tables >= 0] += blocks_before
    # A prefill with and without scratch memory.
    for scratch_bytes in (triton_prefill.SCRATCH_BYTES, 0)[: 2 if max(batch[0]) > 1 and name == "int8" else 1]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_prefill, "SCRATCH_BYTES", scratch_bytes)
            found = backend.attend(query, k_cache, v_cache, metadata, 0.2)
        assert found.shape == query.shape and found.dtype == dtype
        close(found, expected, dtype)


def check_store(name, kv_heads, head_dim, device, dtype, heads=0, norm=False, blocks_before=0):
    """Both kernels that store write what the reference writes, into the slots of the mapping and no other."""
    from beyond.quantization.attention import triton_store

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


@pytest.mark.skipif(INTERPRETED, reason="this is the inner run")
def test_the_kernels_are_right_in_the_interpreter(run_interpreted_tests):
    run_interpreted_tests(__file__)


@interpreted
@pytest.mark.parametrize(("name", "group"), [("int8", None), ("int8", 128), ("fp8", None)])
@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_interpreted_products_are_the_definition(shape, name, group):
    check_products(*shape, name, group, CPU, F32)


@interpreted
@pytest.mark.parametrize(("splits", "slices"), [(2, 1), (2, 4)])
@pytest.mark.parametrize("group", [None, 128])
def test_interpreted_split_k_gives_the_same(group, splits, slices):
    check_small_tiles(5, 300, 40, "int8", group, CPU, F32, splits=splits, slices=slices)


@interpreted
@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
def test_interpreted_tiles_of_large_matrices_give_the_same(tokens):
    """Those that Qwen2.5-7B's down product, and its gate and up, have with this many tokens."""
    from beyond.quantization.tiles import _measured_tiles, token_block

    block_m = token_block(tokens)
    for rows, columns, height, splits in (3584, 18944, 1, True), (18944, 3584, 2, False):
        tiles = _measured_tiles(rows, columns, block_m, height, splits, 132)
        if tiles is not None:  # down has a general rule's with 32 and 64
            check_products(tokens - 3, 600, 80, "int8", None, CPU, F32, tiles)


@interpreted
def test_interpreted_products_of_many_tokens_are_made_with_the_dequantised_matrix(monkeypatch):
    from beyond.quantization import products

    def fail(*_):
        raise AssertionError("multiplied in 8 bits")

    monkeypatch.setattr(products, "PRODUCT_MAX_TOKENS", 4)
    monkeypatch.setattr(products, "_product", fail)
    x, residual, counters = torch.randn(5, 200), torch.randn(5, 40), torch.zeros(1, dtype=torch.int32)
    weight, exact = make_weight(40, 200, "int8", 128, CPU, F32)
    expected = x.double() @ exact.t()
    close(products.product(x, weight), expected, F32)
    close(products.product_add(x, weight, residual.clone(), None, counters), residual + expected, F32)
    stream = products.product_add(x, weight, residual.clone(), torch.ones(40), counters)  # the norm is of its own sums
    close(stream.x, residual + expected, F32)


@interpreted
@pytest.mark.parametrize(
    ("preset", "options", "is_share"),
    [
        ("qwen2-tiny", {"quantization": "int8", "kv_cache_dtype": "int8"}, False),
        ("qwen2-tiny", {"quantization": "int8", "kv_cache_dtype": "int8"}, True),
        ("qwen3-tiny", {"kv_cache_dtype": "int8"}, False),
        ("llama-tiny", {"quantization": "int8", "quantization_group_size": 128}, False),
    ],
)
def test_interpreted_whole_models_give_the_references_tokens(preset, options, is_share, monkeypatch, draw_norm_weights):
    """`is_share`: as a rank's share whose sum over the ranks is its own part."""
    import beyond.quantization
    from beyond.quantization import SamplingParams, fused_layers
    from beyond.quantization.ranks import QuantizedRowParallelLinear

    prompts, params = [[5, 6, 7] * 3, [9, 10]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    options |= {"device": "cpu", "num_kvcache_blocks": 16, "kvcache_block_size": 4}
    reference, llm = (beyond.quantization.LLM(f"random:{preset}", **options) for _ in range(2))
    for engine in reference, llm:
        draw_norm_weights(engine.runner.model)
    expected = reference.generate(prompts, params, False)
    model = llm.runner.model
    for limit in "SKINNY_MAX_TOKENS", "SKINNY_GEMM_MAX_TOKENS":
        monkeypatch.setattr(fused_layers, limit, 8)  # a prompt is more than few tokens
    fused_layers.use_kernels(model)
    sums = []
    group = SimpleNamespace(all_reduce=lambda x, residual: sums.append(x) or residual.add_(x))
    for layer in model.layers if is_share else []:
        layer.self_attn.o_proj = QuantizedRowParallelLinear(layer.self_attn.o_proj, group)
        layer.mlp.down_proj = QuantizedRowParallelLinear(layer.mlp.down_proj, group)
    fused_layers.fuse_layers(model, model.layers[0].self_attn.backend)
    found = llm.generate(prompts, params, False)
    assert [o["token_ids"] for o in found] == [o["token_ids"] for o in expected]
    assert bool(sums) == is_share


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_the_reference_reads_no_table_entry_behind_a_context(batch):
    query, k_cache, v_cache, metadata = make_batch(*batch, *HEADS[0], "int8", 16, CPU, F32)
    attention = QuantizedReferenceAttention(CPU)
    expected = attention.attend(query, k_cache, v_cache, metadata, 0.2)
    metadata.block_tables[metadata.block_tables < 0] = 2**30  # what a step before left there
    assert torch.equal(attention.attend(query, k_cache, v_cache, metadata, 0.2), expected)


@interpreted
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_interpreted_attention_is_the_reference(batch, heads, name):
    check_attention(batch, *heads, name, 16 if heads[2] == 16 else 32, CPU, F32, blocks_before=3)


@interpreted
@pytest.mark.parametrize("heads", [(12, 1, 20), (3, 3, 16)], ids=str)
def test_interpreted_attention_of_groups_wider_than_a_tile_and_of_single_heads_is_the_reference(heads):
    check_attention(BATCHES["mixed"], *heads, "int8", 32, CPU, F32)


@interpreted
def test_interpreted_prefill_copies_a_context_that_fits_into_scratch_memory_and_no_other(monkeypatch):
    from beyond.quantization.attention import triton_prefill

    query, *caches, metadata = make_batch(*BATCHES["no decode"], 4, 2, 16, "int8", 4, CPU, F32)
    copy, sizes = triton_prefill.dequantize_blocks, []

    def measured_copy(*args):
        copies = copy(*args)
        sizes.append(copies[0].nbytes + copies[1].nbytes)
        return copies

    monkeypatch.setattr(triton_prefill, "dequantize_blocks", measured_copy)
    triton_prefill.prefill(query, *caches, metadata, 0.2, torch.empty_like(query))
    [needed] = sizes
    for limit in needed, needed - 1:
        monkeypatch.setattr(triton_prefill, "SCRATCH_BYTES", limit)
        triton_prefill.prefill(query, *caches, metadata, 0.2, torch.empty_like(query))
    assert sizes == [needed] * 2


@interpreted
@pytest.mark.parametrize(("heads", "norm"), [(0, False), (4, False), (6, True)])
def test_interpreted_store_is_the_reference(heads, norm):
    """int8 alone: Triton 3.7's interpreter rounds 31.9 to 16 in e4m3 (it drops the carry into the exponent)."""
    check_store("int8", 2, 24, CPU, F32, heads, norm, blocks_before=3)


def test_keys_and_values_whose_heads_are_not_adjacent_are_refused():
    pytest.importorskip("triton")
    from beyond.quantization.attention import triton_store

    rows, turned = torch.zeros(2, 4, 4), torch.zeros(2, 4, 4).transpose(1, 2)
    gaps = torch.zeros(2, 32).as_strided((2, 4, 4), (32, 4, 2))
    for name, key, value in (("key", turned, rows), ("value", rows, turned), ("value", rows, gaps)):
        with pytest.raises(ValueError, match=f"{name} has strides .* must be adjacent"):
            triton_store.store(key, value, None, None, None)


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 33, 64, 128, 256])
def test_tiles_fill_an_h200_and_no_two_warps_convert_the_same_weight(tokens, group, monkeypatch):
    pytest.importorskip("triton")
    from beyond.quantization import fused_layers
    from beyond.quantization import tiles as module

    monkeypatch.setattr(module, "_chip", lambda device: (132, 233472))  # multiprocessors, bytes of shared memory
    choose = module.choose_tiles.__wrapped__
    matrices = [(1152, 896), (896, 4864), (4608, 3584), (3584, 18944), (152064, 3584), (4864, 896), (4096, 14336)]
    for rows, columns in matrices:
        for height, splits in (1, False), (2, False), (1, True):
            tiles = choose(rows, columns, tokens, 2, group, CUDA, height, splits)
            assert tiles.slices in (1, tiles.warps), "every warp has a slice, or none has"
            assert tiles.slices == 1 or columns % tiles.columns == 0, "no slice is cut off"
            assert tiles.rows * height * tiles.slices >= 16 * tiles.warps, "a warp multiplies 16 rows"
            assert tiles.columns == group * tiles.slices or not group, "a tile, or a slice, has one scale per row"
            block_m = module.token_block(tokens)
            assert tokens > 8 or tiles.rows * height in (16, 32), "few tokens: low tiles, in many programs"
            assert tiles.stages >= 2 and tiles.stages * (tiles.rows * height + 2 * block_m) * tiles.columns <= 233472
            programs = -(-rows // tiles.rows) * -(-tokens // block_m)
            assert tiles.splits == 1 or splits and programs <= fused_layers.MAX_TILES
            cut = tiles.splits == 8 or columns // (tiles.columns * tiles.splits) < 4  # as far as it may be
            assert not splits or cut or programs * tiles.splits >= 132


@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 128])
def test_tiles_fit_into_the_shared_memory_of_other_gpus(tokens, monkeypatch):
    pytest.importorskip("triton")
    from beyond.quantization import tiles as module

    monkeypatch.setattr(module, "_chip", lambda device: (128, 101376))  # a GeForce RTX 4090's
    block_m = module.token_block(tokens)
    for rows, columns in (4608, 3584), (3584, 3584), (18944, 3584), (3584, 18944), (152064, 3584), (4096, 1024):
        for height, splits in (1, False), (2, False), (1, True):
            tiles = module.choose_tiles.__wrapped__(rows, columns, tokens, 2, 0, CUDA, height, splits)
            assert tiles.stages * (tiles.rows * height + 2 * block_m) * tiles.columns <= 101376


@pytest.mark.parametrize("tokens", [33, 64, 65, 128])
def test_two_programs_with_many_rows_of_a_large_matrix_share_a_multiprocessors_memory(tokens, monkeypatch):
    """One converts weights while the other multiplies. A stage less than was asked for is allocated."""
    pytest.importorskip("triton")
    from beyond.quantization import tiles as module

    monkeypatch.setattr(module, "_chip", lambda device: (132, 233472))
    block_m = module.token_block(tokens)
    for rows, columns, height, splits in (18944, 3584, 2, False), (37888, 3584, 1, False), (3584, 18944, 1, True):
        tiles = module.choose_tiles.__wrapped__(rows, columns, tokens, 2, 0, CUDA, height, splits)
        assert tiles.rows * height == 64 and tiles.warps == 4, "a warp group's instruction is 64 high"
        assert 2 * (tiles.stages - 1) * (64 + 2 * block_m) * tiles.columns <= 233472
    alone = module.choose_tiles.__wrapped__(3584, 3584, 128, 2, 0, CUDA, 1, True)
    assert alone.splits * 56 < 132 and alone.stages == 4, "one that shares it with nobody has more loads in flight"


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("stored", ["*i8", "*fp8e4nv"])
def test_compiled_for_hopper_no_value_is_read_from_shared_memory_by_the_byte(stored, tmp_path, monkeypatch):
    """The decode kernel; compiling it needs no GPU."""
    pytest.importorskip("triton")
    from beyond.quantization.attention.triton_decode import choose_quantized_config, quantized_decode_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
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


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "group"), [("int8", None), ("int8", 128), ("fp8", None)])
@pytest.mark.parametrize("shape", [*PRODUCTS[1:], *REAL, *LARGE], ids=str)
def test_on_a_gpu_products_are_the_definition(shape, name, group):
    check_products(*shape, name, group, CUDA, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [None, 128])
def test_on_a_gpu_products_are_the_definition_in_other_dtypes(group, dtype):
    check_products(*REAL[1], "int8", group, CUDA, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize(("splits", "slices"), [(4, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("name", FORMATS)
def test_on_a_gpu_split_k_gives_the_same(name, group, splits, slices):
    check_small_tiles(5, 4864, 896, name, group, CUDA, torch.bfloat16, splits=splits, slices=slices)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("heads", REAL_HEADS, ids=str)
@pytest.mark.parametrize("batch", REAL_BATCHES.values(), ids=REAL_BATCHES)
def test_on_a_gpu_attention_is_the_reference(batch, heads, name):
    check_attention(batch, *heads, name, 64, CUDA, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_on_a_gpu_attention_is_the_reference_in_other_dtypes(name, dtype):
    check_attention(REAL_BATCHES["mixed"], *REAL_HEADS[1], name, 64, CUDA, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("heads", "norm"), [(0, False), (14, False), (28, True)])
def test_on_a_gpu_store_is_the_reference(heads, norm, name, dtype):
    check_store(name, 4, 128, CUDA, dtype, heads, norm)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [REAL_BATCHES["decode"], REAL_BATCHES["mixed"]], ids=["decode", "mixed"])
def test_on_a_gpu_attention_reads_behind_2_to_the_31_elements(batch):
    check_attention(batch, 6, 3, 64, "int8", 64, CUDA, torch.bfloat16, blocks_before=2**31 // (64 * 3 * 64))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [0, 6])
def test_on_a_gpu_keys_and_values_are_stored_behind_2_to_the_31_elements(heads):
    check_store("int8", 3, 64, CUDA, torch.bfloat16, heads, blocks_before=2**31 // (4 * 3 * 64))
