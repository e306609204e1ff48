"""Judges lab C. C++ and CUDA are compiled for this machine's CPU: see labs/native.py."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2MLP, Qwen2RMSNorm

import stage_c_fused_mlp.fused_mlp as fused_mlp
import stage_c_fused_mlp.llm as stage
import stage_c_fused_mlp.patch as patch
from labs import native
from labs.tests.support import check_whole_stage, student_random
from labs.variants import slices
from stage_b_decode_step.loop import Calls


def block_by_hand(x, norm_weight, w_in, w_out, residual, eps):
    """The MLP block in float64."""
    x, norm_weight, w_in, w_out = (t.double() for t in (x, norm_weight, w_in, w_out))
    normalised = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm_weight
    gate, up = (normalised @ w_in.T).chunk(2, -1)
    return (gate * gate.sigmoid() * up) @ w_out.T + residual.double()


def inputs(rows: int, hidden: int, inter: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows * hidden + inter)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    return [
        normal(rows, hidden),
        1 + normal(hidden, scale=0.1),
        normal(2 * inter, hidden, scale=hidden**-0.5),
        normal(hidden, inter, scale=inter**-0.5),
        normal(rows, hidden),
    ]


def relative_error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


class TestVariant:
    """The MLP in slices: the same rows, and no wide tensor on the way."""

    @pytest.mark.parametrize("inter, width", [(24, 24), (24, 8), (23, 5), (9, 1), (6, 100)])
    def test_the_rows_are_those_of_the_whole_and_nothing_is_wider_than_a_slice(self, inter: int, width: int):
        torch.manual_seed(student_random().randrange(2**31))
        hidden = 14
        config = Qwen2Config(hidden_size=hidden, intermediate_size=inter)
        layer = nn.Module()
        layer.mlp, layer.post_attention_layernorm = Qwen2MLP(config), Qwen2RMSNorm(hidden)
        nn.init.uniform_(layer.post_attention_layernorm.weight, 0.5, 2)
        x = torch.randn(3, hidden)
        before = x.clone()
        with torch.inference_mode():
            expected = x + layer.mlp(layer.post_attention_layernorm(x))
            results: list[Tensor] = []
            with Calls(lambda _, result: results.append(result)):
                out = slices.sliced_mlp(layer, x, width)
        assert torch.equal(x, before), "x is the caller's: it must not be changed"
        error = float((out - expected).abs().max())
        assert error < 1e-4, f"{inter} neurons by {width}: largest error {error:.3g}; is the residual added once?"
        wide = [list(r.shape) for r in results if r.shape[:-1] == x.shape[:-1] and r.shape[-1] > max(width, hidden)]
        assert not wide, f"by {width} neurons at a time no row has more than {max(width, hidden)} columns, got {wide}"
        narrow = [r for r in results if r.shape == (3, min(width, inter))]
        assert narrow or width == hidden, f"no tensor of {min(width, inter)} neurons was made"


class TestFormula:
    @pytest.mark.parametrize("rows", [1, 3])
    def test_it_is_norm_gate_up_down_residual(self, rows: int):
        x, norm, w_in, w_out, residual = (t.double() for t in inputs(rows, 16, 24))
        out = fused_mlp.swiglu_mlp_reference(x, norm, w_in, w_out, residual, 1e-5)
        assert out.shape == x.shape, f"[rows, hidden] expected, got {list(out.shape)}"
        expected = block_by_hand(x, norm, w_in, w_out, residual, 1e-5)
        error = relative_error(out, expected)
        formula = "down(silu(gate(n)) * up(n)) + residual, n = RMSNorm(x), gate rows first"
        assert error < 1e-9, f"{formula}: relative error {error:.2g} in float64, below 1e-9 expected"

    def test_eps_is_used(self):
        x, norm, w_in, w_out, residual = (t.double() for t in inputs(1, 16, 24))
        x = x * 1e-3
        out = fused_mlp.swiglu_mlp_reference(x, norm, w_in, w_out, residual, 1e-5)
        assert torch.allclose(out, block_by_hand(x, norm, w_in, w_out, residual, 1e-5)), "eps goes under the root"


class MLP(nn.Module):
    """The gated block of transformers, as far as `_pack` sees it."""

    def __init__(self, hidden: int, inter: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inter, bias=False)
        self.up_proj = nn.Linear(hidden, inter, bias=False)
        self.down_proj = nn.Linear(inter, hidden, bias=False)


class TestPack:
    def packed(self) -> tuple[MLP, Tensor, Tensor]:
        torch.manual_seed(0)
        mlp = MLP(8, 16)
        gate, up = mlp.gate_proj.weight.detach().clone(), mlp.up_proj.weight.detach().clone()
        patch._pack(mlp)
        return mlp, gate, up

    def test_gate_rows_come_first(self):
        mlp, gate, up = self.packed()
        assert mlp.gate_up_proj.shape == (32, 8), f"[2 * intermediate, hidden], got {list(mlp.gate_up_proj.shape)}"
        assert torch.equal(mlp.gate_up_proj, torch.cat([gate, up])), "first all gate rows, then all up rows"

    def test_there_is_no_second_copy(self):
        mlp, gate, up = self.packed()
        storage = mlp.gate_up_proj.untyped_storage().data_ptr()
        for name in ("gate_proj", "up_proj"):
            weight = getattr(mlp, name).weight
            is_view = weight.untyped_storage().data_ptr() == storage
            assert is_view, f"{name}.weight must be a view of gate_up_proj; it has memory of its own"
        assert torch.equal(mlp.gate_proj.weight, gate) and torch.equal(mlp.up_proj.weight, up)
        assert not mlp.gate_up_proj.requires_grad, "pack the weights' `.data`: the packed matrix takes no gradient"
        mlp.gate_up_proj[16, 0] = 123.0
        assert mlp.up_proj.weight[0, 0] == 123.0, "row 16 of gate_up_proj must be row 0 of up_proj.weight"

    def test_the_parameters_stay_and_the_packed_matrix_is_not_saved(self):
        mlp, _, _ = self.packed()
        names = sorted(mlp.state_dict())
        expected = ["down_proj.weight", "gate_proj.weight", "up_proj.weight"]
        assert names == expected, f"gate_up_proj must not be in the state_dict, got {names}"
        assert "gate_up_proj" in dict(mlp.named_buffers()), "a buffer, so that .to() and CUDA graphs know it"


class TestNormalise:
    def normalised(self, x: Tensor, weight: Tensor, eps: float, in_place: bool = False) -> Tensor:
        out = x.clone() if in_place else torch.full_like(x, torch.nan)
        source = out if in_place else x
        function = native.cpu_library().lab_normalise
        p = native.pointer
        native.check(function(p(source), p(weight), p(out), len(x), ctypes.c_double(eps)))
        return out

    def test_it_is_rms_norm(self):
        x, weight = torch.randn(40), torch.randn(40)
        expected = x / (x.pow(2).mean() + 1e-5).sqrt() * weight
        assert torch.allclose(self.normalised(x, weight, 1e-5), expected, atol=1e-5), "x / sqrt(mean x² + eps) * weight"

    def test_x_and_target_may_be_the_same_array(self):
        x, weight = torch.randn(40), torch.randn(40)
        assert torch.equal(self.normalised(x, weight, 1e-5, in_place=True), self.normalised(x, weight, 1e-5))

    def test_a_large_number_costs_the_others_no_digits(self):
        x = torch.ones(20_000)
        x[0] = 4096.0  # its square is 2^24, where floats are 2 apart
        expected = x.double() / x.double().pow(2).mean().sqrt()
        worst = float((self.normalised(x, torch.ones(20_000), 0.0) / expected - 1).abs().max())
        assert worst < 1e-5, f"with one square of 2^24 and 19,999 of 1 the error is {worst:.3g}: add them up in double"

    def test_eps_keeps_zeros_finite(self):
        assert torch.equal(self.normalised(torch.zeros(8), torch.ones(8), 1e-5), torch.zeros(8)), "0 stays 0"

    def test_eps_is_under_the_root(self):
        x = torch.full((8,), 1e-3)
        found = float(self.normalised(x, torch.ones(8), 1e-2)[0])
        expected = 1e-3 / (1e-6 + 1e-2) ** 0.5
        assert abs(found / expected - 1) < 1e-4, f"x / sqrt(mean x² + eps) is {expected:.4g} here, got {found:.4g}"


def call_block(function, dtype, eps, tensors, *first: int) -> Tensor:
    x, w_out = tensors[0], tensors[3]
    out = torch.full_like(x, torch.nan)
    rows, hidden, inter = *x.shape, w_out.shape[1]
    arguments = [native.pointer(t) for t in (*tensors, out)]
    native.check(function(*first, native.DTYPES[dtype], rows, hidden, inter, eps, *arguments))
    return out


TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class TestCpuOperator:
    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_it_computes_the_block(self, dtype: torch.dtype):
        for rows, hidden, inter in [(1, 8, 8), (3, 40, 72), (5, 64, 24)]:
            tensors = inputs(rows, hidden, inter, dtype)
            function = native.cpu_library().lab_mlp_cpu
            out = call_block(function, dtype, ctypes.c_double(1e-5), tensors)
            error = relative_error(out, block_by_hand(*tensors, 1e-5))
            kind = "RMSNorm, gate and up, residual"
            assert error < TOLERANCE[dtype], f"{kind}: relative error {error:.2g} for {rows} rows of {hidden}, {dtype}"


class TestWarpSum:
    def test_every_lane_gets_the_sum_of_its_own_warp(self):
        values = torch.arange(64, dtype=torch.float32) ** 2
        out = torch.zeros(64)
        native.check(native.cuda_library().lab_warp_sum(native.pointer(values), native.pointer(out), 64))
        sums = values.view(2, 32).sum(1)
        assert out[0] == sums[0], f"lane 0 should have {sums[0]:.0f}, got {out[0]:.0f}"
        assert torch.equal(out.view(2, 32), sums[:, None].expand(2, 32)), "all 32 lanes of each warp get the sum"


class TestWarpKernel:
    @pytest.mark.parametrize("rows, hidden, inter", [(1, 8, 8), (1, 520, 40), (3, 40, 72), (6, 24, 136), (17, 8, 16)])
    def test_float32(self, rows: int, hidden: int, inter: int):
        self.check(rows, hidden, inter, torch.float32)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, dtype: torch.dtype):
        self.check(2, 48, 40, dtype)

    def test_an_input_longer_than_the_stage_goes_slab_by_slab(self):
        # 32 KiB hold 512 columns of 16 rows; 200 neurons are more than one round of all warps.
        self.check(16, 520, 200, torch.float32)

    def check(self, rows: int, hidden: int, inter: int, dtype: torch.dtype) -> None:
        tensors = inputs(rows, hidden, inter, dtype)
        out = call_block(native.cuda_library().lab_mlp, dtype, ctypes.c_float(1e-5), tensors, 1)
        error = relative_error(out, block_by_hand(*tensors, 1e-5))
        assert error < TOLERANCE[dtype], (
            f"relative error {error:.2g} with {rows} rows, hidden {hidden}, intermediate {inter}, {dtype}"
        )


class TestWholeStage:
    def test_the_tutor_answers(self):
        check_whole_stage(stage.LLM, {}, {"mlp_kernel": "library", "static_cache": False, "sync_every": 4})
