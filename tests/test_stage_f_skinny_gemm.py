"""Skinny GEMMs and what is fused with them, against their definitions in float64."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from hopper import compiled_for_hopper

from stage_a_naive.loading import resolve
from stage_d_paged.attention.reference import store
from stage_d_paged.config import ModelConfig
from stage_d_paged.layers import QKNorm, RotaryEmbedding, rotate

CPU, CUDA, F32 = torch.device("cpu"), torch.device("cuda"), torch.float32
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_the_kernels_are_right_in_the_interpreter")
pytestmark = pytest.mark.usefixtures("guarded_memory", "shuffled_programs") if INTERPRETED else []
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# tokens, hidden, heads, KV heads, head_dim
ATTENTION = [(1, 32, 2, 1, 16), (5, 56, 3, 3, 24), (17, 40, 4, 2, 64), (70, 24, 7, 1, 20)]
REAL = [(9, 896, 14, 2, 64), (32, 1024, 16, 8, 128), (64, 2048, 32, 8, 64), (32, 3584, 28, 4, 128)]
# hidden, intermediate, heads, KV heads, head_dim: of a model, or of what each of two ranks has of it
SMALL = {
    "qwen2.5-0.5b": (896, 4864, 14, 2, 64),
    "qwen3-0.6b": (1024, 3072, 16, 8, 128),
    "llama-3.2-1b": (2048, 8192, 32, 8, 64),
}
LARGE = {
    "qwen2.5-7b": (3584, 18944, 28, 4, 128),
    "half of qwen2.5-7b": (3584, 9472, 14, 2, 128),
    "llama-3.1-8b": (4096, 14336, 32, 8, 128),
    "half of llama-3.1-8b": (4096, 7168, 16, 4, 128),
}
EPS, HEAD_EPS = 0.1, 3.0  # large enough to be noticed


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare as a whole: single numbers of a rounded sum may be far off where they cancel."""
    error = ((found.double() - expected.double()).norm() / expected.double().norm()).item()
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


