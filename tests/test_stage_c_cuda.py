"""The CUDA kernels: they compile with nvcc alone, some run on a CPU too, and all are always correct on a GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys

import pytest
import torch
from test_stage_c_operators import EPS, GPU_KERNELS, TOLERANCE, error, make_inputs

from labs import native
from stage_c_fused_mlp.extension import CSRC, SOURCES
from stage_c_fused_mlp.fused_mlp import fused_swiglu_mlp, swiglu_mlp_reference
from stage_c_fused_mlp.layernorm_mlp import fused_ln_mlp, ln_mlp_reference
from stage_d_paged.config import LayerKind, ModelConfig
from stage_f_graph_tp.megakernel.kernel import shape_macros

pytestmark = pytest.mark.compiler

KERNELS = GPU_KERNELS[:3]
KERNEL_SOURCES = [source for sources in SOURCES.values() for source in sources if source.endswith(".cu")]
# An older architecture, on which this kernel cannot run but must still compile.
COMPILATIONS = [*((source, "90") for source in KERNEL_SOURCES), ("stage_c/mlp_fused.cu", "80")]
QWEN = ModelConfig(151936, 896, 4864, (LayerKind(),) * 24, 14, 2, 64, 1e-6, 8192, True, False, True)
MACROS = {"stage_f/launch.cu": shape_macros(QWEN, torch.bfloat16, 132)}  # it is compiled for one model


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("source, architecture", COMPILATIONS)
def test_nvcc_alone_compiles_the_kernels(source, architecture, tmp_path):
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    options = ["-std=c++17", target, "-Xptxas", "-O1", f"-I{CSRC}", "-c", "-o", str(tmp_path / "kernel.o")]
    options += [f"-D{macro}" for macro in MACROS.get(source, ())]
    result = subprocess.run(["nvcc", *options, str(CSRC / source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def on_the_cpu(function, dtype, inputs, *first):
    """One of the kernels that run on a CPU, thread by thread; see labs/native.py."""
    out = torch.full_like(inputs[0], float("nan"))
    rows, hidden = out.shape
    inter = inputs[3 if len(inputs) == 5 and inputs[4].shape == out.shape else 4].shape[1]
    pointers = [native.pointer(tensor) for tensor in (*inputs, out)]
    native.check(function(*first, native.DTYPES[dtype], rows, hidden, inter, ctypes.c_float(EPS), *pointers))
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_kernels_that_run_on_a_cpu_match_float64_there(dtype):
    library = native.cuda_library()
    for seed, (rows, hidden, inter) in enumerate([(1, 8, 8), (3, 40, 328), (17, 24, 16)]):
        inputs = make_inputs(fused_swiglu_mlp, rows, hidden, inter, dtype, "cpu", seed)
        for warp in (0, 1):
            found = on_the_cpu(library.lab_mlp, dtype, inputs, warp)
            assert error(found, swiglu_mlp_reference, inputs) < TOLERANCE[dtype], (warp, rows, hidden, inter)
        inputs = make_inputs(fused_ln_mlp, rows, hidden, inter, dtype, "cpu", seed)
        found = on_the_cpu(library.lab_layernorm_mlp, dtype, inputs)
        assert error(found, ln_mlp_reference, inputs) < TOLERANCE[dtype], (rows, hidden, inter)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_captured_graph_follows_its_inputs_and_repeats_exactly(kernel):
    inputs = make_inputs(fused_swiglu_mlp, 4, 896, 4864, torch.bfloat16, "cuda")
    fused_swiglu_mlp(*inputs, EPS, kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        middle = fused_swiglu_mlp(*inputs, EPS, kernel)
        out = fused_swiglu_mlp(middle, *inputs[1:4], middle, EPS, kernel)
    for seed in range(3):
        inputs[0].copy_(make_inputs(fused_swiglu_mlp, 4, 896, 4864, torch.bfloat16, "cuda", seed + 10)[0])
        first = None
        for _ in range(50):
            out.fill_(float("nan"))
            graph.replay()
            first = out.clone() if first is None else first
            assert torch.equal(out, first)
        step = swiglu_mlp_reference(*inputs, EPS)
        expected = swiglu_mlp_reference(step, *inputs[1:4], step, EPS)
        torch.testing.assert_close(first, expected, rtol=0.05, atol=0.05)


@pytest.mark.gpu
def test_two_streams_at_once_do_not_disturb_each_other():
    inputs = [make_inputs(fused_swiglu_mlp, 2, 896, 4864, torch.bfloat16, "cuda", seed) for seed in range(2)]
    expected = [fused_swiglu_mlp(*each, EPS, "fused") for each in inputs]
    streams, results = [torch.cuda.Stream() for _ in inputs], []
    torch.cuda.synchronize()
    for _ in range(100):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append((index, fused_swiglu_mlp(*inputs[index], EPS, "fused")))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected[index]) for index, result in results)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_not_a_number_in_one_row_stays_in_that_row(kernel):
    inputs = make_inputs(fused_swiglu_mlp, 5, 896, 4864, torch.bfloat16, "cuda")
    inputs[0][2] = float("nan")
    out = fused_swiglu_mlp(*inputs, EPS, kernel)
    assert out[2].isnan().all() and out[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.gpu
def test_a_row_beyond_shared_memory_is_refused_by_fused_and_taken_by_auto():
    inputs = make_inputs(fused_swiglu_mlp, 1, 131072, 64, torch.float32, "cuda")
    with pytest.raises(ValueError, match="one row of 131072 numbers"):
        fused_swiglu_mlp(*inputs, EPS, "fused")
    assert error(fused_swiglu_mlp(*inputs, EPS), swiglu_mlp_reference, inputs) < TOLERANCE[torch.float32]
    with pytest.raises(ValueError, match="131072 neurons of a row do not fit .* use ln_mlp_reference"):
        fused_ln_mlp(*make_inputs(fused_ln_mlp, 1, 64, 131072, torch.float32, "cuda"), EPS)


EVERY_KERNEL = """
import sys
import torch
from test_stage_c_operators import EPS, OPERATORS, make_inputs
for operator, _ in OPERATORS:
    for dtype in (torch.float32, torch.bfloat16):
        for rows, hidden, inter in ((1, 896, 4864), (3, 104, 328), (16, 256, 136)):
            inputs = [tensor.cuda() for tensor in make_inputs(operator, rows, hidden, inter, dtype)]
            variants = [(kernel,) for kernel in sys.argv[1:]] if operator.__name__ == "fused_swiglu_mlp" else [()]
            for variant in variants:
                assert operator(*inputs, EPS, *variant).isfinite().all()
