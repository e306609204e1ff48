"""The operators of stage C: compared with float64, shapes for torch.compile, and errors that say what was wrong."""

from __future__ import annotations

import re

import pytest
import torch
from kernel_cases import CPU, relative_error

from stage_c_fused_mlp.fused_mlp import (
    fused_swiglu_mlp,
    load_operators,
    most_rows,
    swiglu_mlp_reference,
    why_unsupported,
)
from stage_c_fused_mlp.layernorm_mlp import FusedLayerNormMLP, fused_ln_mlp, ln_mlp_reference

pytestmark = pytest.mark.compiler

EPS = 1e-5
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
# rows, hidden, intermediate: one element a vector, ragged tiles, many slabs, more rows than a launch, a real model.
SIZES = [(1, 8, 8), (1, 64, 176), (3, 104, 328), (5, 56, 40), (16, 256, 136), (17, 72, 200)]
LARGE_SIZES = [(8, 896, 4864), (16, 896, 4864), (9, 2048, 8192), (16, 4104, 1544), (3, 24576, 264)]
GPU_SIZES = [*SIZES, (2, 64, 176), (37, 1032, 2056), *((rows, 896, 4864) for rows in (1, 4, 15)), *LARGE_SIZES]
OPERATORS = [(fused_ln_mlp, ln_mlp_reference), (fused_swiglu_mlp, swiglu_mlp_reference)]

