"""The smallest persistent kernel: `csrc/stage_f/mini.cu`, in three versions. Blocks wait for values, not for blocks.

It computes the MLPs of all layers in one launch. A layer is two products, and each needs the results of all blocks from
the product before. Version 1 has a grid barrier before each product. In versions 2 and 3 every value travels with a
flag instead, and version 3 loads weights while it waits.

`python -m stage_f_graph_tp.megakernel.mini` compiles and runs the versions on the emulator (`csrc/emulator`), and with
nvcc on a GPU of compute capability 9.0, where it also prints the time per layer. Each version compares its row with
plain C++.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

from stage_c_fused_mlp.extension import CSRC, ROOT, plan
from stage_c_fused_mlp.toolchain import gencode

SOURCE = CSRC / "stage_f" / "mini.cu"


def emulator() -> list[str]:
    """Return the C++ compiler command, with the emulator's headers before those of the CUDA toolkit and this course."""
    flags = ["-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", f"-I{CSRC / 'emulator'}", "-x", "c++"]
    return [os.environ.get("CXX") or "c++", *flags]


def nvcc(architectures: tuple[str, ...]) -> list[str]:
    """Return the CUDA compiler command for these compute capabilities."""
    from torch.utils.cpp_extension import CUDA_HOME  # slow to import

    return [str(Path(CUDA_HOME or "/usr/local/cuda", "bin", "nvcc")), "-std=c++17", "-O3", *gencode(architectures)]


def build(version: int, compiler: list[str], source: Path = SOURCE) -> Path:
    """Compile a version of the source, once; returns the program's path."""
    command = [*compiler, f"-DVERSION={version}", f"-I{CSRC}", str(source), "-o"]
    digest = hashlib.sha256(repr(command).encode())
    for path in [source, *sorted(CSRC.rglob("*.*"))]:
        digest.update(path.read_bytes())
    folder = Path(os.environ.get("SIX_ENGINES_BUILD", ROOT / "build" / "extensions"))
    program = folder.resolve() / f"mini-{digest.hexdigest()[:16]}" / "mini"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=program.parent) as own:  # another process may compile the same
            unfinished = Path(own, program.name)
            subprocess.run([*command, str(unfinished)], check=True)
            unfinished.rename(program)
    return program


def run(version: int, compiler: list[str]) -> str:
    """Run a version and return its output; raises if its row differs from plain C++'s."""
    return subprocess.run([build(version, compiler)], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def barriers_of_version_1() -> int:
    """Return the grid barriers per layer if blocks wait for each other."""
    return _barriers(1)


def barriers_of_version_3() -> int:
    """Return the grid barriers per layer if blocks wait for values."""
    return _barriers(3)


def _barriers(version: int) -> int:
    found = re.search(r"per layer (\d+) barriers", run(version, emulator()))
    assert found is not None
    return int(found[1])


def main() -> None:
    """Compile and run all versions."""
    extension = plan("megakernel")
    print("a small model on the emulator:")
    for version in (1, 2, 3):
        print(f"  {run(version, emulator())}")
    if extension.cuda:
        print("Qwen2.5-0.5B's MLPs on this GPU:")
        for version in (1, 2, 3):
            print(f"  {run(version, nvcc(extension.architectures))}")
    else:
        print(f"no times: {extension.why_no_cuda}")
    before, after = barriers_of_version_1(), barriers_of_version_3()
    print(f"barriers of the whole grid per layer: {before} → {after} [H200: 13.3 → 9.7 µs per layer]")


if __name__ == "__main__":
    main()
