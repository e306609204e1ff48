"""The doctor: its report for other machines than this one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stage_d_paged.attention import pick_backend
from tools import doctor

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


def with_gpu(capability: tuple[int, int], *architectures: str) -> doctor.Machine:
    """A machine with everything, a GPU of this compute capability, and PyTorch built for these architectures."""
    return replace(H200, gpus=(doctor.Gpu("a GPU", capability),), architectures=architectures)


T4, AMPERE, ADA = with_gpu((7, 5), "sm_75", "sm_90"), with_gpu((8, 0), "sm_80"), with_gpu((8, 9), "sm_80", "sm_90")
RTX_5090 = with_gpu((12, 0), "sm_120")  # little shared memory
NO_KERNELS = [with_gpu((7, 0), "sm_75", "sm_90"), with_gpu((8, 0), "sm_86")]
CPU = doctor.Machine(torch="2.11", compiler="g++", ninja="1.11", tutor=True)


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
    done = run_bare("$PY -m tools.doctor")
    first, *others = done.stdout.splitlines()
    assert done.returncode == 0 and first.startswith("Missing: torch, transformers")
    assert sum("does not run: it needs PyTorch" in line for line in others) == 6


def test_its_reader_may_leave_and_an_unknown_argument_is_refused() -> None:
    assert run_bare("$PY -m tools.doctor | head -1; exit ${PIPESTATUS[0]}").stderr == ""
    refused = run_bare("$PY -m tools.doctor --quick")
    assert refused.returncode == 2 and "unrecognized arguments: --quick" in refused.stderr


def test_a_stage_names_the_package_that_is_missing() -> None:
    done = run_bare("$PY -m stage_a_naive")
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and "lacks the package 'torch'" in line and "make doctor" in line


@pytest.mark.parametrize(
    ("machine", "gone", "stage", "says"),
    [
        (H200, "", "stage_a_naive", "^NVIDIA H200 in bfloat16$"),
        (H200, "triton", "stage_b_decode_step", r"--compile does not work \(no Triton\)"),
        (H200, "compiler", "stage_b_decode_step", r"--compile does not work \(no C\+\+ compiler\)"),
        (H200, "", "stage_c_fused_mlp", "kernels, built at first use$"),
        (H200, "compiler", "stage_c_fused_mlp", r"does not build: it needs a C\+\+ compiler"),
        (H200, "ninja", "stage_c_fused_mlp", "does not build: it needs ninja"),
        (H200, "nvcc", "stage_c_fused_mlp", "runs with DEVICE=cpu alone"),
        (H200, "", "stage_f_graph_tp", "the persistent megakernel for a few requests"),
        (H200, "ninja", "stage_f_graph_tp", r"not the persistent megakernel \(it needs ninja\)"),
        (H200, "nvcc", "stage_f_graph_tp", r"not the persistent megakernel \(it needs nvcc\)"),
        (RTX_5090, "", "stage_c_fused_mlp", "kernels, built at first use$"),
        (RTX_5090, "", "stage_f_graph_tp", r"not the .* megakernel \(it needs 227 KB of shared memory per block\)"),
        (AMPERE, "", "stage_e_batching", r"attention: triton \(our Triton kernels\)$"),
        (ADA, "", "stage_f_graph_tp", r"not the persistent megakernel \(it needs compute capability 9.0\)"),
        (T4, "", "stage_a_naive", "DTYPE=float16"),
        (T4, "", "stage_b_decode_step", "8.0 and newer"),
        (T4, "", "stage_c_fused_mlp", "without `fused`"),
        (T4, "", "stage_d_paged", r"attention: reference \(plain PyTorch\)$"),
        (T4, "", "stage_e_batching", "sampling kernel"),
        (T4, "", "stage_f_graph_tp", "no CUDA graphs .*--without fused_layers,skinny_gemm"),
        (with_gpu((12, 0), "sm_90", "compute_90"), "", "stage_a_naive", "^a GPU in bfloat16$"),
        *(
            (machine, "", "stage_a_naive", r"^the CPU \(DEVICE=cpu\): .* no kernels for a GPU")
            for machine in NO_KERNELS
        ),
        (CPU, "", "stage_c_fused_mlp", r"CPU version"),
        (CPU, "ninja", "stage_c_fused_mlp", "it needs ninja"),
    ],
)
def test_a_stage_is_promised_what_the_machine_and_its_tools_can_do(
    machine: doctor.Machine, gone: str, stage: str, says: str
) -> None:
    machine = replace(machine, **{gone: None}) if gone else machine
    assert re.search(says, dict(doctor.stage_lines(machine))[stage])


@pytest.mark.parametrize(
    ("machine", "what"),
    [
        (doctor.Machine(), ["make stage-a", "train.py", "C++ compiler", "ninja"]),
        (replace(CPU, triton="3.6"), []),  # no driver: there is no GPU to be seen
        (replace(CPU, driver="580.1"), ["there is an NVIDIA driver", "Triton, whose interpreter"]),
        (H200, []),
        (ADA, []),
        *((machine, ["a PyTorch built for this GPU"]) for machine in NO_KERNELS),
        (replace(H200, nvcc=None, ninja=None, triton=None, flash_attn=None), ["ninja", "nvcc", "Triton", "flash-attn"]),
        (replace(T4, triton=None, flash_attn=None), []),  # they serve no T4
    ],
)
def test_it_advises_what_would_work_here_and_nothing_else(
    machine: doctor.Machine, what: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    found = doctor.advice(machine)
    assert len(found) == len(what) and all(word in text for word, text in zip(what, found, strict=True))


def test_a_program_is_shown_with_the_line_that_has_its_version_or_why_it_does_not_start(tmp_path: Path) -> None:
    program = tmp_path / "nvcc"
    program.write_bytes(b"\x7fELF of another machine")
    program.chmod(0o755)
    assert "does not start" in doctor.program_version("", str(program))
    program.write_text("#!/bin/sh\necho 'A compiler of a company with a long name, 2005'\necho 'release 13.0, V13.0'\n")
    assert doctor.program_version(str(program)) == f"{program} (release 13.0, V13.0)"
    assert doctor.program_version(str(tmp_path / "none"), "no such program here") is None


def test_what_it_says_of_attention_here_is_what_stage_d_takes() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = pick_backend("auto", device, torch.bfloat16 if device.type == "cuda" else torch.float32, 64)
    assert doctor.attention_text(doctor.look()).startswith(backend.name)
