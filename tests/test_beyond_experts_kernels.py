"""The kernels of experts against the formula: in Triton's interpreter and on a GPU, and in whole models."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import CASE, CPU, F32, HALVES, interpreted, on_a_gpu, relative_error
from no_gpu import compiled_for_hopper

from beyond.experts.layers import SparseMLP, route
from beyond.experts.parallel import run_on_all_rows
from beyond.quantization.formats import FORMATS, dequantize_matrix, quantize_matrix
from stage_a_naive.checkpoints.experts import Experts
from stage_f_graph_tp.tensor_parallel.sharding import RowParallelLinear

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
EPS = 0.1  # large enough to be noticed
# tokens, hidden, experts, per token, size, format, group
SMALL = [
    (3, 40, 5, 2, 24, None, None),
    (9, 40, 5, 2, 24, None, None),
    (30, 72, 3, 3, 40, None, None),
    (2, 40, 5, 1, 24, "int8", None),
    (9, 200, 4, 2, 136, "int8", 128),
    (3, 200, 4, 2, 136, "int8", 128),
    (12, 40, 4, 2, 24, "int8", None),
]
QWEN, MIXTRAL = (2048, 128, 8, 768), (1024, 8, 2, 3584)
REAL = [(tokens, *QWEN, None, None) for tokens in (1, 7, 8, 9, 64, 256, 4097)]
REAL += [(tokens, *MIXTRAL, None, None) for tokens in (1, 33, 1000)]
EIGHT = [(tokens, *QWEN, *form) for tokens in (3, 32, 500) for form in (("int8", None), ("int8", 128), ("fp8", None))]


def make(case, device, dtype):
    """Rows, a choice with pairs without expert, and the matrices: as given to the kernels, and as numbers."""
    from beyond.experts.products import Choice

    tokens, hidden, count, per_token, size, name, group = case
    torch.manual_seed(tokens)
    experts = Experts(count, per_token, size)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    weights, chosen = route(torch.randn(tokens, count, device=device).to(dtype), experts)
    chosen = chosen.int()
    chosen[tokens // 2] = -1 if tokens > 1 else chosen[0]  # padding
    chosen[0, 0] = chosen[-1, -1] = -1  # experts of another rank
    matrices = []
    for rows, columns in ((count * 2 * size, hidden), (count * hidden, size)):
        matrix = (torch.randn(rows, columns, device=device) * columns**-0.5).to(dtype)
        exact = matrix
        if name is not None:
            matrix = quantize_matrix(matrix, FORMATS[name], group)
            exact = dequantize_matrix(matrix, F32, group)
        matrices.append((matrix, exact))
    return experts, x, Choice(weights.float().contiguous(), chosen), *matrices


def formula(x, choice, gate_up, down, experts):
    """The sum over a token's experts, in float64; zeros for padding."""
    size, hidden = experts.size, x.shape[1]
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(experts.count):
        token, which = torch.where(choice.chosen == expert)
        own = gate_up[2 * expert * size : 2 * (expert + 1) * size].double()
        gate, up = (x[token].double() @ own.T).chunk(2, -1)
        product = (F.silu(gate) * up) @ down[expert * hidden : (expert + 1) * hidden].double().T
        out.index_add_(0, token, product * choice.weights[token, which, None].double())
    return out


def check_experts(case, device, dtype, few_tokens=8):
    from beyond.experts.products import run_experts

    experts, x, choice, (gate_up, exact_gate_up), (down, exact_down) = make(case, device, dtype)
    residual = torch.randn_like(x)
    expected = residual.double() + formula(x, choice, exact_gate_up, exact_down, experts)
    runs = [run_experts(x, choice, gate_up, down, experts, residual.clone(), few_tokens) for _ in range(2)]
    assert relative_error(runs[0].x, expected) < TOLERANCE[dtype]
    assert torch.equal(runs[0].x, runs[1].x), "sums have a fixed order"
    squares = (runs[0].x.double() ** 2).sum(1)
    assert relative_error(runs[0].squares.sum(0), squares) < 1e-5
    padding = (choice.chosen < 0).all(1)
    assert torch.equal(runs[0].x[padding], residual[padding])


@pytest.mark.parametrize(CASE, [*interpreted(*SMALL), *on_a_gpu(*SMALL), *on_a_gpu(*REAL, *EIGHT, dtypes=HALVES[:1])])
def test_experts_run_by_pairs_and_by_blocks_give_the_formula(case, device, dtype) -> None:
    check_experts(case, device, dtype)
    if case[0] <= 64:
        check_experts(case, device, dtype, few_tokens=64 if case[0] > 8 else 0)


