"""The CUDA kernels of stage C: they compile with nvcc alone, and on a GPU every generation is right, always."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from test_stage_c_operators import EPS, OPERATORS, TOLERANCE, error, make_inputs

from stage_c_fused_mlp.extension import CSRC, SOURCES
from stage_c_fused_mlp.fused_mlp import fused_ln_mlp, fused_swiglu_mlp, ln_mlp_reference, swiglu_mlp_reference

pytestmark = pytest.mark.compiler

GENERATIONS = ("naive", "warp", "fused", "library", "auto")
KERNELS = GENERATIONS[:3]
# rows, hidden, intermediate: one element a vector, ragged tiles, many slabs, more rows than a launch, a real model.
SIZES = [(1, 8, 8), (2, 64, 176), (3, 104, 328), (16, 256, 136), (17, 72, 200), (37, 1032, 2056), (1, 896, 4864),
         (8, 896, 4864), (16, 896, 4864), (9, 2048, 8192), (16, 4104, 1544), (3, 24576, 264)]  # fmt: skip


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("source", [name for name in SOURCES["fused_mlp"] if name.endswith(".cu")])
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_nvcc_alone_compiles_the_kernels(source, architecture, tmp_path):
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = [
        "nvcc",
        "-std=c++17",
        target,
        "-Xptxas",
        "-O1",
        "-c",
        str(CSRC / source),
        "-o",
        str(tmp_path / "kernel.o"),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def poison(like):
    """Leave NaN where the allocator takes the next tensor of this size: what a kernel does not write stays visible."""
    for tensor in [torch.full_like(like, float("nan")) for _ in range(3)]:
        del tensor


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("operator, reference", OPERATORS)
def test_every_generation_matches_float64(operator, reference, generation, dtype):
    for seed, (rows, hidden, inter) in enumerate(SIZES):
        inputs = make_inputs(operator, rows, hidden, inter, dtype, "cuda", seed)
        poison(inputs[0])
        out = operator(*inputs, EPS, generation)
        assert error(out, reference, inputs) < TOLERANCE[dtype], (rows, hidden, inter)


@pytest.mark.gpu
@pytest.mark.parametrize("generation", KERNELS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 15, 16])
def test_every_number_of_rows_gives_each_row_its_own_result(generation, rows):
    inputs = make_inputs(fused_swiglu_mlp, rows, 896, 4864, torch.bfloat16, "cuda", seed=rows)
    out = fused_swiglu_mlp(*inputs, EPS, generation)
    assert error(out, swiglu_mlp_reference, inputs) < TOLERANCE[torch.bfloat16]
    x, *weights, residual = inputs
    alone = fused_swiglu_mlp(x[-1:].clone(), *weights, residual[-1:].clone(), EPS, generation)
    torch.testing.assert_close(out[-1:], alone, rtol=2**-7, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("generation", KERNELS)
def test_a_captured_graph_follows_its_inputs_and_repeats_exactly(generation):
    inputs = make_inputs(fused_swiglu_mlp, 4, 896, 4864, torch.bfloat16, "cuda")
    fused_swiglu_mlp(*inputs, EPS, generation)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        middle = fused_swiglu_mlp(*inputs, EPS, generation)
        out = fused_swiglu_mlp(middle, *inputs[1:4], middle, EPS, generation)
    for seed in range(3):
        inputs[0].copy_(make_inputs(fused_swiglu_mlp, 4, 896, 4864, torch.bfloat16, "cuda", seed + 10)[0])
        first = None
        for _ in range(50):
            out.fill_(float("nan"))
            graph.replay()
            first = out.clone() if first is None else first
            # The naive kernel's atomics add in any order; the others add in one.
            assert torch.equal(out, first) if generation != "naive" else out.isfinite().all()
        step = swiglu_mlp_reference(*inputs, EPS)
        expected = swiglu_mlp_reference(step, *inputs[1:4], step, EPS)
        torch.testing.assert_close(first, expected, rtol=0.05, atol=0.05)


@pytest.mark.gpu
def test_two_streams_at_once_do_not_disturb_each_other():
    inputs = [make_inputs(fused_swiglu_mlp, 2, 896, 4864, torch.bfloat16, "cuda", seed) for seed in range(2)]
    expected = [fused_swiglu_mlp(*each, EPS, "fused") for each in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(100):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[index].append(fused_swiglu_mlp(*inputs[index], EPS, "fused"))
    torch.cuda.synchronize()
    for index in range(2):
        assert all(torch.equal(result, expected[index]) for result in results[index])


@pytest.mark.gpu
def test_not_a_number_in_one_row_stays_in_that_row():
    inputs = make_inputs(fused_swiglu_mlp, 5, 896, 4864, torch.bfloat16, "cuda")
    inputs[0][2] = float("nan")
    for generation in KERNELS:
        out = fused_swiglu_mlp(*inputs, EPS, generation)
        assert out[2].isnan().all() and out[[0, 1, 3, 4]].isfinite().all(), generation


@pytest.mark.gpu
def test_a_row_beyond_shared_memory_is_refused_by_fused_and_taken_by_auto():
    inputs = make_inputs(fused_ln_mlp, 1, 131072, 64, torch.float32, "cuda")
    with pytest.raises(ValueError, match="one row of 131072 numbers"):
        fused_ln_mlp(*inputs, EPS, "fused")
    assert error(fused_ln_mlp(*inputs, EPS), ln_mlp_reference, inputs) < TOLERANCE[torch.float32]


@pytest.mark.gpu
def test_an_unknown_generation_is_refused():
    with pytest.raises(ValueError, match="unknown generation 'quick', expected auto, naive, warp, fused or library"):
        fused_ln_mlp(*make_inputs(fused_ln_mlp, 1, 8, 8, torch.float32, "cuda"), EPS, "quick")


EVERY_KERNEL = """
import sys
import torch
from test_stage_c_operators import EPS, OPERATORS, make_inputs
for operator, _ in OPERATORS:
    for dtype in (torch.float32, torch.bfloat16):
        for rows, hidden, inter in ((1, 896, 4864), (3, 104, 328), (16, 256, 136)):
            inputs = [tensor.cuda() for tensor in make_inputs(operator, rows, hidden, inter, dtype)]
            for generation in sys.argv[1:]:
                assert operator(*inputs, EPS, generation).isfinite().all()
"""


def sanitize(tool, *command):
    """Run a command under compute-sanitizer: 0 only where it finds nothing."""
    paths = os.pathsep.join([str(CSRC.parent), str(CSRC.parent / "tests")])
    result = subprocess.run(
        ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *command],
        capture_output=True, text=True, timeout=300, cwd=CSRC.parent, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


needs_sanitizer = pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")


@pytest.mark.gpu
@needs_sanitizer
@pytest.mark.parametrize("tool, generations", [("memcheck", KERNELS), ("racecheck", KERNELS[:2])])
def test_the_sanitizer_finds_nothing(tool, generations):
    sanitize(tool, sys.executable, "-c", EVERY_KERNEL, *generations)


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
