"""The learner's C++ and CUDA, compiled for this machine's CPU and called from tests.

As with Python, an exercise is judged by itself: in a copy of the learner's sources, the bodies of the other exercises
are the reference's. CUDA sources are compiled as C++ against `cpp/include/cuda_on_cpu.h`, which runs each thread of
a block as a fiber; of their text only two things have to change, the launch syntax and `extern __shared__`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from labs import bodies
from labs.exercises import LABS, ROOT, all_exercises

NATIVE = LABS / "cpp"
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class NativeError(RuntimeError):
    """The code did not compile, or failed when it ran."""


def learners_sources() -> Path:
    """The `csrc/` that belongs to the stage C on Python's path."""
    import stage_c_fused_mlp.extension as extension

    return extension.CSRC


def cpu_library(judged: str) -> ctypes.CDLL:
    """The operator of `mlp_cpu.cpp`, compiled against PyTorch."""
    torch_path = Path(torch.__path__[0])
    flags = [f"-I{torch_path / 'include'}", f"-L{torch_path / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    return _library("cpu_harness.cpp", ["stage_c/mlp_cpu.cpp", "stage_c/mlp_cpu.h"], judged, flags)


def cuda_library(judged: str) -> ctypes.CDLL:
    """The naive, the warp and the LayerNorm kernel, compiled for the CPU."""
    sources = ["mlp_naive.cu", "mlp_warp.cu", "layernorm_mlp.cu", "mlp.h", "layernorm_mlp.h", "rms_norm.cuh"]
    files = [*(f"stage_c/{source}" for source in sources), "common/vectors.cuh"]
    return _library("cuda_harness.cpp", files, judged, [f"-I{NATIVE / 'include'}"])


def launches_for_cpu(text: str) -> str:
    """`kernel<T><<<grid, block, shared, stream>>>(a, b);` as a call, and dynamic shared memory as an array."""
    text = text.replace("extern __shared__", "extern")
    launch = re.compile(r"(\w+(?:<[^<>;]*>)?)<<<(.*?)>>>\(([^;]*)\);", flags=re.DOTALL)
    return launch.sub(r"cuda_on_cpu::launch([&] { \1(\3); }, \2);", text)


def _library(harness: str, files: list[str], judged: str, flags: list[str]) -> ctypes.CDLL:
    texts = {name: _judged_text(name, judged) for name in files}
    command = [_compiler(), "-std=c++20", "-O1", "-w", "-fPIC", "-shared", str(NATIVE / harness)]
    digest = hashlib.sha256(repr((torch.__version__, command, flags, texts)).encode())
    for path in [NATIVE / harness, *sorted((NATIVE / "include").iterdir())]:
        digest.update(path.read_bytes())
    # Beside the extensions; SIX_ENGINES_BUILD moves both.
    folder = Path(os.environ.get("SIX_ENGINES_BUILD", ROOT / "build" / "extensions")) / f"lab-{digest.hexdigest()[:16]}"
    library = folder.resolve() / "judged.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(launches_for_cpu(text) if name.endswith(".cu") else text)
        # -I before the learner's other headers: the judged texts first.
        unfinished = folder / f"judged-{os.getpid()}.so"
        run = subprocess.run(
            [*command, f"-I{folder}", f"-I{learners_sources()}", *flags, "-o", str(unfinished)],
            capture_output=True, text=True,
        )  # fmt: skip
        if run.returncode:
            errors = [line for line in run.stderr.splitlines() if "error" in line] or [run.stderr[-300:]]
            raise NativeError(errors[0].replace(f"{folder}/", "csrc/"))
        unfinished.rename(library)
    loaded = ctypes.CDLL(str(library))
    for name in ("lab_warp_sum", "lab_mlp", "lab_layernorm_mlp", "lab_normalise", "lab_mlp_cpu"):
        if hasattr(loaded, name):
            getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


def _judged_text(name: str, judged: str) -> str:
    text = (learners_sources() / name).read_text(encoding="utf-8")
    for exercise in all_exercises():
        if exercise.path == f"csrc/{name}" and exercise.id != judged:
            donor = exercise.reference.read_text(encoding="utf-8")
            text = bodies.transplant(text, donor, exercise.name, exercise.path)
    return text


def _compiler() -> str:
    from stage_c_fused_mlp.extension import why_no_compiler

    why = why_no_compiler()
    if why:
        pytest.skip(f"no C++ compiler: {why}")
    return os.environ.get("CXX") or "c++"


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def check(error: bytes | None) -> None:
    """Raise what a function of the library reported."""
    if error is not None:
        message = error.decode()
        raise NotImplementedError(message) if message.startswith("Lab ") else NativeError(message)
