"""`make doctor`: what this machine has, what each stage will use on it, and what to install for more.

It changes nothing, and it works on a machine where everything is missing, because it is needed most there. So it first
imports only the standard library.
"""

from __future__ import annotations

from stage_a_naive.entrypoints.interrupts import (
    run_command,  # before all other imports: from here on, Ctrl-C ends it quietly
)

# isort: split
import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stage_a_naive.entrypoints.language import counted, padded, tr

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("torch", "transformers", "safetensors", "tokenizers")  # without these no stage runs
# Compute capabilities that are needed, and who says so.
BFLOAT16 = (8, 0)  # in hardware; PyTorch emulates it below
TRITON = (8, 0)  # the list of supported hardware in Triton's README; stage D's kernels refuse less
FLASH_ATTN = (8, 0)  # its README: Ampere, Ada, Hopper
BULK_COPY = (9, 0)  # PTX ISA, cp.async.bulk and mbarrier: stage C's variant `fused`, stage F's megakernel
SMALL_SHARED_MEMORY = (12, 0)  # CUDA programming guide: 99 KB per block from here on; the megakernel needs 227


@dataclass(frozen=True)
class Gpu:
    """What PyTorch says about a GPU."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """The findings. None means "not there".

    Attributes:
        architectures: what PyTorch was built for, such as `("sm_80", "sm_90", "compute_90")`; empty on a CPU.
        cuda: the CUDA version that PyTorch was built with.
        memory: free and in all, in words.
    """

    gpus: tuple[Gpu, ...] = ()
    architectures: tuple[str, ...] = ()
    driver: str | None = None
    compiler: str | None = None
    nvcc: str | None = None
    ninja: str | None = None
    triton: str | None = None
    flash_attn: str | None = None
    tutor: bool = False
    torch: str | None = None
    cuda: str | None = None
    memory: str = "unknown"

    def can(self, capability: tuple[int, int]) -> bool:
        """Whether the first GPU has this compute capability or a newer one; False without a GPU."""
        return bool(self.gpus) and self.gpus[0].capability >= capability

    @property
    def gpu_text(self) -> str:
        capability = ".".join(map(str, self.gpus[0].capability))
        return tr("{name}, compute capability {capability}").format(name=self.gpus[0].name, capability=capability)


def look() -> Machine:
    """Examine this machine."""
    gpus, architectures, cuda = look_at_pytorch() if package_version("torch") else ((), (), None)
    return Machine(
        gpus=gpus,
        architectures=architectures,
        driver=driver_version(),
        compiler=program_version(os.environ.get("CXX", ""), "g++", "c++", "clang++"),
        nvcc=program_version(str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"), "nvcc"),
        ninja=package_version("ninja") or program_version("ninja"),
        triton=package_version("triton"),
        flash_attn=package_version("flash-attn"),
        tutor=(ROOT / "models" / "tutor" / "model.safetensors").is_file(),
        torch=package_version("torch"),
        cuda=cuda,
        memory="; ".join(filter(None, [main_memory(), gpu_memory() if gpus else ""])) or "unknown",
    )


def look_at_pytorch() -> tuple[tuple[Gpu, ...], tuple[str, ...], str | None]:
    """Return the GPUs that PyTorch sees, the architectures it was built for, and its CUDA version."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = tuple(Gpu(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count))
    return gpus, tuple(torch.cuda.get_arch_list()) if count else (), torch.version.cuda


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def program_version(*names: str) -> str | None:
    """Return the path and the version line (the line with most digits) of the first program found."""
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


def cpu_name() -> str:
    """Return the processor's name as reported by the system."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.is_file() else None
    return named[1] if named else platform.processor() or platform.machine()


def driver_version() -> str | None:
    """Return the NVIDIA driver's version; None without a driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.partition("\n")[0] or None) if done.returncode == 0 else None