def test_the_kernels_are_right_in_the_interpreter(run_interpreted_tests) -> None:
    run_interpreted_tests(__file__)


CHOICES = [(3, 40, 5, 2), (17, 72, 20, 3), (33, 40, 4, 4)]  # tokens, hidden, experts, per token


@pytest.mark.parametrize("sum_to_one", [True, False])
@pytest.mark.parametrize(CASE, [*interpreted(*CHOICES), *on_a_gpu(*CHOICES, (1, 2048, 128, 8), (64, 2048, 128, 8))])
def test_the_router_normalises_chooses_and_weighs(case, device, dtype, sum_to_one) -> None:
    from beyond.experts.products import choose, norm_route

    tokens, hidden, count, per_token = case
    torch.manual_seed(hidden)
    experts = Experts(count, per_token, 8, 0, sum_to_one)
    x = torch.randn(tokens, hidden + 3, device=device).to(dtype)[:, :hidden]
    gain = torch.rand(hidden, device=device).to(dtype)
    router = (torch.randn(count, hidden, device=device) * hidden**-0.5).to(dtype)  # scores near 1, as a model's are
    slots = torch.arange(tokens, device=device)
    slots[tokens // 2] = -1 if tokens > 1 else 0
    counters = torch.zeros(8, dtype=torch.int32, device=device)
    normed, choice = norm_route(x, gain, EPS, router, experts, slots, counters)
    expected = F.rms_norm(x.double(), (hidden,), gain.double(), EPS)
    assert relative_error(normed, expected) < TOLERANCE[dtype]
    assert not counters.any(), "ready for the next launch"
    scores = (expected @ router.double().T).to(dtype)
    for found in (choice, choose(scores, experts, slots)):
        weights, chosen = route(scores, experts)
        real = slots >= 0
        assert (found.chosen[~real] == -1).all()
        # Two scores that are equal but for their rounding may be in another order.
        assert relative_error(found.weights[real], weights[real]) < TOLERANCE[dtype]
        if dtype == F32:
            assert torch.equal(found.chosen[real], chosen[real].int())


@pytest.mark.parametrize(
    CASE, [*interpreted((7, 3, 16), (40, 5, 16), (300, 2, 32)), *on_a_gpu((5000, 8, 64), dtypes=[F32])]
)
def test_groups_list_every_pair_once_by_expert_and_in_order(case, device, dtype) -> None:
    from beyond.experts.products import group

    tokens, per_token, block = case
    torch.manual_seed(0)
    chosen = torch.randint(-1, 20, (tokens, per_token), dtype=torch.int32, device=device)
    order, experts = group(chosen, 20, block)
    flat = chosen.flatten().cpu()
    rows = [(int(e), row[row >= 0].tolist()) for e, row in zip(experts.cpu(), order.cpu(), strict=True) if e >= 0]
    assert [pair for _, pairs in rows for pair in pairs] == [
        int(pair) for expert in range(20) for pair in torch.where(flat == expert)[0]
    ]
    assert all((flat[pairs] == expert).all() and pairs for expert, pairs in rows)
    assert [e for e, _ in rows] == sorted(e for e, _ in rows)


@pytest.mark.interpreted
def test_scores_that_are_no_numbers_choose_experts_that_there_are() -> None:
    from beyond.experts.products import choose

    experts = Experts(5, 2, 8)
    choice = choose(torch.full((2, 5), float("nan")), experts, torch.zeros(2, dtype=torch.int64))
    assert ((choice.chosen >= 0) & (choice.chosen < 5)).all() and choice.weights.isnan().all()


class OneRank:
    """A group of one rank, which adds its part to the residual."""

    rank, size = 0, 1

    def all_reduce(self, x, residual):
        return residual.add_(x)


EXACT = {"num_kvcache_blocks": 64, "kvcache_block_size": 4, "max_model_len": 200}
MODELS = [
    ("qwen3-moe-tiny", {}, False),
    ("qwen3-moe-tiny", {}, True),
    ("qwen2-moe-tiny", {"quantization": "int8", "kv_cache_dtype": "int8"}, False),
    pytest.param("qwen2-moe-tiny", {"without": "fused_layers"}, False, marks=pytest.mark.slow),
    pytest.param("mixtral-tiny", {}, False, marks=pytest.mark.slow),
    pytest.param(
        "qwen3-moe-tiny", {"quantization": "int8", "quantization_group_size": 128}, False, marks=pytest.mark.slow
    ),
    pytest.param("mixtral-tiny", {"without": "fused_layers,skinny_gemm"}, False, marks=pytest.mark.slow),
]


@pytest.mark.interpreted
@pytest.mark.parametrize(("preset", "options", "on_ranks"), MODELS)
def test_whole_models_give_the_references_tokens(preset, options, on_ranks, draw_norm_weights, monkeypatch) -> None:
    from beyond.experts import LLM, SamplingParams, fused_layers
    from beyond.quantization import fused_layers as eight_bits
    from beyond.quantization.layers import QuantizedLinear

    monkeypatch.setattr(fused_layers, "ROUTED_TOGETHER", 16)
    monkeypatch.setattr(fused_layers, "skinny_limit", lambda *_: 16)
    monkeypatch.setattr(eight_bits, "SKINNY_MAX_TOKENS", 16)
    prompts = [[5, 6, 7] * 6, [9, 10]]  # together more than few tokens
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    reference, llm = (LLM(f"random:{preset}", device="cpu", **EXACT, **options) for _ in range(2))
    for engine in reference, llm:
        draw_norm_weights(engine.runner.model)
    expected = reference.generate(prompts, params, False)
    for module in llm.runner.model.modules():
        if isinstance(module, QuantizedLinear):
            module.product = eight_bits.QuantizedProducts(CPU)
        if isinstance(module, SparseMLP):
            compute = fused_layers.triton_experts
            module.compute = partial(run_on_all_rows, compute) if on_ranks else compute
            module.down_proj = RowParallelLinear(module.down_proj, OneRank()) if on_ranks else module.down_proj
    fused_layers.choose_layers(llm.runner.model, llm.options)
    found = llm.generate(prompts, params, False)
    assert [o["token_ids"] for o in found] == [o["token_ids"] for o in expected]


@pytest.mark.parametrize(("stored", "group"), [("*bf16", 0), ("*i8", 0), ("*i8", 128), ("*fp8e4nv", 0)])
def test_compiled_for_hopper_the_weights_are_loaded_ahead_and_nothing_is_spilled(stored: str, group: int) -> None:
    pytest.importorskip("triton")
    from beyond.experts.expert_kernels import down_add_kernel, down_kernel, gate_up_silu_kernel
    from beyond.experts.products import choose_tiles

    dtypes = {"*bf16": torch.bfloat16, "*i8": torch.int8, "*fp8e4nv": torch.float8_e4m3fn}
    types = dict.fromkeys(("x", "out", "residual"), "*bf16") | {
        "weight": stored,
        "residual_stride": "i32",
        "tokens": "i32",
    }
    types |= dict.fromkeys(("scales", "squares", "pair_weights"), "*fp32")
    types |= dict.fromkeys(("chosen", "experts", "order"), "*i32") | {"weight": stored}
    shared = {"GROUP": group, "PDL": True, "PRECISION": "tf32"} | ({"scales": None} if stored == "*bf16" else {})
    up, down = {"SIZE": 2048, "INTERMEDIATE": 768, "PER_TOKEN": 8}, {"SIZE": 768, "OUT_SIZE": 2048}
    for kernel, block, few, sizes in (
        (gate_up_silu_kernel, 16, 1, up | {"GROUPED": False}),
        (down_add_kernel, 16, 1, down | {"PER_TOKEN": 8, "PER_TOKEN_PAD": 8}),
        (down_add_kernel, 16, 8, down | {"PER_TOKEN": 8, "PER_TOKEN_PAD": 8}),
        (gate_up_silu_kernel, 128, None, up | {"GROUPED": True}),
        (down_kernel, 128, None, down),
    ):
        tiles = choose_tiles(block, few, torch.bfloat16, dtypes[stored], kernel is gate_up_silu_kernel)
        rows = tiles.rows // 8 if kernel is down_add_kernel else tiles.rows
        constants = shared | sizes | {"BLOCK_M": block, "BLOCK_N": rows, "BLOCK_K": group or tiles.columns}
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        found = compiled_for_hopper(kernel, types, constants, ["residual_stride"], **options)
        assert "cp.async" in found and "st.local" not in found


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["qwen3-moe-tiny", "qwen2-moe-tiny", "mixtral-tiny"])
@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}, {"enforce_eager": True}], ids=str)
def test_in_bfloat16_the_same_steps_give_the_same_tokens_again(preset: str, options: dict) -> None:
    from beyond.experts import LLM, SamplingParams

    prompts = [[(7 * i + n) % 4000 + 1 for i in range(n)] for n in (3, 40, 9, 200)] * 4  # 16 requests: blocks of pairs
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    options = options | {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 16, "enable_prefix_caching": False}
    llm = LLM(f"random:{preset}", num_kvcache_blocks=64, kvcache_block_size=64, **options)
    first, second = (llm.generate(prompts, params, False) for _ in range(2))
    llm.close()
    assert [output["token_ids"] for output in first] == [output["token_ids"] for output in second]
