"""`make doctor`: what this machine has, what each stage will use on it, and what to install for more.

It looks and does not change anything, and it works on a machine where half of everything is missing: that is when it is
needed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.engines import is_installed
from benchmarks.environment import ROOT, cpu_name, driver_version


@dataclass(frozen=True)
class Machine:
    """What was found. None stands for "not there"."""

    gpus: tuple[str, ...]
    capability: tuple[int, int] | None
    driver: str | None
    compiler: str | None
    nvcc: str | None
    ninja: str | None
    triton: str | None
    flash_attn: str | None
    tutor: bool

    @property
    def has_gpu(self) -> bool:
        return bool(self.gpus)


def look() -> Machine:
    """Find out what is here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Machine(
        gpus=tuple(torch.cuda.get_device_name(i) for i in range(count)),
        capability=torch.cuda.get_device_capability(0) if count else None,
        driver=driver_version(),
        compiler=program_version(os.environ.get("CXX", ""), "g++", "c++", "clang++"),
        nvcc=program_version(str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"), "nvcc"),
        ninja=package_version("ninja"),
        triton=package_version("triton"),
        flash_attn=package_version("flash-attn"),
        tutor=(ROOT / "models" / "tutor" / "model.safetensors").is_file(),
    )


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def program_version(*names: str) -> str | None:
    """Path and version line of the first program found; the version line is the one with most digits."""
    for name in names:
        path = shutil.which(name) if name else None
        if path is None:
            continue
        try:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=20)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{path} (does not start: {error})"
        lines = answer.stdout.splitlines() or [f"exit status {answer.returncode}"]
        return f"{path} ({max(lines, key=lambda line: sum(map(str.isdigit, line)), default='').strip()})"
    return None


def memory_text() -> str:
    """Main memory, free and in all, and the GPU's."""
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        sizes = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free, total = (int(sizes[key].split()[0]) / 2**20 for key in ("MemAvailable", "MemTotal"))
        found.append(f"{free:.1f} GiB free of {total:.1f} GiB")
    if torch.cuda.is_available():
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(0))
        found.append(f"GPU 0: {free:.1f} GiB free of {total:.1f} GiB")
    return "; ".join(found) or "unknown"


def machine_lines(machine: Machine) -> list[tuple[str, str]]:
    """Name and finding, a line each."""
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU alone"
    gpus = "none that PyTorch sees"
    if machine.has_gpu:
        gpus = f"{len(machine.gpus)} × {machine.gpus[0]}, driver {machine.driver}"
    needed = ("transformers", "safetensors", "tokenizers")
    packages = [f"{name} {package_version(name) or 'missing'}" for name in needed]
    return [
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("CPU", f"{cpu_name()}, {os.cpu_count()} cores"),
        ("memory", memory_text()),
        ("GPU", gpus),
        ("PyTorch", f"{torch.__version__}, {cuda}"),
        ("packages", ", ".join(packages)),
        ("Triton", machine.triton or "missing"),
        ("flash-attn", machine.flash_attn or "missing"),
        ("C++ compiler", machine.compiler or "missing"),
        ("nvcc", machine.nvcc or "missing"),
        ("ninja", machine.ninja or "missing"),
        ("tutor model", "models/tutor" if machine.tutor else "missing: run `python models/tutor/train.py`"),
    ]


def stage_lines(machine: Machine) -> list[tuple[str, str]]:
    """What each stage will use here, a line each."""
    where = f"{machine.gpus[0]} in bfloat16" if machine.has_gpu else "the CPU in float32"
    compile_text = "--compile works" if machine.compiler else "--compile does not work (no C++ compiler)"
    if machine.compiler is None:
        fused = "does not build: no C++ compiler"
    elif machine.has_gpu and machine.nvcc:
        fused = "C++ and CUDA kernels, built at first use"
    elif machine.has_gpu:
        fused = "the C++ extension without its CUDA kernels: no nvcc"
    else:
        fused = "the C++ extension's CPU version, built at first use"
    attention = attention_text(machine)
    graphs = "CUDA graphs" if machine.has_gpu else "no CUDA graphs (they need a GPU)"
    ranks = f"up to {len(machine.gpus)} GPUs" if machine.has_gpu else "CPU processes"
    texts = {
        "stage_a_naive": where,
        "stage_b_decode_step": f"{where}; {compile_text}",
        "stage_c_fused_mlp": f"{where}; {fused}",
        "stage_d_paged": f"{where}; attention: {attention}",
        "stage_e_batching": f"{where}; attention: {attention}",
        "stage_f_graph_tp": f"{where}; attention: {attention}; {graphs}; tensor parallelism over {ranks}",
    }
    return [(name, text if is_installed(name) else "not in this tree") for name, text in texts.items()]


def attention_text(machine: Machine) -> str:
    """The attention backend that `auto` picks, asked of stage D itself where it is there."""
    if not is_installed("stage_d_paged"):
        return "unknown"
    try:
        from stage_d_paged.attention import pick_backend

        device = torch.device("cuda" if machine.has_gpu else "cpu")
        return pick_backend("auto", device, torch.bfloat16 if machine.has_gpu else torch.float32, 64).name
    except Exception as error:  # whatever it is, the doctor goes on
        return f"unknown ({type(error).__name__}: {error})"


def advice(machine: Machine) -> list[str]:
    """What to install for more."""
    rules: list[tuple[Callable[[Machine], bool], str]] = [
        (lambda m: not m.tutor, "the default model: `python models/tutor/train.py` (some minutes)"),
        (lambda m: not m.compiler, "a C++ compiler for stage C and torch.compile: `apt install g++` or Xcode's tools"),
        (lambda m: not m.ninja, "ninja, which builds stage C's extension: `pip install ninja`"),
        (lambda m: m.driver is not None and not m.has_gpu,
         "a PyTorch built for CUDA (see pytorch.org): there is an NVIDIA driver, but this PyTorch sees no GPU"),
        (lambda m: m.has_gpu and not m.nvcc,
         f"the CUDA toolkit {torch.version.cuda} (nvcc) for stage C's and F's CUDA kernels"),
        (lambda m: m.has_gpu and not m.triton, "Triton for the paged attention kernels: `pip install triton`"),
        (lambda m: m.has_gpu and not m.flash_attn and (m.capability or (0, 0)) >= (8, 0),
         "flash-attn, a second attention backend for GPUs: `pip install flash-attn --no-build-isolation`"),
    ]  # fmt: skip
    return [text for applies, text in rules if applies(machine)]


def main() -> int:
    """Print the report. Always succeeds: what is missing is a finding, not an error."""
    machine = look()
    for title, lines in (("This machine", machine_lines(machine)), ("What each stage will use", stage_lines(machine))):
        print(f"{title}:")
        print("\n".join(f"  {name:20} {text}" for name, text in lines))
    print("To install for more:")
    print("\n".join(f"  - {text}" for text in advice(machine)) or "  nothing")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
