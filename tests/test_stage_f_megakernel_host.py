"""The megakernel without a GPU: compilation per model, the fallback, and constants shared by C++ and Python."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from decode_steps import SHAPES, config, make_model
from emulated_megakernel import emulate

from benchmarks.micro import decode_step
from stage_a_naive.checkpoints.presets import preset_config
from stage_c_fused_mlp import extension as builder
from stage_d_paged.config import LayerKind, ModelConfig
from stage_d_paged.rope import Rope
from stage_f_graph_tp import megakernel
from stage_f_graph_tp.megakernel import choose_decode_step, kernel, most_rows

pytestmark = pytest.mark.fast
CSRC = Path(kernel.__file__).parents[2] / "csrc" / "stage_f"
SHAPE = ModelConfig(1000, 256, 768, (LayerKind(),) * 2, 4, 2, 64, 1e-6, 8192, False, False, True)


GEMMA = ModelConfig.from_hf(preset_config("gemma-3-270m"))


def library_of(shape: ModelConfig, dtype: torch.dtype = torch.bfloat16, *options: object) -> Path:
    defines = kernel.shape_macros(shape, dtype, *(options or [132]))
    return builder.Extension("megakernel_of_shape", ("9.0",), "", defines).library


def test_each_shape_dtype_and_gpu_has_a_library_of_its_own_and_the_same_has_the_same():
    sizes = ("layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    libraries = {library_of(replace(SHAPE, **{name: 2 * getattr(SHAPE, name)})) for name in sizes}
    libraries |= {library_of(SHAPE), library_of(SHAPE, torch.float16)}
    libraries |= {library_of(SHAPE, torch.bfloat16, 114), library_of(SHAPE, torch.bfloat16, 132, True)}
    assert len(libraries) == 11
    # The key has only what the kernel is compiled for, so the two can share a library.
    assert library_of(replace(SHAPE, layers=(LayerKind(0, Rope(5e5)),) * 2, rms_norm_eps=1e-5)) == library_of(SHAPE)


def test_the_library_that_is_compiled_is_that_of_the_shape(pretended_toolchain, pretended_gpus):
    pretended_gpus.append((9, 0))
    with pytest.raises(builder.ExtensionError, match="building megakernel_of_shape failed"):
        kernel.load_kernel(SHAPE, torch.float16, 114, trace=True)
    assert library_of(SHAPE, torch.float16, 114, True).parent.exists()


@pytest.mark.parametrize(("head_dim", "compiler"), [(64, True), (64, False), (96, True)])
def test_libraries_are_built_early_where_a_model_and_a_machine_can_use_them(monkeypatch, head_dim, compiler):
    def require_cuda() -> None:
        if not compiler:
            raise builder.ExtensionError("no nvcc")

    def thread(target, args, daemon) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: target(*args))

    built = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(megakernel, "threading", SimpleNamespace(Thread=thread))
    monkeypatch.setattr(megakernel, "plan", lambda name: SimpleNamespace(require_cuda=require_cuda))
    monkeypatch.setattr(megakernel, "load_extension", built.append)
    monkeypatch.setattr(megakernel, "load_kernel", lambda *shape: built.append(shape))
    shape = replace(SHAPE, head_dim=head_dim)
    megakernel.build_early(shape, torch.bfloat16, torch.device("cuda"))
    megakernel.build_early(shape, torch.bfloat16, torch.device("cpu"))
    assert built == (["megakernel", (shape, torch.bfloat16, 132)] if head_dim == 64 and compiler else [])


def test_the_kernel_is_given_every_size_that_it_asks_for():
    given = {define.partition("=")[0] for define in kernel.shape_macros(SHAPE, torch.float16, 132, True)}
    assert given == set(re.findall(r"\bSIX_\w+", (CSRC / "shape.cuh").read_text()))


@pytest.mark.parametrize(
    ("multiprocessors", "intermediate", "blocks"), [(132, 768, 132), (132, 128, 64), (170, 768, 160)]
)
def test_the_grid_is_one_block_per_multiprocessor_that_has_work(multiprocessors, intermediate, blocks):
    macros = kernel.shape_macros(replace(SHAPE, intermediate_size=intermediate), torch.bfloat16, multiprocessors)
    assert f"SIX_GRID={blocks}" in macros


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
    rows = {heads: most_rows(replace(SHAPE, num_kv_heads=heads)) for heads in (1, 2, 4, 8, 16)}
    assert rows == {1: 8, 2: 8, 4: 8, 8: 4, 16: 4}


NO_NVCC = "nvcc was not found"


@pytest.mark.parametrize("shape", SHAPES)
def test_it_runs_on_gpus_with_the_shared_memory_for_it(shape):
    for capability in ((9, 0), (10, 0)):
        assert kernel.why_unsupported(SHAPES[shape], torch.bfloat16, 64, capability) == ""


@pytest.mark.parametrize(
    ("given", "gpu", "reason"),
    [
        ({"dtype": torch.float32}, 90, r"the dtype is torch\.float32"),
        ({"config": config(3584, 18944, 28, 4, 128)}, 90, "hidden size 3584 and MLP size 18944; .* for up to 2048"),
        ({"config": config(128, 320, 4, 2, 32)}, 90, "head_dim is 32"),
        ({"config": config(1024, 3072, 16, 1, 64)}, 90, "16 heads share 1"),
        ({"config": GEMMA}, 90, "the model has four norms per layer, the activation gelu_pytorch_tanh"),
        ({"config": replace(SHAPE, layers=(LayerKind(8),) * 2)}, 90, "the model has layers with a window"),
        ({"config": config(256, 700, 4, 2, 64)}, 90, ".*multiples of 32"),
        ({"block_size": 8}, 90, ".* 8; .*power of two"),
        ({"block_size": 48}, 90, ".* 48; .*power of two"),
        ({}, 89, r"it needs compute capability 9\.0, and this GPU has 8\.9"),
        ({}, 120, r"it needs 227 KB of shared memory per block, and GPUs of compute capability 12\.0 have 99"),
        ({}, 90, rf"the extension megakernel has no CUDA part here: {NO_NVCC}; install .*"),
        ({}, 90, r"building megakernel failed: .*"),
    ],
)
def test_where_it_cannot_run_one_line_says_why(
    given, gpu, reason, tmp_path, capsys, monkeypatch, pretended_toolchain, pretended_gpus
):
    pretended_gpus.append((9, 0))
    if NO_NVCC in reason:
        pretended_toolchain.unlink()
    kernel.load_operator.cache_clear()
    device = torch.device("cuda", gpu)
    facts = {"config": SHAPE, "dtype": torch.bfloat16, "block_size": 64, "device": device, "model": None} | given
    assert choose_decode_step(SimpleNamespace(**facts)) is None
    printed = capsys.readouterr().err.splitlines()
    pattern = rf"persistent megakernel: not used \({reason}.*\); the layers run kernel by kernel"
    assert re.fullmatch(pattern, printed[-1]), printed
    if "failed" not in reason:
        assert len(printed) == 1 and not (tmp_path / "build").exists(), "something was compiled"


def test_the_workspace_is_made_as_new_before_the_flags_have_counted_through(monkeypatch):
    """With this many layers the flags overflow after 3 steps."""
    model = make_model(SHAPE, torch.bfloat16, device="cpu")

    class Deep(ModelConfig):
        num_layers = 2**31 // 3 - 2

    model.config = Deep(**vars(SHAPE))
    launch = ctypes.CFUNCTYPE(None)(lambda: None)
    library = SimpleNamespace(decode_workspace_bytes=lambda: 64, launch_decode_step=launch)
    step = emulate(model, library, lambda *_: step.workspace.add_(1), monkeypatch)
    assert step.max_steps == 3
    seen = []
    for _ in range(8):
        step.step(*[torch.zeros(1)] * 11)
        seen.append(int(step.workspace[0]))
    assert seen == [1, 2, 3, 1, 2, 3, 1, 2]
