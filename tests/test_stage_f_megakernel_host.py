"""The megakernel without a GPU: what is compiled for which model, the fallback, what C++ and Python share."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import stage_f_graph_tp.megakernel as megakernel
from benchmarks.micro import decode_step
from stage_c_fused_mlp import extension as builder
from stage_d_paged.config import ModelConfig
from stage_f_graph_tp.megakernel import Megakernel, choose_decode_step, kernel, most_rows

CSRC = Path(kernel.__file__).parents[2] / "csrc" / "stage_f"
SHAPE = ModelConfig(1000, 256, 768, 2, 4, 2, 64, 1e-6, 8192, 10000.0, None, False, False, True)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The defines of every kernel that would be compiled; none is."""
    found: list[tuple[str, ...]] = []

    def load(name: str, *, defines: tuple[str, ...] = ()) -> SimpleNamespace:
        found.append(defines)
        return SimpleNamespace(library="a library")

    monkeypatch.setattr(kernel, "load_extension", load)
    monkeypatch.setattr(kernel.ctypes, "CDLL", lambda path: SimpleNamespace(decode_workspace_bytes=SimpleNamespace()))
    return found


def library_of(defines: tuple[str, ...]) -> Path:
    return builder.Extension("megakernel_of_shape", ("9.0",), "", defines).library


def test_each_shape_dtype_and_gpu_has_a_library_of_its_own_and_the_same_has_the_same(built):
    sizes = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    shapes = [dataclasses.replace(SHAPE, **{name: 2 * getattr(SHAPE, name)}) for name in sizes]
    for shape in (SHAPE, *shapes):
        kernel.load_kernel(shape, torch.bfloat16, 132)
    kernel.load_kernel(SHAPE, torch.float16, 132)
    kernel.load_kernel(SHAPE, torch.bfloat16, 114)
    kernel.load_kernel(SHAPE, torch.bfloat16, 132, trace=True)
    assert len({library_of(defines) for defines in built}) == len(built) == 11
    # What the kernel is not compiled for is not in the key: the two can share a library.
    kernel.load_kernel(dataclasses.replace(SHAPE, rope_theta=5e5, rms_norm_eps=1e-5), torch.bfloat16, 132)
    assert library_of(built[-1]) == library_of(built[0])


def test_the_kernel_is_given_every_size_that_it_asks_for(built):
    kernel.load_kernel(SHAPE, torch.float16, 132, trace=True)
    given = {define.partition("=")[0] for define in built[0]}
    assert given == set(re.findall(r"\bSIX_\w+", (CSRC / "shape.cuh").read_text()))


def test_the_grid_is_one_block_per_multiprocessor_that_has_work(built):
    grids = {}
    for multiprocessors, intermediate in ((132, 768), (132, 128), (170, 768)):
        kernel.load_kernel(dataclasses.replace(SHAPE, intermediate_size=intermediate), torch.bfloat16, multiprocessors)
        grids[multiprocessors, intermediate] = next(d for d in built[-1] if d.startswith("SIX_GRID="))
    assert grids == {(132, 768): "SIX_GRID=132", (132, 128): "SIX_GRID=64", (170, 768): "SIX_GRID=160"}


def test_what_python_repeats_of_the_header_is_what_it_says():
    header = (CSRC / "decode_step.h").read_text()
    constants = {name: int(value) for name, value in re.findall(r"\b(k\w+) = (\d+)[,;]", header)}
    assert (constants["kMaxDecodeRows"], constants["kMaxBlocks"]) == (kernel.MAX_ROWS, kernel.MAX_BLOCKS)
    assert (len(decode_step.LAYER), decode_step.END_MARKS) == (constants["kLayerMarks"], constants["kEndMarks"])
    without = (constants["kSkipStreaming"], constants["kSkipWaiting"])
    assert list(decode_step.WITHOUT.values()) == [0, *without, sum(without)]
    layer = re.search(r"struct LayerWeights \{.*?\n\};", header, re.DOTALL)[0]
    assert layer.count("const void*") == constants["kLayerPointers"] == 9


def test_it_serves_more_requests_of_models_with_few_kv_heads():
    rows = {heads: most_rows(dataclasses.replace(SHAPE, num_kv_heads=heads)) for heads in (1, 2, 4, 8, 16)}
    assert rows == {1: 8, 2: 8, 4: 8, 8: 4, 16: 4}


@pytest.fixture
def compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: object, **options: object) -> None:
        raise AssertionError("something was compiled")

    for module in (builder, kernel):
        monkeypatch.setattr(module, "load_extension", build)
    monkeypatch.setattr(builder, "why_no_compiler", lambda: "")
    monkeypatch.setattr(builder.shutil, "which", lambda name: f"/usr/bin/{name}")
    kernel.load_operator.cache_clear()


def runtime(shape: ModelConfig = SHAPE, dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    return SimpleNamespace(config=shape, dtype=dtype, block_size=64, device=torch.device("cuda"), model=object())


@pytest.mark.parametrize(
    ("given", "capability", "reason"),
    [
        (runtime(dtype=torch.float32), (9, 0), r"the dtype is torch\.float32"),
        (runtime(dataclasses.replace(SHAPE, hidden_size=4096)), (9, 0), r"hidden size 4096 .* up to 2048"),
        (runtime(), (8, 9), r"needs compute capability 9\.0, and this GPU has 8\.9"),
        (runtime(), (12, 0), r"needs 227 KB of shared memory per block"),
        (runtime(), (9, 0), r"the extension megakernel has no CUDA part here: nvcc was not found; install .*"),
    ],
    ids=["dtype", "large", "old", "small", "nvcc"],
)
@pytest.mark.usefixtures("compiles_nothing")
def test_where_it_cannot_run_one_line_says_why_before_anything_is_compiled(
    monkeypatch, capsys, given, capability, reason
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(builder, "why_no_cuda", lambda: "nvcc was not found; install the CUDA toolkit")
    assert choose_decode_step(given) is None
    printed = capsys.readouterr().err
    pattern = rf"persistent megakernel: not used \(.*{reason}.*\); the layers run kernel by kernel\n"
    assert re.fullmatch(pattern, printed), printed


def test_a_kernel_that_does_not_compile_is_one_line_too(monkeypatch, capsys):
    def fail(model: object) -> None:
        raise builder.ExtensionError("building megakernel_of_shape failed: error: it does not fit")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(megakernel, "Megakernel", fail)
    assert choose_decode_step(runtime()) is None
    assert capsys.readouterr().err.count("\n") == 1


def test_the_workspace_is_made_as_new_before_the_flags_have_counted_through():
    step = object.__new__(Megakernel)
    step.workspace, step._launch = torch.zeros(64, dtype=torch.uint8), lambda *args: step.workspace.add_(1)
    step._weights, step._sizes, step._kernel = (), (), 0
    step.max_steps = step._steps_left = 3
    seen = []
    for _ in range(8):
        step.step(*[torch.zeros(1)] * 11)
        seen.append(int(step.workspace[0]))
    assert seen == [1, 2, 3, 1, 2, 3, 1, 2]
