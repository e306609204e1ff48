"""Skinny GEMMs and the work fused with them, against their definitions in float64."""

from __future__ import annotations

import re
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import CASE, interpreted, on_a_gpu, relative_error, rotary_and_norm
from no_gpu import H200, PretendedDevice, compiled_for_hopper, recorded_launches

from stage_d_paged.attention.reference import store
from stage_d_paged.layers import rotate

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# tokens, hidden, heads, KV heads, head_dim
ATTENTION = [(1, 32, 2, 1, 16), (5, 56, 3, 3, 24), (17, 40, 4, 2, 64), (70, 24, 7, 1, 20)]
REAL = [(9, 896, 14, 2, 64), (32, 1024, 16, 8, 128), (64, 2048, 32, 8, 64), (32, 3584, 28, 4, 128)]
# hidden, intermediate, heads, KV heads, head_dim: of a model, or of what each of two or four ranks has of it
SMALL = {
    "qwen2.5-0.5b": (896, 4864, 14, 2, 64),
    "qwen3-0.6b": (1024, 3072, 16, 8, 128),
    "llama-3.2-1b": (2048, 8192, 32, 8, 64),
}
LARGE = {
    "qwen2.5-7b": (3584, 18944, 28, 4, 128),
    "half of qwen2.5-7b": (3584, 9472, 14, 2, 128),
    "a quarter of qwen2.5-7b": (3584, 4736, 7, 1, 128),
    "llama-3.1-8b": (4096, 14336, 32, 8, 128),
    "half of llama-3.1-8b": (4096, 7168, 16, 4, 128),
}
EPS, HEAD_EPS = 0.1, 3.0  # large enough to be noticed


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = relative_error(found, expected)
    assert found.shape == expected.shape and found.dtype == dtype and error < TOLERANCE[dtype], f"error {error:.2e}"


