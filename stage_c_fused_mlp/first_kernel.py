"""A first kernel: the product of a matrix and a vector, from a Python loop to CUDA.

`plain` is the usual loop. The next two functions are kernels as a GPU runs them, in Python: each describes one thread,
and `launch` calls it for all threads. `csrc/stage_c/first_kernel.cu` has the same in CUDA; the emulator
(`csrc/emulator/gpu.h`) runs it on a CPU. `python -m stage_c_fused_mlp.first_kernel` runs everything; with the name of
another program in `csrc/stage_c`, it runs that one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from stage_c_fused_mlp.extension import CSRC

ROWS, COLUMNS, THREADS = 10, 1000, 64


def plain(w: list[list[float]], x: list[float], y: list[float]) -> None:
    """Compute `y = W x` with one thread: `w` is `[rows, columns]`."""
    for row in range(len(w)):
        total = 0.0
        for k in range(len(x)):
            total += w[row][k] * x[k]
        y[row] = total


def launch(kernel: Callable[..., Iterator[None] | None], blocks: int, threads: int, *arguments: object) -> None:
    """Call a kernel for every thread of every block; all threads of a block reach a `yield` before one goes on."""
    for block in range(blocks):
        shared = [0.0] * threads  # the block's memory; on a GPU it holds old values
        started = [kernel(block, thread, threads, shared, *arguments) for thread in range(threads)]
        running = [thread for thread in started if thread is not None]  # without a `yield` it has ended already
        while running:
            running = [thread for thread in running if next(thread, "ended") != "ended"]


def thread_per_row(block: int, thread: int, threads: int, shared: list, w: list, x: list, y: list) -> None:
    """Compute one row with one thread."""
    row = block * threads + thread
    if row < len(w):  # there are more threads than rows
        total = 0.0
        for k in range(len(x)):
            total += w[row][k] * x[k]
        y[row] = total


def block_per_row(block: int, thread: int, threads: int, shared: list, w: list, x: list, y: list) -> Iterator[None]:
    """Compute a part of row `block`; thread 0 adds up the parts."""
    total = 0.0
    for k in range(thread, len(x), threads):
        total += w[block][k] * x[k]
    shared[thread] = total
    yield  # CUDA's __syncthreads(): all threads have stored their parts
    if thread == 0:
        y[block] = sum(shared)


def sectors(addresses: list[int]) -> int:
    """Count the sectors, 32 neighbouring bytes each, that hold these addresses."""
    return len({address // 32 for address in addresses})


def run_cuda(source: Path) -> str:
    """Compile a CUDA program for the emulator, run it, and return its output, with its error if it fails."""
    text = source.read_text(encoding="utf-8")
    # A C++ compiler cannot read `kernel<<<blocks, threads>>>(arguments);`, so it becomes a call.
    text = re.sub(r"(\w+)<<<(.*?)>>>\((.*?)\);", r"gpu::launch([&] { \1(\3); }, \2);", text)
    flags = ["-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", f"-I{CSRC / 'emulator'}", f"-I{CSRC}", "-x", "c++"]
    with tempfile.TemporaryDirectory() as folder:
        (changed := Path(folder, source.name)).write_text(text, encoding="utf-8")
        program = str(Path(folder, "program"))
        subprocess.run([os.environ.get("CXX") or "c++", *flags, str(changed), "-o", program], check=True)
        done = subprocess.run([program], capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip()


def main() -> None:
    if len(sys.argv) > 1:
        print(run_cuda(CSRC / "stage_c" / f"{sys.argv[1]}.cu"))
        return
    w = [[float((row * COLUMNS + k) % 7 - 3) for k in range(COLUMNS)] for row in range(ROWS)]
    x = [float(k % 5 - 2) for k in range(COLUMNS)]
    expected, y, z = [0.0] * ROWS, [0.0] * ROWS, [0.0] * ROWS
    plain(w, x, expected)
    launch(thread_per_row, -(-ROWS // THREADS), THREADS, w, x, y)
    launch(block_per_row, ROWS, THREADS, w, x, z)
    assert y == z == expected
    print(f"in Python: {ROWS} rows by a plain loop, by a thread per row and by a block per row are equal")
    print(run_cuda(CSRC / "stage_c" / "first_kernel.cu"))
    a_row_apart = sectors([4 * COLUMNS * lane for lane in range(32)])  # float32: lane i reads W[i][0]
    side_by_side = sectors([4 * lane for lane in range(32)])  # lane i reads W[0][i]
    print(f"sectors of one load by 32 lanes: {a_row_apart} with a thread per row, {side_by_side} with a warp per row")


if __name__ == "__main__":
    main()
