"""The doctor: what it says of machines that this one is not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import doctor
from stage_d_paged.attention import pick_backend

pytestmark = pytest.mark.fast
H200 = doctor.Machine(
    (doctor.Gpu("NVIDIA H200", (9, 0)),),
    ("sm_80", "sm_90"),
    "580.1",
    "g++",
    "nvcc",
    "1.11",
    "3.6",
    "2.8",
    tutor=True,
    torch="2.11",
    cuda="13.0",
)
T4 = replace(H200, gpus=(doctor.Gpu("Tesla T4", (7, 5)),), architectures=("sm_75", "sm_80", "sm_90"))


def test_it_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "PyTorch" in text and "stage_a_naive" in text and "To install for more:" in text


def run_bare(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of a shell in which `$PY` is a Python that has the standard library alone."""
    environment = os.environ | {"PY": f"{sys.executable} -S"}
    return subprocess.run(
        ["bash", "-c", command], cwd=doctor.ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_it_runs_where_everything_is_missing_and_says_so_first() -> None:
    done = run_bare("$PY -m doctor")
    first, *others = done.stdout.splitlines()
    assert done.returncode == 0 and first.startswith("Missing: torch, transformers")
    assert sum("does not run: it needs PyTorch" in line for line in others) == 6


def test_its_reader_may_leave_and_an_unknown_argument_is_refused() -> None:
    assert run_bare("$PY -m doctor | head -1; exit ${PIPESTATUS[0]}").stderr == ""
    refused = run_bare("$PY -m doctor --quick")
    assert refused.returncode == 2 and "unrecognized arguments: --quick" in refused.stderr


def test_a_stage_names_the_package_that_is_missing() -> None:
    done = run_bare("$PY -m stage_a_naive")
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and "lacks the package 'torch'" in line and "make doctor" in line


def test_a_machine_that_has_everything_needs_nothing() -> None:
    stages = dict(doctor.stage_lines(H200))
    assert stages["stage_a_naive"] == "NVIDIA H200 in bfloat16"
    assert "without" not in stages["stage_c_fused_mlp"]
    assert "the persistent megakernel for a few requests" in stages["stage_f_graph_tp"]
    assert doctor.advice(H200) == []


def test_it_says_what_a_gpu_machine_lacks() -> None:
    machine = replace(H200, nvcc=None, ninja=None, flash_attn=None)
    assert "does not build" in dict(doctor.stage_lines(machine))["stage_c_fused_mlp"]
    advice = "\n".join(doctor.advice(machine))
    assert all(word in advice for word in ("nvcc", "ninja", "flash-attn"))


@pytest.mark.parametrize(
    ("gone", "stage", "says"),
    [
        ("triton", "stage_b_decode_step", "--compile does not work (no Triton)"),
        ("compiler", "stage_b_decode_step", "--compile does not work (no C++ compiler)"),
        ("compiler", "stage_c_fused_mlp", "does not build: it needs a C++ compiler"),
        ("ninja", "stage_c_fused_mlp", "does not build: it needs ninja"),
        ("nvcc", "stage_c_fused_mlp", "runs with DEVICE=cpu alone"),
        ("ninja", "stage_f_graph_tp", "not the persistent megakernel (it needs ninja)"),
        ("nvcc", "stage_f_graph_tp", "not the persistent megakernel (it needs nvcc)"),
    ],
)
def test_what_does_not_work_without_a_tool_is_not_promised(gone: str, stage: str, says: str) -> None:
    assert says in dict(doctor.stage_lines(replace(H200, **{gone: None})))[stage]


def test_on_a_cpu_stage_c_needs_a_compiler_and_ninja_and_no_nvcc() -> None:
    cpu = doctor.Machine(torch="2.11", compiler="g++", ninja="1.11")
    assert "CPU version" in doctor.extension_text(cpu)
    assert "it needs ninja" in doctor.extension_text(replace(cpu, ninja=None))


def test_a_ninja_that_is_no_package_of_this_python_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "package_version", lambda name: None)
    monkeypatch.setattr(doctor, "program_version", lambda *names: "found" if names == ("ninja",) else None)
    assert doctor.look().ninja == "found" and doctor.look().triton is None