"""


def sanitize(tool, *command):
    """Run a command under compute-sanitizer: 0 only where it finds nothing."""
    paths = os.pathsep.join([str(CSRC.parent), str(CSRC.parent / "tests")])
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *command]
    environment = os.environ | {"PYTHONPATH": paths}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=CSRC.parent, env=environment)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


needs_sanitizer = pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")


@pytest.mark.gpu
@needs_sanitizer
@pytest.mark.parametrize("tool, kernels", [("memcheck", KERNELS), ("racecheck", KERNELS[:2])])
def test_the_sanitizer_finds_nothing(tool, kernels):
    sanitize(tool, sys.executable, "-c", EVERY_KERNEL, *kernels)


@pytest.mark.gpu
@needs_sanitizer
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_racecheck_finds_nothing_in_the_fused_kernel(tmp_path):
    """In a build that racecheck can follow: see kArrivingLanes in fused_block.cuh."""
    program = str(tmp_path / "racecheck")
    source = str(CSRC.parent / "tests" / "fused_racecheck.cu")
    options = ["-std=c++17", "-O2", "-arch=sm_90", "-DSIX_ENGINES_EVERY_LANE_ARRIVES", f"-I{CSRC}"]
    built = subprocess.run(["nvcc", *options, "-o", program, source], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    sanitize("racecheck", program)