def normed(x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return F.rms_norm(x.double(), x.shape[1:], None, eps)


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A copy between guards, in the interpreter."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def cut(rows: int | None, splits: int = 1):
    """Tiles of this many weight rows, or pairs; None: those that are chosen."""
    from stage_f_graph_tp.kernels.skinny_gemm import Tiles

    return None if rows is None else Tiles(rows, splits)


def test_the_kernels_are_right_in_the_interpreter(run_interpreted_tests):
    run_interpreted_tests(__file__)


# Of tiles: weight rows, or pairs of rows; None is what is chosen. Of ATTENTION: bias, norm of heads, tiles.
WITH = [(False, True, None), (True, False, None), (True, True, None)]
TILES = (16, 32, 64)
TILED = [((17, 40, 4, 2, 64), True, False), ((5, 56, 3, 3, 24), False, True)]


@pytest.mark.parametrize(
    CASE,
    [
        *interpreted(*((shape, *rest) for shape, rest in product(ATTENTION, WITH))),
        *interpreted(*((*row, tiles) for row, tiles in product(TILED, TILES))),
        *on_a_gpu(*((shape, *rest) for shape, rest in product(ATTENTION + REAL, WITH[:2]))),
    ],
)
def test_qkv_is_the_definition(case, device, dtype):
    from stage_f_graph_tp.kernels.skinny_gemm import qkv_rotate, sum_squares

    (tokens, hidden, heads, kv_heads, head_dim), bias, head_norm, tiles = case
    torch.manual_seed(tokens + heads)
    make = lambda *shape: torch.randn(*shape, device=device).to(dtype)  # noqa: E731
    total = heads + 2 * kv_heads
    x = make(tokens, hidden + 3)[:, :hidden]
    weight, b = make(total * head_dim, hidden), make(total * head_dim) if bias else None
    rotary, norm = rotary_and_norm(heads, kv_heads, head_dim, HEAD_EPS, dtype, device)
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
    tables, weights = (rotary.cos, rotary.sin), (norm.weight, HEAD_EPS) if head_norm else None
    cache = tuple(pools[1])
    stream = sum_squares(x)
    found = qkv_rotate(stream, EPS, weight, b, heads, tables, positions, cache, slots, weights, cut(tiles))

    close(found, expected, dtype)
    written = slots[slots >= 0]
    for ours, right in zip(*([cache.flatten(0, 1) for cache in pools[i]] for i in (1, 0)), strict=True):
        if len(written):
            close(ours[written], right[written], dtype)
        untouched = torch.ones(len(ours), dtype=torch.bool, device=device)
        untouched[written] = False
        assert (ours[untouched] == 7.0).all(), "a slot of no token was written"


# Tokens, hidden, intermediate, tiles; then tokens, in features, out features, tiles and splits. None: what is chosen.
GATE_UP = [(1, 32, 64, None), (5, 72, 64, None), (67, 24, 20, None), *((5, 72, 40, rows) for rows in TILES)]
REAL_GATE_UP = [(5, 72, 40), (16, 896, 4864), (48, 1024, 3072), (64, 2048, 8192), (1, 3584, 9472), (32, 3584, 18944)]
PRODUCTS = [
    *product([(1, 320, 64), (5, 72, 40), (67, 136, 20)], (None, (16, 1), (16, 2), (16, 4))),
    ((5, 300, 72), (64, 2)),
]
REAL_PRODUCTS = [(5, 72, 40), (16, 4864, 896), (33, 2048, 1024), (64, 896, 896), (1, 1792, 3584), (32, 18944, 3584)]


@pytest.mark.parametrize(CASE, interpreted(*GATE_UP) + on_a_gpu(*((*shape, None) for shape in REAL_GATE_UP)))
def test_gate_and_up_are_the_definition(case, device, dtype):
    from stage_f_graph_tp.kernels.skinny_gemm import gate_up_silu, sum_squares

    tokens, hidden, intermediate, tiles = case
    torch.manual_seed(tokens)
    x = (100 * torch.randn(tokens, hidden + 5, device=device)).to(dtype)[:, :hidden]
    weight = torch.randn(2 * intermediate, hidden, device=device).to(dtype)
    gate, up = (normed(x, 1000.0) @ weight.double().t()).chunk(2, dim=-1)
    close(gate_up_silu(sum_squares(x), 1000.0, weight, cut(tiles)), F.silu(gate) * up, dtype)


@pytest.mark.parametrize(CASE, interpreted(*PRODUCTS) + on_a_gpu(*product(REAL_PRODUCTS, (None, (16, 1), (16, 4)))))
def test_product_and_sum_are_the_definition(case, device, dtype):
    from stage_f_graph_tp.kernels.skinny_gemm import product_add

    (tokens, in_features, out_features), tiles = case
    torch.manual_seed(tokens)
    x = torch.randn(tokens, in_features + 1, device=device).to(dtype)[:, :in_features]
    weight = torch.randn(out_features, in_features, device=device).to(dtype)
    residual = torch.randn(tokens, out_features + 3, device=device).to(dtype)
    arrival_counters = torch.zeros(256, dtype=torch.int32, device=device)
    tiles = tiles and cut(*tiles)
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


@pytest.mark.parametrize(CASE, interpreted(1, 2) + on_a_gpu(1, 2))
def test_a_product_reads_the_squares_of_the_one_before(case, device, dtype):
    """They are of 3 parts of a row. The case: splits."""
    from stage_f_graph_tp.kernels.skinny_gemm import gate_up_silu, product_add

    torch.manual_seed(5)
    make = lambda *shape: torch.randn(*shape, device=device).to(dtype)  # noqa: E731
    x, weight, residual, gate_up = make(5, 64), make(40, 64), make(5, 40), make(48, 40)
    arrival_counters = torch.zeros(8, dtype=torch.int32, device=device)
    stream = product_add(x, weight, residual, arrival_counters, cut(16, case))
    assert stream.squares.shape == (3, 5)
    gate, up = (normed(stream.x) @ gate_up.double().t()).chunk(2, dim=-1)
    close(gate_up_silu(stream, EPS, gate_up), F.silu(gate) * up, dtype)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("tokens", "out_features", "rows", "ranks", "message"),
    [
        (1, 40, 16, 1, "3 tiles need as many arrival counters, got 2"),
        (64, 64, 64, 2, "do not fit into a mailbox"),
        (1, 16 * 1025, 16, 2, "do not fit into a mailbox"),
    ],
)
def test_products_that_counters_or_a_mailbox_have_no_room_for_are_refused(tokens, out_features, rows, ranks, message):
    from stage_f_graph_tp.kernels.rank_sum import Peers
    from stage_f_graph_tp.kernels.skinny_gemm import product_add

    x, weight, residual = torch.ones(tokens, 1), torch.ones(out_features, 1), torch.ones(tokens, out_features)
    counters, peers = torch.zeros(2, dtype=torch.int32), Peers(x, 0, ranks) if ranks > 1 else None
    with pytest.raises(ValueError, match=message):
        product_add(x, weight, residual, counters, cut(rows, 2), peers)


