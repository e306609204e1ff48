"""The operators of stage C: right against float64, shapes for torch.compile, and errors that say what was wrong."""

from __future__ import annotations

import pytest
import torch

from stage_c_fused_mlp.fused_mlp import (
    FusedLayerNormMLP,
    fused_ln_mlp,
    fused_swiglu_mlp,
    ln_mlp_reference,
    load_operators,
    swiglu_mlp_reference,
)

pytestmark = pytest.mark.compiler

EPS = 1e-5
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
SIZES = [
    (1, 8, 8),
    (1, 64, 176),
    (3, 104, 328),
    (5, 56, 40),
    (16, 256, 136),
    (17, 72, 200),
]  # rows, hidden, intermediate
OPERATORS = [(fused_ln_mlp, ln_mlp_reference), (fused_swiglu_mlp, swiglu_mlp_reference)]

gpu_or_cpu = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make_inputs(operator, rows, hidden, inter, dtype, device="cpu", seed=0, mean=0.0):
    """Fresh random inputs in the operator's order, without eps."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    x = normal(rows, hidden) + mean
    norm = 1 + normal(hidden, scale=0.1)
    if operator is fused_ln_mlp:
        return [x, norm, normal(hidden, scale=0.1), normal(inter, hidden, scale=hidden**-0.5),
                normal(hidden, inter, scale=inter**-0.5)]  # fmt: skip
    return [
        x,
        norm,
        normal(2 * inter, hidden, scale=hidden**-0.5),
        normal(hidden, inter, scale=inter**-0.5),
        normal(rows, hidden),
    ]


def error(out, reference, inputs):
    """||out - ref|| / ||ref|| with the reference in float64; every element must be finite."""
    expected = reference(*(tensor.double() for tensor in inputs), EPS)
    assert out.isfinite().all()
    return ((out.double() - expected).norm() / expected.norm()).item()


@gpu_or_cpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("operator, reference", OPERATORS)
def test_auto_matches_float64(operator, reference, dtype, device):
    for seed, (rows, hidden, inter) in enumerate(SIZES):
        inputs = make_inputs(operator, rows, hidden, inter, dtype, device, seed)
        out = operator(*inputs, EPS)
        assert out.shape == (rows, hidden) and out.dtype == dtype
        assert error(out, reference, inputs) < TOLERANCE[dtype], (rows, hidden, inter)


@gpu_or_cpu
def test_rows_with_a_large_mean_keep_their_digits(device):
    # E[x^2] - E[x]^2 in float32 would be wrong in the first digit here.
    inputs = make_inputs(fused_ln_mlp, 3, 896, 64, torch.float32, device, mean=1000.0)
    # x itself is rounded to 6e-5 at 1000, which float64 sees too; what is left is the kernels' own error.
    for generation in ["auto"] if device == "cpu" else ["naive", "warp", "fused"]:
        assert error(fused_ln_mlp(*inputs, EPS, generation), ln_mlp_reference, inputs) < 2e-4, generation


def test_float16_weights_of_every_size_are_widened_right():
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = values[values.isfinite()][: 63488 // 8 * 8]
    # w1 carries the values, x is constant: LayerNorm gives zero, beta one; so silu(sum over one row of w1) is seen.
    hidden = 8
    weight = torch.zeros(len(values), hidden, dtype=torch.float16)
    weight[:, 0] = values
    x = torch.zeros(1, hidden, dtype=torch.float16)
    beta = torch.ones(hidden, dtype=torch.float16)
    w2 = torch.zeros(hidden, len(values), dtype=torch.float16)
    for index in (1, 2, 1023, 1024, 30000, 31743, 31744 + 5, 40000, len(values) - 1):
        w2.zero_()
        w2[0, index] = 1
        out = fused_ln_mlp(x, torch.ones_like(beta), beta, weight, w2, EPS)[0, 0]
        expected = torch.nn.functional.silu(values[index].float()).half()
        assert out == expected or (out - expected).abs() <= expected.abs() * 2**-10, (index, values[index])


@pytest.mark.parametrize("operator, _", OPERATORS)
def test_shape_functions_and_schema_agree_with_the_operator(operator, _):
    load_operators()
    overload = getattr(torch.ops.six_engines, operator.__name__).default
    torch.library.opcheck(overload, (*make_inputs(operator, 3, 16, 24, torch.float32), EPS))


@gpu_or_cpu
@pytest.mark.parametrize("operator, reference", OPERATORS)
def test_compiles_without_a_graph_break(operator, reference, device):
    load_operators()
    inputs = make_inputs(operator, 2, 64, 40, torch.float32, device)
    backend = "aot_eager" if device == "cpu" else "inductor"
    out = torch.compile(lambda *tensors: operator(*tensors, EPS) * 2, fullgraph=True, backend=backend)(*inputs)
    assert error(out / 2, reference, inputs) < TOLERANCE[torch.float32]


def test_no_rows_give_no_rows():
    inputs = make_inputs(fused_swiglu_mlp, 0, 16, 24, torch.float32)
    assert fused_swiglu_mlp(*inputs, EPS).shape == (0, 16)


def test_the_module_of_the_classical_block_keeps_leading_dimensions():
    module = FusedLayerNormMLP(16, 24)
    x = torch.randn(2, 3, 16)
    expected = ln_mlp_reference(x, module.gamma, module.beta, module.w1, module.w2, module.eps)
    torch.testing.assert_close(module(x), expected)


def changed(index, change):
    inputs = make_inputs(fused_swiglu_mlp, 2, 16, 24, torch.float32)
    inputs[index] = change(inputs[index])
    return inputs


@pytest.mark.parametrize(
    "inputs, kind, message",
    [
        (changed(0, lambda t: t[0]), ValueError, "x has 1 dimensions"),
        (changed(0, lambda t: t.double()), TypeError, "float32, float16 and bfloat16"),
        (changed(1, lambda t: t.half()), TypeError, "rms_weight is .*one dtype"),
        (changed(2, lambda t: t[:-8]), ValueError, r"w_gate_up has shape \[40, 16\], expected \[48, 16\]"),
        (changed(3, lambda t: t.T.contiguous().T), ValueError, "w_down is not contiguous"),
        (changed(4, lambda t: t[:1]), ValueError, r"residual has shape \[1, 16\], expected \[2, 16\]"),
        (
            changed(4, lambda t: torch.empty(33)[1:].view(2, 16)),
            ValueError,
            "residual does not start at a multiple of 16",
        ),
        (
            make_inputs(fused_swiglu_mlp, 2, 12, 24, torch.float32),
            ValueError,
            "hidden size is 12, expected a multiple of 8",
        ),
        (make_inputs(fused_swiglu_mlp, 2, 16, 20, torch.float32), ValueError, "intermediate size is 20"),
    ],
)
def test_bad_tensors_are_refused_with_the_number_that_was_wrong(inputs, kind, message):
    with pytest.raises(kind, match=message):
        fused_swiglu_mlp(*inputs, EPS)


def test_a_cuda_generation_on_the_cpu_is_refused():
    with pytest.raises(ValueError, match="'warp' is a CUDA kernel"):
        fused_swiglu_mlp(*make_inputs(fused_swiglu_mlp, 2, 16, 24, torch.float32), EPS, "warp")
