"""Blocks that wait for values, not for each other: the smallest persistent kernel, `csrc/stage_f/mini.cu`, three times.

It computes the MLPs of all layers in one launch. A layer is two products, and each needs what all blocks have made in
the one before. Version 1 has a barrier over the grid before each product. In versions 2 and 3 every value travels with
a flag instead, and version 3 loads weights while it waits.

`python -m stage_f_graph_tp.megakernel.mini` compiles and runs the versions on the emulator (`csrc/emulator`), and with
nvcc and a GPU of compute capability 9.0 there too, with the time per layer. Each compares its row with plain C++.
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
    """Return the C++ compiler, with the emulator's headers before the CUDA toolkit's and this course's."""
    flags = ["-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", f"-I{CSRC / 'emulator'}", "-x", "c++"]
    return [os.environ.get("CXX") or "c++", *flags]


def nvcc(architectures: tuple[str, ...]) -> list[str]:
    """Return the CUDA compiler, for these compute capabilities."""
    from torch.utils.cpp_extension import CUDA_HOME  # slow to import

    return [str(Path(CUDA_HOME or "/usr/local/cuda", "bin", "nvcc")), "-std=c++17", "-O3", *gencode(architectures)]


def build(version: int, compiler: list[str], source: Path = SOURCE) -> Path:
    """Compile a version of the source, once; returns the program."""
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
    """Run a version, and return what it says of itself; it fails where its row is not that of plain C++."""
    return subprocess.run([build(version, compiler)], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def barriers_of_version_1() -> int:
    """Barriers of the grid per layer where blocks wait for each other."""
    return _barriers(1)


def barriers_of_version_3() -> int:
    """Barriers of the grid per layer where blocks wait for values."""
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
