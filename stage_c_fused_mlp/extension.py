"""Builds the C++ and CUDA sources of `csrc/` into libraries of PyTorch operators, once.

A compiled extension depends on its source, on PyTorch's version, on the CUDA toolkit, and on the target GPU. A hash of
all these is the key that names the library's folder. So an edit, an upgrade or another GPU causes a new build;
otherwise the existing library is used. Without `nvcc` or a GPU, only the C++ part is built: the operators then run on
the CPU, and a call with CUDA tensors says what is missing.

`python -m stage_c_fused_mlp.extension` (`make ext`) only builds.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from stage_a_naive.entrypoints.interrupts import run_command
from stage_c_fused_mlp.toolchain import (
    STILL_WORKS,
    ExtensionError,
    architectures_here,
    capability_of,
    gencode,
    path_with_ninja,
    why_no_compiler,
    why_no_cuda,
)

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

# Extension -> its sources in csrc/; those that end in .cu are compiled if there is nvcc and a GPU.
SOURCES: dict[str, tuple[str, ...]] = {
    "fused_mlp": (
        "stage_c/operators.cpp",
        "stage_c/mlp_cpu.cpp",
        "stage_c/layernorm_mlp.cpp",
        "stage_c/mlp_naive.cu",
        "stage_c/mlp_warp.cu",
        "stage_c/mlp_fused.cu",
        "stage_c/layernorm_mlp.cu",
    ),
    "megakernel": ("stage_f/decode_step.cpp",),
    "megakernel_of_shape": ("stage_f/launch.cu",),
}
# Extensions that are compiled for one model, which the caller describes with `defines`.
PER_MODEL = {"megakernel_of_shape"}
# Extension -> the lowest compute capability that its CUDA part can be compiled for.
LOWEST_CAPABILITY: dict[str, tuple[int, int]] = {"megakernel": (9, 0), "megakernel_of_shape": (9, 0)}


@dataclass(frozen=True)
class Extension:
    """An extension that is built or to be built.

    Attributes:
        name: a key of `SOURCES`.
        architectures: compute capabilities, such as `("9.0",)`; empty for a build without CUDA.
        why_no_cuda: the reason for a build without CUDA, and the remedy; empty with CUDA.
        defines: macros for the CUDA compiler, such as `"SIX_HIDDEN=896"`; each set of macros gives a separate library.
    """

    name: str
    architectures: tuple[str, ...]
    why_no_cuda: str
    defines: tuple[str, ...] = ()

    @property
    def cuda(self) -> bool:
        return bool(self.architectures)

    @property
    def sources(self) -> list[Path]:
        return [CSRC / source for source in SOURCES[self.name] if self.cuda or not source.endswith(".cu")]

    @property
    def macros(self) -> list[str]:
        return [f"-D{define}" for define in self.defines]

    @property
    def key(self) -> str:
        """Hash of everything that the library depends on."""
        digest = hashlib.sha256()
        parts = (torch.__version__, torch.version.cuda, self.architectures, sys.version_info[:2], platform.machine())
        digest.update(repr(parts + (self.defines,)).encode())
        for path in _with_headers(self.sources):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()[:16]

    @property
    def library(self) -> Path:
        root = Path(os.environ.get("SIX_ENGINES_BUILD", ROOT / "build" / "extensions"))
        return root.resolve() / f"{self.name}-{self.key}" / f"{self.name}.so"

    def require_cuda(self) -> None:
        """Raise an `ExtensionError` if the library has no CUDA part."""
        if not self.cuda:
            raise ExtensionError(f"the extension {self.name} has no CUDA part here: {self.why_no_cuda}. {STILL_WORKS}")


def _with_headers(sources: list[Path]) -> list[Path]:
    """Return the sources and every file of csrc/ that they include."""
    found: dict[Path, None] = {}
    todo = list(sources)
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found[path] = None
        includes = re.findall(r'^\s*#include "([^"]+)"', path.read_text(), flags=re.MULTILINE)
        todo += [CSRC / name for name in includes if (CSRC / name).exists()]
    return sorted(found)


def plan(name: str = "fused_mlp", defines: tuple[str, ...] = ()) -> Extension:
    """Determine what can be built on this machine.

    Raises:
        ExtensionError: there is no such extension, or no C++ compiler or ninja.
    """
    if name not in SOURCES:
        raise ExtensionError(f"there is no extension {name!r}; there are: {', '.join(SOURCES)}")
    if not CSRC.is_dir():
        raise ExtensionError(f"there is no {CSRC}: building {name} needs a clone of the repository. {STILL_WORKS}")
    why = why_no_compiler()
    if why:
        raise ExtensionError(f"building {name} needs a C++ compiler; {why}. {STILL_WORKS}")
    os.environ["PATH"] = path_with_ninja()
    if shutil.which("ninja") is None:
        raise ExtensionError(f"building {name} needs ninja: `pip install ninja`. {STILL_WORKS}")
    why = why_no_cuda()
    if why:
        return Extension(name, (), why, defines)
    lowest, listed = LOWEST_CAPABILITY.get(name, (0, 0)), architectures_here()
    able = tuple(architecture for architecture in listed if capability_of(architecture) >= lowest)
    if not able:
        why = f"it needs compute capability {lowest[0]}.{lowest[1]} or newer, and this machine has {', '.join(listed)}"
    return Extension(name, able, why, defines)


@functools.cache
def load_extension(name: str = "fused_mlp", *, defines: tuple[str, ...] = (), verbose: bool = False) -> Extension:
    """Load the operators of an extension; build them first if needed, once per machine, in seconds to a minute.

    Args:
        name: a key of `SOURCES`.
        defines: macros for the CUDA compiler.
        verbose: show the compilers' output.

    Raises:
        ExtensionError: something that the build needs is missing, or the compiler found an error.
    """
    extension = plan(name, defines)
    if extension.library.exists():
        torch.ops.load_library(str(extension.library))
        return extension
    try:
        extension.library.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        advice = "set SIX_ENGINES_BUILD to a folder that can be"
        raise ExtensionError(f"{error.filename} cannot be written ({error.strerror}): {advice}") from None
    with _locked(extension.library.parent / "lock"):
        if extension.library.exists():  # another process built it while this one waited
            torch.ops.load_library(str(extension.library))
        else:
            _build(extension, verbose)
    return extension


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock for one process at a time. The system frees the lock of a process that dies, so none can stay."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("the extension is being built already; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(extension: Extension, verbose: bool) -> None:
    """Compile in a temporary folder, then move the finished library into place: a failed build leaves nothing."""
    from torch.utils.cpp_extension import load

    parts = f"C++ and CUDA for {', '.join(extension.architectures)}" if extension.cuda else "C++ only"
    _say(f"building the extension {extension.name} ({parts}), once, into {extension.library.parent}")
    if not extension.cuda:
        _say(f"its CUDA kernels are left out, which is fine without a GPU: {extension.why_no_cuda}")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=extension.library.parent, prefix="building-") as folder:
        try:
            load(
                name=f"six_engines_{extension.name}",
                sources=[str(source) for source in extension.sources],
                extra_include_paths=[str(CSRC)],
                extra_cflags=["-O3", *(["-DSIX_ENGINES_CUDA"] if extension.cuda else [])],
                extra_cuda_cflags=["-O3", *gencode(extension.architectures), *extension.macros],
                build_directory=folder,
                with_cuda=extension.cuda,
                is_python_module=False,
                verbose=verbose,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise ExtensionError(_readable(extension, str(error))) from error
        (built,) = Path(folder).glob("*.so")
        os.replace(built, extension.library)
    _say(f"built in {time.perf_counter() - start:.0f} s")


def _readable(extension: Extension, output: str) -> str:
    """Return the compiler's first error, or its last line if no line says error; write its whole output to a file."""
    log = extension.library.with_suffix(".log")
    log.write_text(output)
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["the compiler said nothing"]
    first = next((line for line in lines if re.search(r"\b(fatal error|error)\b[ :]", line)), lines[-1])
    return f"building {extension.name} failed: {first} (everything that was said is in {log}). {STILL_WORKS}"


def _say(text: str) -> None:
    print(f"[extension] {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Build all extensions, or the named ones, and print their paths."""
    names = [name for name in SOURCES if name not in PER_MODEL]
    parser = argparse.ArgumentParser(prog="python -m stage_c_fused_mlp.extension", description="Build the extension.")
    parser.add_argument("name", nargs="*", default=names, help=f"of: {', '.join(names)} (default: all)")
    parser.add_argument("--verbose", action="store_true", help="show the compilers' output")
    args = parser.parse_args()
    try:
        for name in args.name:
            extension = load_extension(name, verbose=args.verbose)
            _say(f"{name}: {extension.library}" + ("" if extension.cuda else f" (CPU only: {extension.why_no_cuda})"))
    except ExtensionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
