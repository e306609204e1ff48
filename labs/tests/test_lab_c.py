"""Drives lab C. C++ and CUDA are compiled for this machine's CPU: see labs/native.py."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2MLP, Qwen2RMSNorm

import stage_c_fused_mlp.fused_mlp as fused_mlp
import stage_c_fused_mlp.llm as stage
import stage_c_fused_mlp.patch as patch
from labs import native
from labs.driving import close, near, numbers
from labs.tests.support import Values, some, whole_stage
from labs.variants import slices
from stage_b_decode_step.loop import Calls


def inputs(rows: int, hidden: int, inter: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape) * scale).to(dtype)

    return [
        normal(rows, hidden),
        1 + normal(hidden, scale=0.1),
        normal(2 * inter, hidden, scale=hidden**-0.5),
        normal(hidden, inter, scale=inter**-0.5),
        normal(rows, hidden),
    ]


class TestVariant:
    """The MLP in slices: the same rows, and no wide intermediate tensor."""

    def test_the_rows_are_those_of_the_whole_and_nothing_is_wider_than_a_slice(self) -> Values:
        hidden = 14
        for inter, width in ((24, 24), (24, 8), (23, 5), (9, 1), (6, 100), (numbers.randint(15, 60), 7)):
            config, layer = Qwen2Config(hidden_size=hidden, intermediate_size=inter), nn.Module()
            layer.mlp, layer.post_attention_layernorm = Qwen2MLP(config), Qwen2RMSNorm(hidden)
            nn.init.uniform_(layer.post_attention_layernorm.weight, 0.5, 2)
            x, results = torch.randn(3, hidden), []
            given = f"{inter} neurons by {width}"
            with torch.inference_mode(), Calls(lambda _, result, results=results: results.append(result)):
                out = slices.sliced_mlp(layer, x, width)
            yield f"{given}: x + the MLP of the normalised x, the residual added once", close(out)
            yield f"{given}: x is the caller's, and stays", x
            wide = [list(r.shape) for r in results if r.shape[:-1] == x.shape[:-1] and r.shape[-1] > max(width, hidden)]
            yield f"{given}: tensors of more than {max(width, hidden)} columns per row", wide
            narrow = [r for r in results if r.shape == (3, min(width, inter))]
            yield f"{given}: a tensor of {min(width, inter)} neurons was made", bool(narrow) or width == hidden


class TestFormula:
    def test_it_is_norm_gate_up_down_residual(self) -> Values:
        for rows, hidden, inter in ((1, 16, 24), (3, 16, 24), *(some(3, 1, 40) for _ in range(5))):
            x, *weights = (t.double() for t in inputs(rows, hidden, inter))
            for scale, eps in ((1.0, 1e-5), (1e-3, 1e-5), (1.0, 1e-3)):
                yield (
                    f"{rows} rows of {scale} times [{hidden}], {inter} neurons, eps {eps}: "
                    "down(silu(gate(n)) * up(n)) + residual, n = RMSNorm(x), gate rows first",
                    near(fused_mlp.swiglu_mlp_reference(x * scale, *weights, eps), 1e-9),
                )


class MLP(nn.Module):
    """The gated block of transformers, as far as `_pack` sees it."""

    def __init__(self, hidden: int, inter: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inter, bias=False)
        self.up_proj = nn.Linear(hidden, inter, bias=False)
        self.down_proj = nn.Linear(inter, hidden, bias=False)


class TestPack:
    def packed(self) -> MLP:
        mlp = MLP(8, 16)
        patch._pack(mlp)
        return mlp

    def test_gate_rows_come_first(self) -> Values:
        yield (
            "gate_up_proj, [2 * intermediate, hidden]: first all gate rows, then all up rows",
            self.packed().gate_up_proj,
        )

    def test_there_is_no_second_copy(self) -> Values:
        mlp = self.packed()
        storage = mlp.gate_up_proj.untyped_storage().data_ptr()
        for name in ("gate_proj", "up_proj"):
            weight = getattr(mlp, name).weight
            yield f"{name}.weight is a view of gate_up_proj", weight.untyped_storage().data_ptr() == storage
            yield f"{name}.weight", weight
        yield "pack the weights' `.data`: the packed matrix takes a gradient", mlp.gate_up_proj.requires_grad
        mlp.gate_up_proj[16] = torch.randn(8)
        yield "row 16 of gate_up_proj is row 0 of up_proj.weight", mlp.up_proj.weight[0]

    def test_the_parameters_stay_and_the_packed_matrix_is_not_saved(self) -> Values:
        mlp = self.packed()
        yield "names in the state_dict, without gate_up_proj", sorted(mlp.state_dict())
        yield (
            "gate_up_proj is a buffer, so that .to() and CUDA graphs know it",
            "gate_up_proj" in dict(mlp.named_buffers()),
        )


class TestNormalise:
    def normalised(self, x: Tensor, weight: Tensor, eps: float, in_place: bool = False) -> Tensor:
        out = x.clone() if in_place else torch.full_like(x, torch.nan)
        source = out if in_place else x
        function = native.cpu_library().lab_normalise
        p = native.pointer
        native.check(function(p(source), p(weight), p(out), len(x), ctypes.c_double(eps)))
        return out

    def test_it_is_rms_norm(self) -> Values:
        for size, eps in ((40, 1e-5), (8, 1e-2), (numbers.randint(1, 300), 1e-3)):
            x, weight = torch.randn(size), torch.randn(size)
            given = f"{size} numbers, eps {eps}: x / sqrt(mean x² + eps) * weight"
            yield given, close(self.normalised(x, weight, eps), 1e-5, 1e-5)
            yield f"{given}, where x and target are one array", close(self.normalised(x, weight, eps, True), 1e-5, 1e-5)

    def test_a_large_number_costs_the_others_no_digits(self) -> Values:
        x = torch.ones(20_000)
        x[0] = 4096.0  # its square is 2^24, where floats are 2 apart
        found = self.normalised(x, torch.ones(20_000), 0.0)[:9]
        yield "one square of 2^24 and 19,999 of 1: add them up in double", close(found, 0, 1e-5)

    def test_eps_is_under_the_root(self) -> Values:
        yield "eps keeps zeros finite", self.normalised(torch.zeros(8), torch.ones(8), 1e-5)
        x = torch.full((8,), 1e-3)
        yield "numbers of 0.001, eps 0.01: x / sqrt(mean x² + eps)", close(self.normalised(x, torch.ones(8), 1e-2), 0)


def call_block(function, dtype, eps, tensors, *first: int) -> Tensor:
    x, w_out = tensors[0], tensors[3]
    out = torch.full_like(x, torch.nan)
    rows, hidden, inter = *x.shape, w_out.shape[1]
    arguments = [native.pointer(t) for t in (*tensors, out)]
    native.check(function(*first, native.DTYPES[dtype], rows, hidden, inter, eps, *arguments))
    return out


TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class TestCpuOperator:
    def test_it_computes_the_block(self) -> Values:
        for dtype, error in TOLERANCE.items():
            for rows, hidden, inter in [(1, 8, 8), (3, 40, 72), (5, 64, 24), some(3, 1, 50)]:
                tensors, function = inputs(rows, hidden, inter, dtype), native.cpu_library().lab_mlp_cpu
                yield (
                    f"RMSNorm, gate and up, residual: {rows} rows of {hidden}, {inter} neurons, {dtype}",
                    near(call_block(function, dtype, ctypes.c_double(1e-5), tensors), error),
                )


class TestWarpSum:
    def test_every_lane_gets_the_sum_of_its_own_warp(self) -> Values:
        values = torch.tensor(some(64, -99, 99), dtype=torch.float32)
        out = torch.zeros(64)
        native.check(native.cuda_library().lab_warp_sum(native.pointer(values), native.pointer(out), 64))
        yield "all 32 lanes of each of two warps get the sum of their warp", out


class TestWarpKernel:
    def test_float32(self) -> Values:
        sizes = [(1, 8, 8), (1, 520, 40), (3, 40, 72), (6, 24, 136), (17, 8, 16)]
        for rows, hidden, inter in [*sizes, [numbers.randint(1, 20), *(8 * n for n in some(2, 1, 9))]]:
            yield self.found(rows, hidden, inter, torch.float32)

    def test_half_precision(self) -> Values:
        for dtype in (torch.float16, torch.bfloat16):
            yield self.found(2, 48, 40, dtype)

    def test_an_input_longer_than_the_stage_goes_slab_by_slab(self) -> Values:
        # 32 KiB hold 512 columns of 16 rows; 200 neurons are more than one round of all warps.
        yield self.found(16, 520, 200, torch.float32)

    def found(self, rows: int, hidden: int, inter: int, dtype: torch.dtype) -> tuple[str, object]:
        tensors = inputs(rows, hidden, inter, dtype)
        out = call_block(native.cuda_library().lab_mlp, dtype, ctypes.c_float(1e-5), tensors, 1)
        return f"{rows} rows, hidden {hidden}, intermediate {inter}, {dtype}", near(out, TOLERANCE[dtype])


class TestWholeStage:
    def test_the_tutor_answers(self) -> Values:
        yield from whole_stage(stage.LLM, {}, {"mlp_kernel": "library", "static_cache": False, "sync_every": 4})
