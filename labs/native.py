"""The learner's C++ and CUDA, compiled for this machine's CPU and called from tests.

As with Python, an exercise is judged by itself: in a copy of the reference's sources, its body is the learner's, with
`#line` before and after it, so that errors name the learner's file. CUDA sources are compiled as C++ against
`csrc/emulator`, which runs each thread of a block as a fiber; of their text only two things have to change, the launch
syntax and `extern __shared__`.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from labs import bodies
from labs.exercises import LABS, ROOT
from labs.submission import Answer

NATIVE = LABS / "cpp"
CSRC = ROOT / "csrc"
EMULATOR = CSRC / "emulator"
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class NativeError(RuntimeError):
    """The code did not compile, or failed when it ran."""


_answers: list[Answer] = []  # the learner's functions that this process judges


def use(answer: Answer, whole: bool) -> None:
    """Compile with this body from now on; for the whole stage, stage C's extension as well."""
    _answers.append(answer)
    if not whole:
        return
    from stage_c_fused_mlp import extension

    path = answer.exercise.path.removeprefix("csrc/")
    sources = Path(tempfile.mkdtemp(prefix="six-engines-csrc-"))
    shutil.copytree(extension.CSRC, sources, dirs_exist_ok=True)
    text = (sources / path).read_text(encoding="utf-8")
    span = bodies.find(text, answer.exercise.name, path)
    (sources / path).write_text(text[: span.body_start] + answer.body + text[span.body_end :], encoding="utf-8")
    extension.CSRC = sources


def _with_answers(path: str, text: str) -> str:
    """The reference's text of a file in csrc/ with the learner's bodies in it."""
    for answer in _answers:
        if answer.exercise.path == f"csrc/{path}":
            span = bodies.find(text, answer.exercise.name, path)
            after = text.count("\n", 0, span.body_end) + 1
            body = f'\n#line {answer.body_line} "csrc/{path}"\n{answer.body}\n#line {after} "given/{path}"\n'
            text = text[: span.body_start] + body + text[span.body_end :]
    return text


def cpu_library() -> ctypes.CDLL:
    """The operator of `mlp_cpu.cpp`, compiled against PyTorch."""
    torch_path = Path(torch.__path__[0])
    flags = [f"-I{torch_path / 'include'}", f"-L{torch_path / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    return _library("cpu_harness.cpp", ["stage_c/mlp_cpu.cpp", "stage_c/mlp_cpu.h"], flags)


def cuda_library() -> ctypes.CDLL:
    """The naive, the warp and the LayerNorm kernel, compiled for the CPU."""
    sources = ["mlp_naive.cu", "mlp_warp.cu", "layernorm_mlp.cu", "mlp.h", "layernorm_mlp.h", "rms_norm.cuh"]
    files = [*(f"stage_c/{source}" for source in sources), "common/vectors.cuh"]
    return _library("cuda_harness.cpp", files, [f"-I{EMULATOR}", "-U_FORTIFY_SOURCE"])


def run_mini(version: int) -> str:
    """Compile a version of the smallest megakernel for the CPU and run it; returns what it says.

    Raises:
        NativeError: it does not compile, its row is not that of plain C++, or it does not end.
    """
    mini = importlib.import_module("stage_f_graph_tp.megakernel.mini")  # by name: editions for lab C lack stage F
    _compiler()
    text = _with_answers("stage_f/mini.cu", mini.SOURCE.read_text(encoding="utf-8"))
    source = _build_folder(f"mini-{hashlib.sha256(text.encode()).hexdigest()[:16]}") / "mini.cu"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(text)
    try:
        program = mini.build(version, mini.emulator(), source)
        run = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.CalledProcessError:
        raise NativeError("it does not compile") from None
    except subprocess.TimeoutExpired:
        raise NativeError("it does not end: somebody waits for what never comes") from None
    said = (run.stdout + run.stderr).strip().splitlines() or ["it crashed"]
    if run.returncode:
        raise NativeError(said[-1])
    return said[-1]


def launches_for_cpu(text: str) -> str:
    """`kernel<T><<<grid, block, shared, stream>>>(a, b);` as a call, and dynamic shared memory as an array."""
    text = text.replace("extern __shared__", "extern")
    launch = re.compile(r"(\w+(?:<[^<>;]*>)?)<<<(.*?)>>>\(([^;]*)\);", flags=re.DOTALL)
    return launch.sub(r"gpu::launch([&] { \1(\3); }, \2);", text)


def _library(harness: str, files: list[str], flags: list[str]) -> ctypes.CDLL:
    texts = {name: _with_answers(name, (CSRC / name).read_text(encoding="utf-8")) for name in files}
    command = [_compiler(), "-std=c++20", "-O1", "-g1", "-w", "-fPIC", "-shared", str(NATIVE / harness)]
    digest = hashlib.sha256(repr((torch.__version__, command, flags, texts)).encode())
    for path in sorted({*NATIVE.iterdir(), *EMULATOR.glob("*.h")}):
        digest.update(path.read_bytes())
    folder = _build_folder(digest.hexdigest()[:16])
    library = folder / "judged.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as sources:  # one's own: others may compile the same at this time
            for name, text in texts.items():
                file = Path(sources, name)
                file.parent.mkdir(exist_ok=True)
                file.write_text(launches_for_cpu(text) if name.endswith(".cu") else text)
            # -I before the learner's other headers: the judged texts first.
            unfinished = Path(sources, library.name)
            run = subprocess.run(
                [*command, f"-I{sources}", f"-I{CSRC}", *flags, "-o", str(unfinished)],
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
    """A folder beside the extensions; SIX_ENGINES_BUILD moves both."""
    return Path(os.environ.get("SIX_ENGINES_BUILD", ROOT / "build" / "extensions")).resolve() / f"lab-{name}"


def crash_line(log: list[str]) -> str:
    """Of the addresses that a crash printed (`crash_line.h`), the first that is in csrc/, as `file:line`; else ""."""
    for line in log:
        if line.startswith("crash at "):
            *_, library, offset = line.split()
            command = ["addr2line", "-i", "-e", library, offset]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            places = [place for place in run.stdout.splitlines() if "csrc/" in place]
            if places:
                return "csrc/" + places[0].rpartition("csrc/")[2].split(" ")[0]
    return ""


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