def launched(monkeypatch, tokens, hidden, intermediate, heads, kv_heads, head_dim):
    """The four products of a layer on an H200: QKV, out, gate and up, down. Their tensors have no memory."""
    pytest.importorskip("triton")
    from stage_f_graph_tp.kernels import skinny_gemm

    kernels = "qkv_rotate_kernel", "gate_up_silu_kernel", "product_add_kernel"
    launches = recorded_launches(monkeypatch, skinny_gemm, *kernels)
    with PretendedDevice(H200):
        empty = partial(torch.empty, dtype=torch.bfloat16, device=H200)
        wide, width = (heads + 2 * kv_heads) * head_dim, heads * head_dim
        stream = skinny_gemm.Stream(empty(tokens, hidden), empty(1, tokens))
        cache, slots, counters = 2 * (empty(4, 4, kv_heads, head_dim),), empty(tokens), empty(4096)
        qkv = empty(wide, hidden)
        skinny_gemm.qkv_rotate(stream, EPS, qkv, None, heads, 2 * (empty(9, 2, head_dim),), slots, cache, slots)
        skinny_gemm.product_add(empty(tokens, width), empty(hidden, width), stream.x, counters)
        skinny_gemm.gate_up_silu(stream, EPS, empty(2 * intermediate, hidden))
        skinny_gemm.product_add(empty(tokens, intermediate), empty(hidden, intermediate), stream.x, counters)
    return launches