def main_memory() -> str:
    """Return free and total main memory in words; "" if the system does not report it."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return ""
    sizes = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    free, total = (int(sizes[key].split()[0]) / 2**20 for key in ("MemAvailable", "MemTotal"))
    return tr("{free:.1f} GiB free of {total:.1f} GiB").format(free=free, total=total)


def gpu_memory() -> str:
    import torch

    free, total = (size / 2**30 for size in torch.cuda.mem_get_info(0))
    return "GPU 0: " + tr("{free:.1f} GiB free of {total:.1f} GiB").format(free=free, total=total)


def machine_lines(machine: Machine) -> list[tuple[str, str]]:
    """Return pairs of a name and a finding, one per line."""
    missing = tr("missing")
    built = (
        tr("built for CUDA {version}").format(version=machine.cuda) if machine.cuda else tr("built for the CPU alone")
    )
    gpus = tr("none that PyTorch sees")
    if machine.gpus:
        gpus = f"{len(machine.gpus)} × {machine.gpu_text}, " + tr("driver {version}").format(version=machine.driver)
    packages = [f"{name} {package_version(name) or missing}" for name in NEEDED[1:]]
    return [
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("CPU", f"{cpu_name()}, " + tr("{count} cores").format(count=os.cpu_count())),
        (tr("memory"), machine.memory),
        ("GPU", gpus),
        ("PyTorch", f"{machine.torch}, {built}" if machine.torch else missing),
        (tr("packages"), ", ".join(packages)),
        ("Triton", machine.triton or missing),
        ("flash-attn", machine.flash_attn or missing),
        (tr("C++ compiler"), machine.compiler or missing),
        ("nvcc", machine.nvcc or missing),
        ("ninja", machine.ninja or missing),
        (tr("tutor model"), "models/tutor" if machine.tutor else tr("missing: run `python models/tutor/train.py`")),
    ]


def stage_lines(machine: Machine) -> list[tuple[str, str]]:
    """Return what each stage will use here, one line each."""
    where = where_text(machine)
    if machine.gpus and not has_kernels(machine):
        where = tr("the CPU (DEVICE=cpu): this PyTorch has no kernels for {gpu}").format(gpu=machine.gpu_text)
        machine = Machine(torch=machine.torch, compiler=machine.compiler, ninja=machine.ninja)
    then = tr("; ")
    attention = tr("attention: {backend}").format(backend=attention_text(machine))
    texts = {
        "stage_a_naive": where,
        "stage_b_decode_step": f"{where}{then}{compile_text(machine)}",
        "stage_c_fused_mlp": f"{where}{then}{extension_text(machine)}",
        "stage_d_paged": f"{where}{then}{attention}",
        "stage_e_batching": f"{where}{then}{attention}{sampling_text(machine)}",
        "stage_f_graph_tp": f"{where}{then}{attention}{sampling_text(machine)}{then}{graph_text(machine)}",
    }
    if not machine.torch:
        texts = dict.fromkeys(texts, tr("does not run: it needs PyTorch"))
    return [
        (name, text if (ROOT / name / "__init__.py").is_file() else tr("not in this tree"))
        for name, text in texts.items()
    ]


def where_text(machine: Machine) -> str:
    if not machine.gpus:
        return tr("the CPU in float32")
    if machine.can(BFLOAT16):
        return tr("{gpu} in bfloat16").format(gpu=machine.gpus[0].name)
    emulated = tr("{gpu}: give DTYPE=float16 (bfloat16, the default, is emulated on it, slowly)")
    return emulated.format(gpu=machine.gpus[0].name)


def has_kernels(machine: Machine) -> bool:
    """Return whether PyTorch was built for the first GPU: with code of its major version, or PTX of an older one."""
    major, minor = machine.gpus[0].capability
    for name in machine.architectures:
        kind, _, digits = name.rstrip("af").partition("_")
        theirs = int(digits[:-1]), int(digits[-1])
        if (kind == "compute" and theirs <= (major, minor)) or (theirs[0] == major and theirs[1] <= minor):
            return True
    return not machine.architectures


def compile_text(machine: Machine) -> str:
    if machine.compiler is None:
        return tr("--compile does not work (no C++ compiler)")
    if machine.gpus and not machine.triton:
        return tr("--compile does not work (no Triton)")
    if machine.gpus and not machine.can(TRITON):
        return tr("--compile: not promised (Triton supports compute capability 8.0 and newer)")
    return tr("--compile works")


def missing_tool(machine: Machine) -> str:
    """Return the first missing tool of those that build CUDA kernels; "" if none is missing."""
    tools = {"a C++ compiler": machine.compiler, "ninja": machine.ninja, "nvcc": machine.nvcc}
    return next((name for name, found in tools.items() if not found), "")


def extension_text(machine: Machine) -> str:
    """Describe stage C's kernels. With nvcc 13.0 they compile for 7.5, and the decode step only for 9.0."""
    tool = missing_tool(machine)
    if tool and tool != "nvcc":
        return tr("does not build: it needs {tool}").format(tool=tr(tool))
    if not machine.gpus:
        return tr("the C++ extension's CPU version, built at first use")
    if tool:
        return tr("runs with DEVICE=cpu alone: its CUDA kernels do not build (no nvcc)")
    if machine.can(BULK_COPY):
        return tr("C++ and CUDA kernels, built at first use")
    return tr("C++ and CUDA kernels, built at first use, without `fused` (it needs compute capability 9.0)")


