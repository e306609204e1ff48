"""The builder of the extension: its products, its messages, and two builders at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from stage_c_fused_mlp import extension as builder
from stage_c_fused_mlp import fused_mlp, toolchain
from stage_c_fused_mlp.extension import Extension, plan
from stage_c_fused_mlp.toolchain import ExtensionError, gencode

SMALL = """
#include <torch/library.h>
int64_t answer() { return 42; }
TORCH_LIBRARY(small_test_library, m) { m.def("answer() -> int", &answer); }
"""


@pytest.fixture
def csrc(tmp_path, monkeypatch):
    """A csrc/ with one small source, and a separate cache."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "small.cpp").write_text(SMALL)
    monkeypatch.setattr(builder, "CSRC", folder)
    monkeypatch.setitem(builder.SOURCES, "small", ("small.cpp",))
    monkeypatch.setenv("SIX_ENGINES_BUILD", str(tmp_path / "cache"))
    return folder


def test_the_key_follows_sources_headers_defines_architectures_and_pytorch_and_no_other_file(csrc, monkeypatch):
    (csrc / "small.cpp").write_text('#include "a.h"\n' + SMALL)
    (csrc / "a.h").write_text('#include "b.h"\n')
    (csrc / "b.h").write_text("")
    (csrc / "unrelated.h").write_text("")
    before = Extension("small", (), "").key
    (csrc / "unrelated.h").write_text("int changed;")
    assert Extension("small", (), "").key == before
    assert Extension("small", ("9.0",), "").key != before
    assert Extension("small", (), "", ("SIZE=1",)).key not in (before, Extension("small", (), "", ("SIZE=2",)).key)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "0.0")
        assert Extension("small", (), "").key != before
    (csrc / "b.h").write_text("int changed;")
    assert Extension("small", (), "").key != before


@pytest.mark.slow
@pytest.mark.compiler
def test_two_processes_at_once_build_once_and_both_can_use_it(csrc, tmp_path):
    code = (
        "import sys, pathlib, torch; from stage_c_fused_mlp import extension as b;"
        f"b.CSRC = pathlib.Path({str(csrc)!r}); b.SOURCES['small'] = ('small.cpp',);"
        "b.load_extension('small'); print(torch.ops.small_test_library.answer())"
    )
    command = [sys.executable, "-c", code]
    run = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [process.communicate(timeout=300) for process in run]
    assert [out.strip() for out, _ in results] == ["42", "42"], results
    assert sum("once, into" in err for _, err in results) == 1
    folder = Extension("small", (), "").library.parent if torch.version.cuda is None else plan("small").library.parent
    assert not list(folder.glob("building-*"))


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("source", "compiler", "said"),
    [
        ("int answer() { return forty_two; }", None, ".*error: .forty_two. was not declared.*"),
        (SMALL, "/bin/true", ".*"),  # it compiles nothing
    ],
)
def test_a_compiler_error_is_one_line_and_leaves_nothing_half_done(csrc, monkeypatch, source, compiler, said):
    (csrc / "small.cpp").write_text(source)
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ExtensionError, match=rf"^building small failed: {said}\.log") as caught:
        builder.load_extension("small")
    assert "\n" not in str(caught.value)
    found = plan("small")
    assert not found.library.exists() and found.library.with_suffix(".log").exists()
    assert not list(found.library.parent.glob("building-*"))


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        *((name, f"CXX={re.escape(repr(name))} does not start .*; set CXX to") for name in ("none", "/bin/false", "/")),
        ("env g++", "CXX='env g\\+\\+' does not start .*a single program"),
        ("", r"there is no c\+\+ here; install one, .* build-essential"),
    ],
)
def test_a_compiler_that_does_not_start_is_one_line_that_says_what_to_do(monkeypatch, compiler, message):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PATH", os.environ["PATH"] if compiler else "")
    with pytest.raises(ExtensionError, match=rf"a C\+\+ compiler; {message}.*Only stage C needs") as caught:
        plan()
    assert "\n" not in str(caught.value)


def test_no_ninja_is_an_error_with_the_command_to_install_it(monkeypatch, pretended_toolchain):
    pretended_toolchain.with_name("ninja").unlink()
    monkeypatch.setenv("PATH", str(pretended_toolchain.parent))
    monkeypatch.setattr(sys, "executable", str(pretended_toolchain))
    with pytest.raises(ExtensionError, match="pip install ninja"):
        plan()


def test_an_unknown_extension_is_an_error_that_lists_those_there_are():
    with pytest.raises(ExtensionError, match="no extension 'fused_mpl'; there are: fused_mlp"):
        plan("fused_mpl")


def test_a_build_without_cuda_refuses_cuda_tensors_with_the_reason(pretended_toolchain, tmp_path):
    pretended_toolchain.unlink()
    assert not any(source.suffix == ".cu" for source in plan().sources)
    with pytest.raises(ExtensionError, match="no CUDA part here: nvcc was not found"):
        fused_mlp.load_operators("cuda")
    assert not (tmp_path / "build").exists(), "something was built"


def test_architectures_become_options_of_nvcc():
    assert gencode(("9.0a",)) == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert gencode(("8.0", "9.0+PTX")) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    with pytest.raises(ExtensionError, match="TORCH_CUDA_ARCH_LIST has 'Hopper'"):
        gencode(("Hopper",))


@pytest.mark.usefixtures("pretended_toolchain")
def test_a_gpu_that_is_too_old_for_a_kernel_is_named_before_anything_is_compiled(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 8.6+PTX")
    assert plan("fused_mlp").architectures == ("8.0", "8.6+PTX")
    with pytest.raises(ExtensionError, match=r"needs compute capability 9.0 or newer, and this machine has 8.0, 8.6"):
        plan("megakernel").require_cuda()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a 10.0")
    assert plan("megakernel").architectures == ("9.0a", "10.0")


@pytest.mark.usefixtures("pretended_toolchain")
def test_a_build_is_for_every_kind_of_gpu_that_is_here(pretended_gpus):
    pretended_gpus += [(10, 0), (8, 6), (10, 0)]
    assert plan().architectures == ("8.6", "10.0")


@pytest.mark.parametrize(
    ("lacks", "listed", "reason"),
    [
        ("CUDA", "", "this PyTorch is a build for the CPU"),
        ("nvcc", "", "nvcc was not found; install the CUDA toolkit 13.0"),
        ("GPU", "", "there is no NVIDIA GPU; to build for another machine set TORCH_CUDA_ARCH_LIST"),
        ("GPU", "9.0", ""),
        ("nothing", "", ""),
    ],
)
def test_the_first_thing_that_cuda_sources_lack_is_named(
    lacks, listed, reason, monkeypatch, pretended_toolchain, pretended_gpus
):
    if lacks == "CUDA":
        monkeypatch.setattr(torch.version, "cuda", None)
    if lacks == "nvcc":
        pretended_toolchain.unlink()
    if lacks != "GPU":
        pretended_gpus.append((9, 0))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    found = toolchain.why_no_cuda()
    assert found.startswith(reason) and bool(found) == bool(reason)
