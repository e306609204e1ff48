"""Skinny GEMMs and what is fused with them, against their definitions in float64."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

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
REAL = [(9, 896, 14, 2, 64), (32, 1024, 16, 8, 128), (64, 2048, 32, 8, 64)]
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
        sum_squares(x), EPS, weight, b, heads, (rotary.cos, rotary.sin), positions, tuple(pools[1]), slots,
        (norm.weight, HEAD_EPS) if head_norm else None, tiles,
    )  # fmt: skip

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
@pytest.mark.parametrize("tokens, out_features", [(64, 64), (1, 16 * 513)])
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
    ("tokens", "hidden", "intermediate"), [(5, 72, 40), (16, 896, 4864), (48, 1024, 3072), (64, 2048, 8192)]
)
def test_on_a_gpu_gate_and_up_are_the_definition(tokens, hidden, intermediate, dtype):
    check_gate_up(tokens, hidden, intermediate, CUDA, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("splits", [None, 1, 4])
@pytest.mark.parametrize(
    ("tokens", "in_features", "out_features"), [(5, 72, 40), (16, 4864, 896), (33, 2048, 1024), (64, 896, 896)]
)
def test_on_a_gpu_product_and_sum_are_the_definition(tokens, in_features, out_features, splits, dtype):
    check_product_add(tokens, in_features, out_features, splits, CUDA, dtype)
