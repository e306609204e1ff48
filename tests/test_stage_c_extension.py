"""The builder of the extension: what it builds where, what it says, and two builders at once."""

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
    """A csrc/ with one small source, and a cache of its own."""
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
def test_a_compiler_error_is_short_and_leaves_nothing_half_done(csrc, capsys):
    (csrc / "small.cpp").write_text("int answer() { return forty_two; }")
    with pytest.raises(ExtensionError, match=r"small failed: .*error: .forty_two. was not declared.*\.log") as caught:
        builder.load_extension("small")
    assert "\n" not in str(caught.value)
    found = plan("small")
    assert not found.library.exists() and found.library.with_suffix(".log").exists()
    assert not list(found.library.parent.glob("building-*"))


@pytest.mark.parametrize("compiler", ["no-such-compiler", "/bin/false", "/", "env g++"])
def test_a_compiler_that_does_not_start_is_one_line_that_says_what_to_do(monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    message = rf"a C\+\+ compiler; CXX='{re.escape(compiler)}' does not start .*; set CXX to.*Only stage C needs"
    with pytest.raises(ExtensionError, match=message) as caught:
        plan()
    assert "\n" not in str(caught.value)


def test_the_command_that_builds_ends_with_2_and_one_line_where_it_cannot(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setattr(sys, "argv", ["extension"])
    assert builder.main() == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: building fused_mlp needs a C++ compiler")


def test_the_command_builds_what_is_named_or_all_that_needs_no_model_and_says_why_without_cuda(monkeypatch, capsys):
    built = []
    monkeypatch.setattr(
        builder, "load_extension", lambda name, verbose: built.append(name) or Extension(name, (), "there is no GPU")
    )
    for words in ([], ["megakernel"]):
        monkeypatch.setattr(sys, "argv", ["extension", *words])
        assert builder.main() == 0
    assert built == ["fused_mlp", "megakernel", "megakernel"]
    assert all(line.endswith(".so (CPU only: there is no GPU)") for line in capsys.readouterr().err.splitlines())


def test_no_compiler_at_all_is_an_error_with_the_command_to_install_one(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    with pytest.raises(ExtensionError, match=r"there is no c\+\+ here; install one, .* build-essential"):
        plan()


@pytest.mark.compiler
def test_a_compiler_that_compiles_nothing_is_one_line(csrc, monkeypatch):
    monkeypatch.setenv("CXX", "/bin/true")
    with pytest.raises(ExtensionError, match=r"^building small failed: .*\.log.*$") as caught:
        builder.load_extension("small")
    assert "\n" not in str(caught.value)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("1 warning\nx.cpp:1: error: first\nx.cpp:2: error: second\nstopped", "x.cpp:1: error: first"),
        ("1 of 2\nstopped", "stopped"),
        ("", "the compiler said nothing"),
    ],
)
def test_of_all_that_a_failed_build_said_the_first_error_is_shown_or_the_end(csrc, said, shown, monkeypatch):
    def fail(**options):
        raise RuntimeError(said)

    monkeypatch.setattr("torch.utils.cpp_extension.load", fail)
    with pytest.raises(ExtensionError, match=rf"^building small failed: {re.escape(shown)} \(everything"):
        builder.load_extension("small")


def test_no_ninja_is_an_error_with_the_command_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(builder, "why_no_compiler", lambda: "")
    monkeypatch.setattr(builder.shutil, "which", lambda name: None if name == "ninja" else "/somewhere/" + name)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    with pytest.raises(ExtensionError, match="pip install ninja"):
        plan()


def test_this_pythons_scripts_come_last_on_the_path_and_once(monkeypatch):
    monkeypatch.setenv("PATH", "/somewhere")
    path = toolchain.path_with_ninja()
    assert path.split(os.pathsep) == ["/somewhere", os.path.dirname(sys.executable)]
    monkeypatch.setenv("PATH", path)
    assert toolchain.path_with_ninja() == path


def test_an_unknown_extension_is_an_error_that_lists_those_there_are():
    with pytest.raises(ExtensionError, match="no extension 'fused_mpl'; there are: fused_mlp"):
        plan("fused_mpl")


def test_a_build_without_cuda_refuses_cuda_tensors_with_the_reason(monkeypatch):
    cpu_only = Extension("fused_mlp", (), "nvcc was not found; install the CUDA toolkit")
    assert not any(source.suffix == ".cu" for source in cpu_only.sources)
    monkeypatch.setattr(fused_mlp, "plan", lambda name: cpu_only)
    monkeypatch.setattr(fused_mlp, "_loaded", lambda: pytest.fail("something was built"))
    with pytest.raises(ExtensionError, match="no CUDA part here: nvcc was not found"):
        fused_mlp.load_operators("cuda")


def test_architectures_become_options_of_nvcc():
    assert gencode(("9.0a",)) == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert gencode(("8.0", "9.0+PTX")) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    with pytest.raises(ExtensionError, match="TORCH_CUDA_ARCH_LIST has 'Hopper'"):
        gencode(("Hopper",))


def test_a_gpu_that_is_too_old_for_a_kernel_is_named_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(builder, "why_no_compiler", lambda: "")
    monkeypatch.setattr(builder, "why_no_cuda", lambda: "")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 8.6+PTX")
    assert plan("fused_mlp").architectures == ("8.0", "8.6+PTX")
    with pytest.raises(ExtensionError, match=r"needs compute capability 9.0 or newer, and this machine has 8.0, 8.6"):
        plan("megakernel").require_cuda()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a 10.0")
    assert plan("megakernel").architectures == ("9.0a", "10.0")


@pytest.mark.parametrize(
    ("version", "toolkit", "gpu", "listed", "reason"),
    [
        (None, True, True, "", "this PyTorch is a build for the CPU"),
        ("13.0", False, True, "", "nvcc was not found; install the CUDA toolkit 13.0"),
        ("13.0", True, False, "", "there is no NVIDIA GPU; to build for another machine set TORCH_CUDA_ARCH_LIST"),
        ("13.0", True, False, "9.0", ""),
        ("13.0", True, True, "", ""),
    ],
)
def test_the_first_thing_that_cuda_sources_lack_is_named(version, toolkit, gpu, listed, reason, tmp_path, monkeypatch):
    if toolkit:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    found = toolchain.why_no_cuda()
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_a_build_is_for_every_kind_of_gpu_that_is_here(monkeypatch):
    here = [(10, 0), (8, 6), (10, 0)]
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(here))
    monkeypatch.setattr(torch.cuda, "get_device_capability", here.__getitem__)
    assert toolchain.architectures_here() == ("8.6", "10.0")