def test_it_advises_what_would_work_here_and_nothing_else() -> None:
    assert not any("Triton" in text for text in doctor.advice(replace(T4, triton=None))), "it serves no T4"
    cpu = doctor.Machine(torch="2.11", compiler="g++", ninja="1.11", tutor=True)
    assert doctor.advice(cpu) == [], "no driver: there is no GPU to be seen"
    [text] = doctor.advice(replace(cpu, driver="580.1"))
    assert "there is an NVIDIA driver" in text


def test_a_program_that_does_not_start_is_found_and_said_to_be_so(tmp_path: Path) -> None:
    broken = tmp_path / "nvcc"
    broken.write_bytes(b"\x7fELF of another machine")
    broken.chmod(0o755)
    assert "does not start" in doctor.program_version("", str(broken))
    assert doctor.program_version(str(tmp_path / "none"), "no such program here") is None


def test_the_line_of_a_program_that_has_its_version_is_shown(tmp_path: Path) -> None:
    program = tmp_path / "nvcc"
    program.write_text("#!/bin/sh\necho 'A compiler of a company with a long name, 2005'\necho 'release 13.0, V13.0'\n")
    program.chmod(0o755)
    assert doctor.program_version(str(program)) == f"{program} (release 13.0, V13.0)"


def test_a_t4_runs_the_first_four_stages_in_float16_and_is_told_what_triton_does_not_serve() -> None:
    stages = dict(doctor.stage_lines(T4))
    assert all("DTYPE=float16" in text for text in stages.values())
    assert "8.0 and newer" in stages["stage_b_decode_step"]
    assert "without `fused`" in stages["stage_c_fused_mlp"]
    assert stages["stage_d_paged"].endswith("attention: reference (plain PyTorch)")
    assert "sampling kernel" in stages["stage_e_batching"]
    assert (
        "--without fused_layers,skinny_gemm" in stages["stage_f_graph_tp"]
        and "no CUDA graphs" in stages["stage_f_graph_tp"]
    )
    assert doctor.advice(replace(T4, flash_attn=None)) == [], "flash-attn serves no T4 either"


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9)])
def test_an_ampere_gpu_has_all_but_the_kernels_that_need_a_hopper(capability: tuple[int, int]) -> None:
    stages = dict(doctor.stage_lines(replace(H200, gpus=(doctor.Gpu("a GPU", capability),))))
    assert "triton (our" in stages["stage_e_batching"] and "sampling" not in stages["stage_e_batching"]
    assert "not the persistent megakernel (it needs compute capability 9.0)" in stages["stage_f_graph_tp"]


def test_a_gpu_with_too_little_shared_memory_has_all_but_the_megakernel() -> None:
    machine = replace(H200, gpus=(doctor.Gpu("a GPU", (12, 0)),), architectures=("sm_120",))
    stages = dict(doctor.stage_lines(machine))
    assert "without `fused`" not in stages["stage_c_fused_mlp"]
    assert "not the persistent megakernel (it needs 227 KB of shared memory per block)" in stages["stage_f_graph_tp"]


@pytest.mark.parametrize(
    ("capability", "architectures", "there"),
    [
        ((7, 0), ("sm_75", "sm_90"), False),
        ((8, 9), ("sm_75", "sm_86", "sm_90"), True),
        ((8, 0), ("sm_86",), False),
        ((12, 0), ("sm_90", "compute_90"), True),
    ],
)
def test_a_pytorch_without_kernels_for_the_gpu_is_found(
    capability: tuple[int, int], architectures: tuple[str, ...], there: bool
) -> None:
    machine = replace(H200, gpus=(doctor.Gpu("a GPU", capability),), architectures=architectures)
    assert doctor.has_kernels(machine) == there
    assert any("no kernels" in text for _, text in doctor.stage_lines(machine)) != there
    assert any("no kernels" in text for text in doctor.advice(machine)) != there


def test_what_it_says_of_attention_here_is_what_stage_d_takes() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = pick_backend("auto", device, torch.bfloat16 if device.type == "cuda" else torch.float32, 64)
    assert doctor.attention_text(doctor.look()).startswith(backend.name)