def normed(x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return F.rms_norm(x.double(), x.shape[1:], None, eps)


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A copy between guards, in the interpreter."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def check_qkv(tokens, hidden, heads, kv_heads, head_dim, bias, head_norm, device, dtype, tiles=None):
    from stage_f_graph_tp.kernels.skinny_gemm import qkv_rotate, sum_squares

    torch.manual_seed(tokens + heads)
    make = lambda *shape: torch.randn(*shape, device=device).to(dtype)  # noqa: E731
    total = heads + 2 * kv_heads
    x = make(tokens, hidden + 3)[:, :hidden]
    weight, b = make(total * head_dim, hidden), make(total * head_dim) if bias else None
    config = ModelConfig.from_hf(resolve("random:qwen3-tiny").config)
    object.__setattr__(config, "head_dim", head_dim)
    rotary = RotaryEmbedding(config, 50, dtype, device)
    norm = QKNorm(heads, kv_heads, head_dim, HEAD_EPS, dtype, device)
    norm.weight[:heads], norm.weight[heads:] = 1 + torch.rand(2, 1, head_dim, device=device)
    positions = torch.randint(0, 50, (tokens,), device=device)
    slots = 1 + torch.randperm(40 * 4 - 1, device=device)[:tokens]
    slots[tokens // 2 :: 3] = -1
    slots[0] = 0
    pool = torch.full((40, 4, kv_heads, head_dim), 7.0, device=device, dtype=dtype)
    pools = [[guarded(pool) for _ in "kv"] for _ in range(2)]

    qkv = normed(x) @ weight.double().t() + (b.double() if bias else 0.0)
    qk, value = qkv.view(tokens, total, head_dim).split((heads + kv_heads, kv_heads), dim=1)
    if head_norm:
        qk = F.rms_norm(qk, (head_dim,), None, HEAD_EPS) * norm.weight.double()
    cos, sin = rotary(positions)
    expected, key = rotate(qk, cos.double(), sin.double()).split((heads, kv_heads), dim=1)
    store(key.to(dtype), value.to(dtype).contiguous(), *pools[0], slots)
    found = qkv_rotate(
        sum_squares(x),
        EPS,
        weight,
        b,
        heads,
        (rotary.cos, rotary.sin),
        positions,
        tuple(pools[1]),
        slots,
        (norm.weight, HEAD_EPS) if head_norm else None,
        tiles,
    )

    assert found.shape == (tokens, heads, head_dim) and found.dtype == dtype
    close(found, expected, dtype)
    written = slots[slots >= 0]
    for ours, right in zip(*([cache.flatten(0, 1) for cache in pools[i]] for i in (1, 0)), strict=True):
        if len(written):
            close(ours[written], right[written], dtype)
        untouched = torch.ones(len(ours), dtype=torch.bool, device=device)
        untouched[written] = False
        assert (ours[untouched] == 7.0).all(), "a slot of no token was written"


def check_gate_up(tokens, hidden, intermediate, device, dtype, tiles=None):
    from stage_f_graph_tp.kernels.skinny_gemm import gate_up_silu, sum_squares

    torch.manual_seed(tokens)
    x = (100 * torch.randn(tokens, hidden + 5, device=device)).to(dtype)[:, :hidden]
    weight = torch.randn(2 * intermediate, hidden, device=device).to(dtype)
    found = gate_up_silu(sum_squares(x), 1000.0, weight, tiles)
    gate, up = (normed(x, 1000.0) @ weight.double().t()).chunk(2, dim=-1)
    assert found.shape == (tokens, intermediate) and found.dtype == dtype
    close(found, F.silu(gate) * up, dtype)


def check_product_add(tokens, in_features, out_features, splits, device, dtype):
    from stage_f_graph_tp.kernels.skinny_gemm import Tiles, product_add

    torch.manual_seed(tokens)
    x = torch.randn(tokens, in_features + 1, device=device).to(dtype)[:, :in_features]
    weight = torch.randn(out_features, in_features, device=device).to(dtype)
    residual = torch.randn(tokens, out_features + 3, device=device).to(dtype)
    arrival_counters = torch.zeros(256, dtype=torch.int32, device=device)
    tiles = None if splits is None else Tiles(rows=16, splits=splits)
    first, second = (guarded(residual)[:, :out_features] for _ in range(2))
    expected = first.double() + x.double() @ weight.double().t()
    stream = product_add(x, weight, first, arrival_counters, tiles)
    assert stream.x is first, "written over the residual"
    close(first, expected, dtype)
    assert not arrival_counters.any(), "the counters must be left as they were"
    again = product_add(x, weight, second, arrival_counters, tiles)
    assert torch.equal(again.x, first), "the parts are added up in the same order every time"
    squares = stream.squares.double().sum(0)
    torch.testing.assert_close(squares, first.double().square().sum(1), rtol=1e-5, atol=0)


def check_chain(tokens, splits, device, dtype):
    """A product reads the sums of squares that another has made, over 3 parts of a row."""
    from stage_f_graph_tp.kernels.skinny_gemm import Tiles, gate_up_silu, product_add

    torch.manual_seed(tokens)
    make = lambda *shape: torch.randn(*shape, device=device).to(dtype)  # noqa: E731
    x, weight, residual, gate_up = make(tokens, 64), make(40, 64), make(tokens, 40), make(48, 40)
    arrival_counters = torch.zeros(8, dtype=torch.int32, device=device)
    stream = product_add(x, weight, residual, arrival_counters, Tiles(rows=16, splits=splits))
    assert stream.squares.shape == (3, tokens)
    gate, up = (normed(stream.x) @ gate_up.double().t()).chunk(2, dim=-1)
    close(gate_up_silu(stream, EPS, gate_up), F.silu(gate) * up, dtype)


def chosen_tiles(tokens, hidden, intermediate, heads, kv_heads, head_dim):
    """Of the four products of a layer, on the CPU: QKV, out, gate and up, down."""
    from stage_f_graph_tp.kernels.skinny_gemm import choose_tiles

    return [
        choose_tiles((heads + 2 * kv_heads) * head_dim // 2, hidden, tokens, CPU),
        choose_tiles(hidden, heads * head_dim, tokens, CPU, splits=True),
        choose_tiles(intermediate, hidden, tokens, CPU),
        choose_tiles(hidden, intermediate, tokens, CPU, splits=True),
    ]


@pytest.fixture
def h200(monkeypatch):
    """The tiles' module, as if the CPU were an H200: multiprocessors, bytes of shared memory for loads."""
    pytest.importorskip("triton")
    from stage_f_graph_tp.kernels import skinny_gemm

    monkeypatch.setattr(skinny_gemm, "_chip", lambda device: (132, 211 << 10))
    return skinny_gemm


@pytest.mark.parametrize("model", SMALL)
def test_programs_of_small_models_run_at_once_where_tiles_may_be_small_enough(model, h200):
    hidden, intermediate, heads, kv_heads, head_dim = SMALL[model]
    pairs = (heads + 2 * kv_heads) * head_dim // 2
    for tiles, rows in zip(chosen_tiles(9, *SMALL[model]), (pairs, hidden, intermediate, hidden), strict=True):
        fits = [height for height in (16, 32) if -(-rows // height) * tiles.splits <= 132]
        assert tiles == h200.Tiles(min(fits, default=64), tiles.splits)
    found = [tiles.splits for tiles in chosen_tiles(9, *SMALL[model])]
    assert found == [1, 2 if model == "qwen3-0.6b" else 1, 1, {896: 8, 1024: 4, 2048: 4}[hidden]]


@pytest.mark.parametrize("tokens", [1, 16, 17, 32])
@pytest.mark.parametrize("model", LARGE)
def test_tiles_of_large_models_are_64_weight_rows_and_fit_into_shared_memory_and_a_mailbox(model, tokens, h200):
    from stage_f_graph_tp.kernels.rank_sum import PROGRAMS, SLOT

    hidden, *_ = LARGE[model]
    qkv, out, gate_up, down = chosen_tiles(tokens, *LARGE[model])
    assert (qkv.rows, gate_up.rows, out.rows, down.rows) == (32, 32, 64, 64)  # pairs, or rows
    together = {"qwen2.5-7b": 3, "llama-3.1-8b": 2, "half of qwen2.5-7b": 3 if tokens > 16 else 1}.get(model, 1)
    for tiles, count in (qkv, 1), (out, 1), (gate_up, together), (down, 1):  # programs that run on a multiprocessor
        settings = h200._settings(tokens, torch.bfloat16, CPU, 64, hidden, tiles.stages)
        block_m, stages = settings["BLOCK_M"], settings["num_stages"]
        used = stages * (64 + block_m) * 256
        assert stages == tiles.stages and used <= 211 << 10
        assert count * (used + 1024) <= 228 << 10, "fewer run at a time"
        assert tiles.splits == 2 or (count + 1) * used > 227 << 10, "memory for more loads is left"
        assert tiles.splits == 1 or 4 * 64 * block_m <= SLOT.value and hidden / 64 <= PROGRAMS.value
    expected = 2 * [5 if tokens > 16 else 8]
    assert [out.stages, down.stages] == expected, "above 16 tokens the next product's programs get room beside them"


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("rows", [32, 64])
def test_compiled_for_hopper_64_weight_rows_are_multiplied_from_shared_memory(rows, tmp_path, monkeypatch):
    """Lower tiles by instructions that read the weights from registers. Compiling needs no GPU."""
    pytest.importorskip("triton")
    from stage_f_graph_tp.kernels.skinny_gemm_kernels import product_add_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"SIZE": 3584, "OUT_SIZE": 3584, "SPLITS": 2, "BLOCK_N": rows, "RANK": 0, "RANKS": 1, "PDL": True}
    constants |= {"BLOCK_M": 16, "BLOCK_K": 128, "PRECISION": "tf32"}
    types = dict.fromkeys(product_add_kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "weight", "residual"), "*bf16") | dict.fromkeys(("squares", "partial"), "*fp32")
    types |= dict.fromkeys(("arrival_counters", "peers"), "*i32")
    found = compiled_for_hopper(product_add_kernel, types, constants, ("x_stride", "residual_stride"), num_stages=8)
    assert ("wgmma.mma" in found) == (rows == 64) and ("mma.sync" in found) == (rows == 32)


@pytest.mark.skipif(INTERPRETED, reason="this is the inner run")
def test_the_kernels_are_right_in_the_interpreter(run_interpreted_tests):
    run_interpreted_tests(__file__)


@interpreted
@pytest.mark.parametrize(("bias", "head_norm"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("shape", ATTENTION, ids=str)
def test_interpreted_qkv_is_the_definition(shape, bias, head_norm):
    check_qkv(*shape, bias, head_norm, CPU, F32)


@interpreted
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_interpreted_every_tile_gives_the_same(rows):
    from stage_f_graph_tp.kernels.skinny_gemm import Tiles

    check_qkv(17, 40, 4, 2, 64, True, False, CPU, F32, Tiles(rows))
    check_qkv(5, 56, 3, 3, 24, False, True, CPU, F32, Tiles(rows))
    check_gate_up(5, 72, 40, CPU, F32, Tiles(rows))


@interpreted
def test_interpreted_tiles_of_large_models_give_the_same(monkeypatch):
    from stage_f_graph_tp.kernels import skinny_gemm

    monkeypatch.setattr(skinny_gemm, "_LARGE_HIDDEN", 72)
    check_qkv(17, 72, 4, 2, 64, True, False, CPU, F32)
    check_gate_up(5, 72, 40, CPU, F32)
    check_product_add(5, 300, 72, None, CPU, F32)
    assert skinny_gemm.choose_tiles(72, 300, 5, CPU, splits=True).splits == 2, "and not what a small model's are"


@interpreted
@pytest.mark.parametrize(("tokens", "hidden", "intermediate"), [(1, 32, 64), (5, 72, 64), (67, 24, 20)])
def test_interpreted_gate_and_up_are_the_definition(tokens, hidden, intermediate):
    check_gate_up(tokens, hidden, intermediate, CPU, F32)


@interpreted
@pytest.mark.parametrize("splits", [None, 1, 2, 4])
@pytest.mark.parametrize(("tokens", "in_features", "out_features"), [(1, 320, 64), (5, 72, 40), (67, 136, 20)])
def test_interpreted_product_and_sum_are_the_definition(tokens, in_features, out_features, splits):
    check_product_add(tokens, in_features, out_features, splits, CPU, F32)


@interpreted
@pytest.mark.parametrize("splits", [1, 2])
def test_interpreted_product_reads_the_squares_of_the_one_before(splits):
    check_chain(5, splits, CPU, F32)


@interpreted
def test_interpreted_product_of_more_tiles_than_counters_is_refused():
    from stage_f_graph_tp.kernels.skinny_gemm import Tiles, product_add

    arrival_counters = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="3 tiles need as many arrival counters, got 2"):
        product_add(torch.ones(1, 64), torch.ones(40, 64), torch.ones(1, 40), arrival_counters, Tiles(16, 2))


@interpreted
@pytest.mark.parametrize("tokens, out_features", [(64, 64), (1, 16 * 1025)])
def test_interpreted_product_that_does_not_fit_into_a_mailbox_is_refused(tokens, out_features):
    from stage_f_graph_tp.kernels.rank_sum import Peers
    from stage_f_graph_tp.kernels.skinny_gemm import Tiles, product_add

    x, weight, residual = torch.ones(tokens, 1), torch.ones(out_features, 1), torch.ones(tokens, out_features)
    with pytest.raises(ValueError, match="do not fit into a mailbox"):
        product_add(x, weight, residual, x, Tiles(64 if tokens == 64 else 16), Peers(x, 0, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("splits", [1, 2])
def test_on_a_gpu_a_product_reads_the_squares_of_the_one_before(splits, dtype):
    check_chain(5, splits, CUDA, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("bias", "head_norm"), [(False, True), (True, False)])
@pytest.mark.parametrize("shape", ATTENTION + REAL, ids=str)
def test_on_a_gpu_qkv_is_the_definition(shape, bias, head_norm, dtype):
    check_qkv(*shape, bias, head_norm, CUDA, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"),
    [(5, 72, 40), (16, 896, 4864), (48, 1024, 3072), (64, 2048, 8192), (1, 3584, 9472), (32, 3584, 18944)],
)
def test_on_a_gpu_gate_and_up_are_the_definition(tokens, hidden, intermediate, dtype):
    check_gate_up(tokens, hidden, intermediate, CUDA, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("splits", [None, 1, 4])
@pytest.mark.parametrize(
    ("tokens", "in_features", "out_features"),
    [(5, 72, 40), (16, 4864, 896), (33, 2048, 1024), (64, 896, 896), (1, 1792, 3584), (32, 18944, 3584)],
)
def test_on_a_gpu_product_and_sum_are_the_definition(tokens, in_features, out_features, splits, dtype):
    check_product_add(tokens, in_features, out_features, splits, CUDA, dtype)
