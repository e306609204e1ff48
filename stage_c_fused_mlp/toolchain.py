"""What this machine can compile: a C++ compiler, ninja, nvcc, and the GPUs to compile for.

The functions only look and compile nothing. Messages say in one line what is missing and how to get it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

STILL_WORKS = "Only stage C needs an extension."


class ExtensionError(OSError):
    """The extension cannot be built or has no CUDA part; the message says what is missing and what works without it."""


def why_no_compiler() -> str:
    """Return why there is no C++ compiler and how to get one; empty if there is one that starts."""
    named = os.environ.get("CXX", "")
    if not named and shutil.which("c++") is None:
        return "there is no c++ here; install one, for example with `apt-get install build-essential`"
    try:
        subprocess.run([named or "c++", "--version"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        what = f"CXX={named!r}" if named else "c++"
        return f"{what} does not start ({error}); set CXX to a compiler, a single program such as g++"
    return ""


def path_with_ninja() -> str:
    """Return PATH plus this Python's scripts folder, where `pip install ninja` puts it even if it is not active."""
    paths = os.environ.get("PATH", "").split(os.pathsep)
    scripts = str(Path(sys.executable).parent)
    return os.pathsep.join(paths if scripts in paths else [*paths, scripts])


def why_no_cuda() -> str:
    """Return why CUDA sources cannot be compiled and what to do; empty if they can."""
    from torch.utils.cpp_extension import CUDA_HOME  # slow to import, and looks for the toolkit

    if torch.version.cuda is None:
        return "this PyTorch is a build for the CPU; install one with CUDA"
    if CUDA_HOME is None or not (Path(CUDA_HOME) / "bin" / "nvcc").exists():
        return f"nvcc was not found; install the CUDA toolkit {torch.version.cuda} and set CUDA_HOME to its folder"
    if not torch.cuda.is_available() and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return 'there is no NVIDIA GPU; to build for another machine set TORCH_CUDA_ARCH_LIST, for example to "9.0"'
    return ""


def architectures_here() -> tuple[str, ...]:
    """Return the architectures in TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX"), or else of this machine's GPUs."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if listed:
        return tuple(listed.replace(";", " ").split())
    found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return tuple(f"{major}.{minor}" for major, minor in sorted(found))


def _parse(architecture: str) -> re.Match[str]:
    match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", architecture)
    if match is None:
        raise ExtensionError(f'TORCH_CUDA_ARCH_LIST has {architecture!r}; expected entries like "9.0" or "9.0+PTX"')
    return match


def capability_of(architecture: str) -> tuple[int, int]:
    """Return the numbers of an architecture: `(9, 0)` for `9.0`, `9.0a` or `9.0+PTX`."""
    major, minor = _parse(architecture).group(1, 2)
    return int(major), int(minor)


def gencode(architectures: tuple[str, ...]) -> list[str]:
    """Return nvcc's options for a list of compute capabilities such as `9.0`, `9.0a` and `9.0+PTX`."""
    flags = []
    for architecture in architectures:
        match = _parse(architecture)
        number = "".join(match.group(1, 2, 3))
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match.group(4):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags
