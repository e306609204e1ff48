"""Compile the learner's C++ and CUDA for this machine's CPU, and call them from tests.

CUDA sources are compiled as C++ against `csrc/emulator`, which runs each thread of a block as a fiber; only two things
in their text have to change, the launch syntax and `extern __shared__`.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import re
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from labs.driving import Skip

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "labs" / "cpp"
CSRC = ROOT / "csrc"
EMULATOR = CSRC / "emulator"
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

# Changes in mini.cu: its random numbers have a seed, and it prints its rows.
MINI = [
    ("uint32_t state = 1;", 'uint32_t state = std::strtoul(std::getenv("MINI_SEED"), nullptr, 10);'),
    (
        "    const std::vector<double> expected =",
        '    for (float v : y) std::printf("%.6g\\n", v);\n    const std::vector<double> expected =',
    ),
]


class NativeError(RuntimeError):
    """The code did not compile, or failed when it ran."""


def cpu_library() -> ctypes.CDLL:
    """Compile the operator of `mlp_cpu.cpp` with PyTorch."""
    torch_path = Path(torch.__path__[0])
    flags = [f"-I{torch_path / 'include'}", f"-L{torch_path / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    return _library("cpu_harness.cpp", ["stage_c/mlp_cpu.cpp", "stage_c/mlp_cpu.h"], flags)


def cuda_library() -> ctypes.CDLL:
    """Compile the naive, the warp and the LayerNorm kernel for the CPU."""
    sources = ["mlp_naive.cu", "mlp_warp.cu", "layernorm_mlp.cu", "mlp.h", "layernorm_mlp.h", "rms_norm.cuh"]
    files = [*(f"stage_c/{source}" for source in sources), "common/vectors.cuh"]
    return _library("cuda_harness.cpp", files, [f"-I{EMULATOR}", "-U_FORTIFY_SOURCE"])


def run_mini(version: int, seed: int) -> tuple[list[float], int]:
    """Compile a version of the smallest megakernel for the CPU and run it on random numbers.

    Returns:
        The rows of its two launches, and the number of grid barriers per layer.

    Raises:
        NativeError: it does not compile, its row differs from plain C++'s, or it does not end.
    """
    mini = importlib.import_module("stage_f_graph_tp.megakernel.mini")  # by name: editions for lab C lack stage F
    _compiler()
    text = mini.SOURCE.read_text(encoding="utf-8")
    for find, put in MINI:
        text = text.replace(find, put)
    source = _build_folder(f"mini-{hashlib.sha256(text.encode()).hexdigest()[:16]}") / "mini.cu"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(text)
    try:
        program = mini.build(version, mini.emulator(), source)
        environment = os.environ | {"MINI_SEED": str(seed)}
        run = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False, env=environment)
    except subprocess.CalledProcessError:
        raise NativeError("it does not compile") from None
    except subprocess.TimeoutExpired:
        raise NativeError("it does not end: somebody waits for what never comes") from None
    said = (run.stdout + run.stderr).strip().splitlines() or ["it crashed"]
    barriers = re.search(r"per layer (\d+) barriers", said[-1])
    if run.returncode or barriers is None:
        raise NativeError(said[-1])
    return [float(word) for line in said[:-1] for word in line.split()], int(barriers[1])


def launches_for_cpu(text: str) -> str:
    """Rewrite `kernel<T><<<grid, block, shared, stream>>>(a, b);` as a call, and dynamic shared memory as an array."""
    text = text.replace("extern __shared__", "extern")
    launch = re.compile(r"(\w+(?:<[^<>;]*>)?)<<<(.*?)>>>\(([^;]*)\);", flags=re.DOTALL)
    return launch.sub(r"gpu::launch([&] { \1(\3); }, \2);", text)


def _library(harness: str, files: list[str], flags: list[str]) -> ctypes.CDLL:
    judged = _extension().CSRC  # the learner's copy if it comes first
    texts = {name: (judged / name).read_text(encoding="utf-8") for name in files}
    command = [_compiler(), "-std=c++20", "-O1", "-g1", "-w", "-fPIC", "-shared"]
    digest = hashlib.sha256(repr((torch.__version__, command, harness, texts)).encode())
    for path in sorted({*NATIVE.iterdir(), *EMULATOR.glob("*.h")}):
        digest.update(path.read_bytes())
    folder = _build_folder(digest.hexdigest()[:16])
    library = folder / "judged.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as sources:  # private: others may compile the same now
            for name, text in texts.items():
                file = Path(sources, name)
                file.parent.mkdir(exist_ok=True)
                file.write_text(launches_for_cpu(text) if name.endswith(".cu") else text)
            # The judged texts come before the learner's other headers.
            unfinished = Path(sources, library.name)
            run = subprocess.run(
                [*command, str(NATIVE / harness), f"-I{sources}", f"-I{CSRC}", *flags, "-o", str(unfinished)],
                capture_output=True,
                text=True,
                check=False,
            )
            if run.returncode:
                errors = [line for line in run.stderr.splitlines() if "error" in line] or [run.stderr[-300:]]
                raise NativeError(errors[0].replace(f"{sources}/", "csrc/"))
            unfinished.rename(library)
    loaded = ctypes.CDLL(str(library))
    for name in ("lab_warp_sum", "lab_mlp", "lab_layernorm_mlp", "lab_normalise", "lab_mlp_cpu"):
        if hasattr(loaded, name):
            getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


def _build_folder(name: str) -> Path:
    """Return a folder next to the extensions; SIX_ENGINES_BUILD moves both."""
    return Path(os.environ.get("SIX_ENGINES_BUILD", ROOT / "build" / "extensions")).resolve() / f"lab-{name}"


def crash_line(log: list[str]) -> str:
    """Return the first address of a crash (`crash_line.h`) in csrc/, as `file:line`; "" if there is none."""
    for line in log:
        if line.startswith("crash at "):
            *_, library, offset = line.split()
            command = ["addr2line", "-i", "-e", library, offset]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            places = [place for place in run.stdout.splitlines() if "csrc/" in place]
            if places:
                return "csrc/" + places[0].rpartition("csrc/")[2].split(" ")[0]
    return ""


def _extension() -> ModuleType:
    """Import stage C's extension by name: editions for labs A and B lack it, and their judge imports this module."""
    return importlib.import_module("stage_c_fused_mlp.extension")


def _compiler() -> str:
    why = _extension().why_no_compiler()
    if why:
        raise Skip(f"no C++ compiler: {why}")
    return os.environ.get("CXX") or "c++"


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def check(error: bytes | None) -> None:
    """Raise the error that a function of the library reported."""
    if error is not None:
        message = error.decode()
        raise NotImplementedError(message) if message.startswith("Lab ") else NativeError(message)