def attention_text(machine: Machine) -> str:
    """Return the attention backend that stage D's `auto` chooses."""
    if machine.triton and machine.can(TRITON):
        return tr("triton (our Triton kernels)")
    if machine.flash_attn and machine.can(FLASH_ATTN):
        return tr("flash (the flash-attn package)")
    return tr("reference (plain PyTorch)")


def sampling_text(machine: Machine) -> str:
    if not machine.gpus or (machine.triton and machine.can(TRITON)):
        return ""
    return tr("; its sampling kernel is not promised to run (Triton supports 8.0 and newer): if it fails, DEVICE=cpu")


def graph_text(machine: Machine) -> str:
    if not machine.gpus:
        return tr("no CUDA graphs (they need a GPU); tensor parallelism over CPU processes")
    if not (machine.triton and machine.can(TRITON)):
        kernels = tr("no CUDA graphs (the reference attention cannot be captured)")
        kernels += tr("; ") + tr("give ARGS='--without fused_layers,skinny_gemm' (Triton's again)")
    elif not (tool := missing_tool(machine)) and machine.can(BULK_COPY) and not machine.can(SMALL_SHARED_MEMORY):
        kernels = tr("CUDA graphs, fused kernels, the persistent megakernel for a few requests")
    else:
        lacks = tr("227 KB of shared memory per block") if machine.can(BULK_COPY) else tr("compute capability 9.0")
        kernels = tr("CUDA graphs, fused kernels; not the persistent megakernel (it needs {lacks})")
        kernels = kernels.format(lacks=tr(tool) if tool else lacks)
    ranks, count = "; tensor parallelism over up to {count} GPU", len(machine.gpus)
    return kernels + counted(ranks, f"{ranks}s", count).format(count=count)


def advice(machine: Machine) -> list[str]:
    """Return what to install for more features."""
    rules: list[tuple[Callable[[Machine], bool], str]] = [
        (lambda m: not m.torch, "PyTorch and the stages' other packages: `make stage-a` installs them into .venv"),
        (lambda m: not m.tutor, "the default model: `python models/tutor/train.py` (some minutes)"),
        (lambda m: not m.compiler, "a C++ compiler for stage C and torch.compile: `apt install g++` or Xcode's tools"),
        (lambda m: not m.ninja, "ninja, which builds stage C's extension: `pip install ninja`"),
        (
            lambda m: m.driver is not None and not m.gpus,
            "a PyTorch built for CUDA (see pytorch.org): there is an NVIDIA driver, but this PyTorch sees no GPU",
        ),
        (
            lambda m: bool(m.gpus) and not has_kernels(m),
            "a PyTorch built for this GPU (see pytorch.org, older CUDA versions): this one has no kernels for it",
        ),
        (
            lambda m: bool(m.gpus) and not m.nvcc,
            "the CUDA toolkit {cuda} (nvcc) for stage C's and F's CUDA kernels",
        ),
        (lambda m: m.can(TRITON) and not m.triton, "Triton for the paged attention kernels: `pip install triton`"),
        (
            lambda m: platform.system() == "Linux" and bool(m.torch) and not m.gpus and not m.triton,
            "Triton, whose interpreter runs kernels on a CPU, for labs and programs: `make loops` installs it",
        ),
        (
            lambda m: m.can(FLASH_ATTN) and not m.flash_attn,
            "flash-attn, a second attention backend for GPUs: `pip install flash-attn --no-build-isolation`",
        ),
    ]
    return [tr(text).format(cuda=machine.cuda) for applies, text in rules if applies(machine)]


def main(argv: list[str] | None = None) -> int:
    """Print the report. Always succeeds, because a missing package is a finding, not an error."""
    argparse.ArgumentParser(prog="make doctor", description=(__doc__ or "").partition("\n")[0]).parse_args(argv)
    machine = look()
    missing = [name for name in NEEDED if not package_version(name)]
    if missing:
        said = tr("Missing: {packages}. Nothing runs with {python} before `make stage-a` installs them.")
        print(said.format(packages=", ".join(missing), python=sys.executable))
    titles = tr("This machine:"), tr("What each stage will use:")
    for title, lines in zip(titles, (machine_lines(machine), stage_lines(machine)), strict=True):
        print(title)
        print("\n".join(f"  {padded(name, 20)} {text}" for name, text in lines))
    print(tr("To install for more:"))
    print("\n".join(f"  - {text}" for text in advice(machine)) or "  " + tr("nothing"), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