@pytest.mark.usefixtures("pretended_gpus")
@pytest.mark.parametrize("model", SMALL)
def test_programs_of_small_models_run_at_once_where_tiles_may_be_small_enough(model, monkeypatch):
    hidden, intermediate, heads, kv_heads, head_dim = SMALL[model]
    sizes = (heads + 2 * kv_heads) * head_dim // 2, hidden, intermediate, hidden
    qkv, out, gate_up, down = launched(monkeypatch, 9, *SMALL[model])
    splits = 1, out.SPLITS, 1, down.SPLITS
    heights = qkv.PAIRS, out.BLOCK_N, gate_up.BLOCK_N, down.BLOCK_N
    for height, size, parts in zip(heights, sizes, splits, strict=True):
        assert height == min((rows for rows in (16, 32) if -(-size // rows) * parts <= 132), default=64)
    assert splits == (1, 2 if model == "qwen3-0.6b" else 1, 1, {896: 8, 1024: 4, 2048: 4}[hidden])


@pytest.mark.usefixtures("pretended_gpus")
@pytest.mark.parametrize("tokens", [17, 32, 48, 64, 96, 128])
@pytest.mark.parametrize("model", SMALL)
def test_for_more_tokens_tiles_are_those_of_the_largest_tensor_core_instructions_and_run_at_once(
    model, tokens, monkeypatch
):
    qkv, out, gate_up, down = launched(monkeypatch, tokens, *SMALL[model])
    hidden, intermediate, heads, kv_heads, head_dim = SMALL[model]
    assert 2 * qkv.PAIRS >= 64 and 2 * gate_up.BLOCK_N >= 64 and down.BLOCK_N == 64
    assert out.BLOCK_N == 64 or (out.SPLITS == 1 and tokens <= 32)
    rows = (heads + 2 * kv_heads) * head_dim // 2 / qkv.PAIRS, hidden / out.BLOCK_N, intermediate / gate_up.BLOCK_N
    for launch, tiles in zip((qkv, out, gate_up, down), (*rows, hidden / 64), strict=True):
        programs = tiles * -(-tokens // launch.BLOCK_M) * getattr(launch, "SPLITS", 1)
        assert programs <= 132
    heights = 2 * qkv.PAIRS, out.BLOCK_N, 2 * gate_up.BLOCK_N, down.BLOCK_N
    for launch, height in zip((qkv, out, gate_up, down), heights, strict=True):
        assert launch.num_stages * (height + launch.BLOCK_M) * launch.BLOCK_K * 2 <= 211 << 10
        assert launch.num_stages >= 4, "too few loads in flight"
    tokens_of_tiles = {launch.BLOCK_M for launch in (qkv, out, gate_up, down)}
    run_at_once = {"qwen2.5-0.5b": 128, "qwen3-0.6b": 0, "llama-3.2-1b": 64}[model]  # up to this many tokens
    assert (16 in tokens_of_tiles) == (32 < tokens <= run_at_once), "more programs, where they run at once"


@pytest.mark.usefixtures("pretended_gpus")
@pytest.mark.parametrize("tokens", [1, 16, 17, 32])
@pytest.mark.parametrize("model", LARGE)
def test_tiles_of_large_models_are_64_weight_rows_and_fit_into_shared_memory_and_a_mailbox(model, tokens, monkeypatch):
    hidden, *_ = LARGE[model]
    qkv, out, gate_up, down = launched(monkeypatch, tokens, *LARGE[model])
    from stage_f_graph_tp.kernels.rank_sum import PROGRAMS, SLOT

    assert (qkv.PAIRS, gate_up.BLOCK_N, out.BLOCK_N, down.BLOCK_N) == (32, 32, 64, 64)
    together = {"qwen2.5-7b": 3, "llama-3.1-8b": 2, "a quarter of qwen2.5-7b": 2}.get(model, 1)
    together = 3 if model == "half of qwen2.5-7b" and tokens > 16 else together
    for launch, count in (qkv, 1), (out, 1), (gate_up, together), (down, 1):  # programs of a multiprocessor
        used = launch.num_stages * (64 + launch.BLOCK_M) * 256
        assert used <= 211 << 10
        assert count * (used + 1024) <= 228 << 10, "fewer run at a time"
        assert hasattr(launch, "SPLITS") or (count + 1) * used > 227 << 10, "memory for more loads is left"
    for launch in (out, down):
        assert launch.SPLITS == 2 and SLOT.value >= 4 * 64 * launch.BLOCK_M and hidden / 64 <= PROGRAMS.value
        assert launch.num_stages == (5 if tokens > 16 else 8), "above 16 tokens the next product gets room beside it"


@pytest.mark.usefixtures("pretended_gpus")
def test_up_to_16_tokens_a_sum_of_four_ranks_has_no_splits_and_gate_up_fits_beside_the_output():
    pytest.importorskip("triton")
    from stage_f_graph_tp.kernels.skinny_gemm import choose_tiles

    out, down = (choose_tiles(3584, columns, 16, H200, splits=True, ranks=4) for columns in (896, 4736))
    gate_up = choose_tiles(4736, 3584, 16, H200)
    for tiles in out, down:
        assert (tiles.rows, tiles.splits) == (32, 1)
    memory = out.stages * (out.rows + 16) + gate_up.stages * (2 * gate_up.rows + 16)
    assert out.stages > 896 // 128 and memory * 256 <= 226 << 10
    for ranks, tokens in (2, 16), (4, 17):
        assert choose_tiles(3584, 4736, tokens, H200, splits=True, ranks=ranks).splits == 2


def product_for_hopper(**constants: object) -> str:
    """PTX of the product that is added to the residual, for 16 tokens of Qwen2.5-7B."""
    pytest.importorskip("triton")
    from stage_f_graph_tp.kernels.skinny_gemm_kernels import product_add_kernel

    constants = {"SIZE": 3584, "OUT_SIZE": 3584, "RANK": 0, "PDL": True} | constants
    constants |= {"BLOCK_M": 16, "BLOCK_K": 128, "PRECISION": "tf32"}
    types = dict.fromkeys(product_add_kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "weight", "residual"), "*bf16") | dict.fromkeys(("squares", "partial"), "*fp32")
    types |= {"arrival_counters": "*i32", "peers": "*i64"}
    return compiled_for_hopper(product_add_kernel, types, constants, ("x_stride", "residual_stride"), num_stages=8)


@pytest.mark.parametrize("rows", [32, 64])
def test_compiled_for_hopper_64_weight_rows_are_multiplied_from_shared_memory(rows):
    """Lower tiles by instructions that read the weights from registers."""
    found = product_for_hopper(BLOCK_N=rows, SPLITS=2, RANKS=1)
    assert ("wgmma.mma" in found) == (rows == 64) and ("mma.sync" in found) == (rows == 32)


@pytest.mark.parametrize("rows, splits", [(32, 1), (64, 2)])
def test_compiled_for_hopper_a_look_at_the_mailbox_loads_the_parts_of_all_ranks_together(rows, splits):
    found = product_for_hopper(BLOCK_N=rows, SPLITS=splits, RANKS=4)
    loads = re.findall(r"ld\.volatile\.global\.v\d|bar\.sync", found)
    first = loads.index("ld.volatile.global.v4")
    assert loads.count("ld.volatile.global.v4") == 3 * rows * 16 // 4 // 128
    assert "bar.sync" not in loads[first : first + loads.count("ld.volatile.global.v4")]


def test_compiled_for_hopper_the_halves_of_a_product_are_separated_in_registers():
    """If a pair's results were in two threads, they would pass through shared memory number by number."""
    pytest.importorskip("triton")
    from stage_f_graph_tp.kernels.skinny_gemm_kernels import gate_up_silu_kernel

    constants = {"SIZE": 896, "PARTS": 16, "INTERMEDIATE": 4864, "PDL": True, "BLOCK_N": 32, "BLOCK_M": 64}
    constants |= {"BLOCK_K": 128, "PRECISION": "tf32"}
    types = dict.fromkeys(gate_up_silu_kernel.arg_names, "i32") | {"squares": "*fp32", "eps": "fp32"}
    types |= dict.fromkeys(("x", "weight", "out"), "*bf16")
    found = compiled_for_hopper(gate_up_silu_kernel, types, constants, ("x_stride",), num_stages=3)
    assert found.count("st.shared") < 12