gpu_or_cpu = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make_inputs(operator, rows, hidden, inter, dtype, device="cpu", seed=0, mean=0.0):
    """Fresh random inputs in the operator's order, without eps."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    x, norm = normal(rows, hidden) + mean, 1 + normal(hidden, scale=0.1)
    up = normal(inter if operator is fused_ln_mlp else 2 * inter, hidden, scale=hidden**-0.5)
    down = normal(hidden, inter, scale=inter**-0.5)
    if operator is fused_ln_mlp:
        return [x, norm, normal(hidden, scale=0.1), up, down]
    return [x, norm, up, down, normal(rows, hidden)]


def error(out, reference, inputs):
    """Relative to the reference in float64; every element must be finite."""
    assert out.isfinite().all()
    return relative_error(out, reference(*(tensor.double() for tensor in inputs), EPS))


def poison(like):
    """Leave NaN where the allocator takes the next tensor of this size: what a kernel does not write stays visible."""
    for tensor in [torch.full_like(like, float("nan")) for _ in range(3)]:
        del tensor


CPU_KERNELS, GPU_KERNELS = ("auto", "fused", "library"), ("naive", "warp", "fused", "library", "auto")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("kernel", "device"),
    [(kernel, "cpu") for kernel in (*CPU_KERNELS, "classical")]
    + [pytest.param(kernel, "cuda", marks=pytest.mark.gpu) for kernel in (*GPU_KERNELS, "classical")],
)
def test_every_kernel_matches_float64(kernel, device, dtype):
    operator, reference = OPERATORS[kernel != "classical"]
    chosen = [] if kernel in ("auto", "classical") else [kernel]
    # The classical block adds long sums sequentially: on a GPU it has twice the error of the others' partial sums.
    tolerance = TOLERANCE[dtype] * (2 if kernel == "classical" and device == "cuda" else 1)
    sizes = SIZES if device == "cpu" else GPU_SIZES
    for seed, (rows, hidden, inter) in enumerate([*sizes, (2, 30, 50)] if kernel == "classical" else sizes):  # any size
        inputs = make_inputs(operator, rows, hidden, inter, dtype, device, seed)
        poison(inputs[0])
        out = operator(*inputs, EPS, *chosen)
        assert out.shape == (rows, hidden) and out.dtype == dtype
        assert error(out, reference, inputs) < tolerance, (rows, hidden, inter)


def test_auto_is_the_fused_kernel_for_as_many_rows_as_a_model_gives_it_and_the_library_beyond():
    most = most_rows("auto", CPU)
    for rows, kernel, other in ((most, "fused", "library"), (most + 1, "library", "fused")):
        inputs = make_inputs(fused_swiglu_mlp, rows, 256, 136, torch.float32)
        found = fused_swiglu_mlp(*inputs, EPS)
        assert torch.equal(found, fused_swiglu_mlp(*inputs, EPS, kernel))
        assert not torch.equal(found, fused_swiglu_mlp(*inputs, EPS, other))


def test_float16_weights_of_every_size_are_widened_right():
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = values[values.isfinite()][: 63488 // 8 * 8]
    # The gate's first column carries the values, up's first column is 1, and x is 1: a neuron is silu(value).
    hidden, inter = 16, len(values)
    w_gate_up = torch.zeros(2 * inter, hidden, dtype=torch.float16)
    w_gate_up[:inter, 0], w_gate_up[inter:, 0] = values, 1
    ones, w_down = torch.ones(1, hidden, dtype=torch.float16), torch.zeros(hidden, inter, dtype=torch.float16)
    chosen = [1, 2, 1023, 1024, 30000, 31743, 31744 + 5, 40000, inter - 1]
    w_down[torch.arange(len(chosen)), chosen] = 1
    out = fused_swiglu_mlp(ones, ones[0], w_gate_up, w_down, ones * 0, 0.0, "fused")[0, : len(chosen)]
    expected = torch.nn.functional.silu(values[chosen].float()).half()
    assert ((out == expected) | ((out - expected).abs() <= expected.abs() * 2**-10)).all(), values[chosen]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_float16_weight_that_is_no_number_stays_none(value):
    inputs = make_inputs(fused_swiglu_mlp, 1, 8, 8, torch.float16)
    inputs[3][:, 0] = value
    fused, library = (fused_swiglu_mlp(*inputs, EPS, kernel) for kernel in ("fused", "library"))
    assert not fused.isfinite().any() and torch.equal(fused.isnan(), library.isnan())


@gpu_or_cpu
def test_rows_with_a_large_mean_keep_their_digits(device):
    # E[x^2] - E[x]^2 in float32 would be wrong in the first digit here.
    inputs = make_inputs(fused_ln_mlp, 3, 896, 64, torch.float32, device, mean=1000.0)
    # x itself is rounded to 6e-5 at 1000, in float64's input too; the rest is the kernels' error.
    assert error(fused_ln_mlp(*inputs, EPS), ln_mlp_reference, inputs) < 2e-4


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
    module = FusedLayerNormMLP(16, 24, eps=0.5)
    x = torch.randn(2, 3, 32)[..., ::2]  # not one row after another
    expected = ln_mlp_reference(x, module.gamma, module.beta, module.w1, module.w2, module.eps)
    torch.testing.assert_close(module(x), expected)


MLP, BLOCK = fused_swiglu_mlp, fused_ln_mlp


@pytest.mark.parametrize(
    ("operator", "index", "change", "message"),
    [
        (MLP, 0, lambda x: x[0], "ValueError: x has 1 dimensions"),
        (MLP, 0, lambda x: x.double(), "TypeError: .*float32, float16 and bfloat16"),
        (MLP, 1, lambda rms_weight: rms_weight.half(), "TypeError: .*rms_weight is .*one dtype"),
        (MLP, 2, lambda w_gate_up: w_gate_up[:-8], r"ValueError: w_gate_up has shape \[40, 16\], expected \[48, 16\]"),
        (MLP, 3, lambda w_down: w_down.T.contiguous().T, "ValueError: w_down is not contiguous"),
        (MLP, 4, lambda residual: residual[:1], r"ValueError: residual has shape \[1, 16\], expected \[2, 16\]"),
        (MLP, 4, lambda _: torch.empty(33)[1:].view(2, 16), "ValueError: residual does not start at a multiple of 16"),
        (MLP, 0, lambda x: x[:, :12].clone(), "ValueError: the hidden size is 12, expected a multiple of 8"),
        (MLP, 3, lambda w_down: w_down[:, :20].clone(), "ValueError: the intermediate size is 20"),
        (MLP, 0, lambda x: x[:, :0], "ValueError: the hidden size is 0"),
        (MLP, 3, lambda w_down: w_down[:, :0], "ValueError: the intermediate size is 0"),
        (MLP, 3, lambda w_down: w_down[0], "ValueError: w_down has 1 dimensions"),
        (BLOCK, 0, lambda x: x[0], "x has 1 dimensions and w1 2"),
        (BLOCK, 2, lambda beta: beta.half(), "beta is Half but x is Float"),
        (BLOCK, 3, lambda w1: w1[0], "x has 2 dimensions and w1 1"),
        (BLOCK, 3, lambda w1: w1.T.contiguous().T, "w1 is not contiguous"),
        (BLOCK, 4, lambda w2: w2[:, :-8], r"w2 has shape \[16, 16\], expected \[16, 2"),
    ],
)
def test_bad_tensors_are_refused_with_the_number_that_was_wrong(operator, index, change, message):
    inputs = make_inputs(operator, 2, 16, 24, torch.float32)
    inputs[index] = change(inputs[index])
    with pytest.raises((ValueError, TypeError)) as caught:
        operator(*inputs, EPS)
    assert re.match(f".*{message}", f"{caught.typename}: {caught.value}")


@pytest.mark.parametrize("operator, _", OPERATORS)
def test_an_epsilon_below_0_is_refused(operator, _):
    with pytest.raises(ValueError, match="eps is -1.* expected 0 or more"):
        operator(*make_inputs(operator, 2, 16, 24, torch.float32), -1.0)


@pytest.mark.parametrize(
    ("kernel", "device", "message"),
    [
        ("warp", "cpu", "kernel 'warp' is not for the CPU.*auto, fused and library"),
        pytest.param(
            "quick", "cuda", "unknown kernel 'quick', expected auto, naive, .* library", marks=pytest.mark.gpu
        ),
    ],
)
def test_a_kernel_that_the_device_does_not_have_is_refused(kernel, device, message):
    with pytest.raises(ValueError, match=message):
        fused_swiglu_mlp(*make_inputs(fused_swiglu_mlp, 2, 16, 24, torch.float32, device), EPS, kernel)


@pytest.mark.usefixtures("pretended_gpus")
def test_what_a_kernel_cannot_do_is_said_with_what_can():
    ampere, hopper = torch.device("cuda", 86), torch.device("cuda", 90)
    assert why_unsupported("quick", CPU, 64, 64) == "expected one of auto, naive, warp, fused, library"
    assert why_unsupported("warp", CPU, 64, 64) == "it is a CUDA kernel; on the CPU use one of auto, fused, library"
    assert "64 and 44, and it takes multiples of 8; stage B" in why_unsupported("auto", CPU, 64, 44)
    assert "compute capability 9.0 and this GPU has 8.6; use 'warp'" in why_unsupported("fused", ampere, 64, 64)
    assert not any(why_unsupported(kernel, ampere, 64, 64) for kernel in ("auto", "naive", "warp", "library"))
    assert why_unsupported("fused", hopper, 64, 64) == ""
