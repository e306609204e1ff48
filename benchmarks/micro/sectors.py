"""The traffic of a read: bytes from memory and passes through the L1 cache, counted by the GPU (Nsight Compute).

Measured are stage C's three kernels on one row of Qwen2.5-0.5B's MLP, and the reads at growing distances of
`coalescing`. The GPU's counters show what a model of the GPU can only assume: `ncu` runs this module and reads them.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys

import torch

from benchmarks.micro.coalescing import STRIDES
from benchmarks.results import ROOT, ResultsError

NEEDS_GPU = True
HIDDEN, INTERMEDIATE, WANTED = 896, 4864, 2**24
VARIANTS = ("naive", "warp", "fused")
COUNTERS = {
    "memory_bytes": "dram__bytes_read.sum",
    "requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",  # load instructions, of a warp each
    "sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",  # of 32 bytes, that these ask L1 for
    "hits": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum",
    "passes": "l1tex__data_pipe_lsu_wavefronts.sum",  # cycles in which L1 hands out data
    "cycles": "sm__cycles_active.max",  # of the multiprocessor that is busy for longest
}


def measure() -> dict:
    """Return the counters of every kernel; those of two launches are added.

    Raises:
        ResultsError: `ncu` is missing or is not allowed to read the counters.
    """
    if shutil.which("ncu") is None:
        raise ResultsError("sectors needs Nsight Compute: `ncu` was not found")
    metrics = ["--metrics", ",".join(COUNTERS.values()), "--csv", "-k", "regex:(naive|warp|fused|strided_sum)_kernel"]
    command = ["ncu", *metrics, sys.executable, "-m", "benchmarks.micro.sectors"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = {metric: name for name, metric in COUNTERS.items()}
    launches: dict[int, dict] = {}
    for line in csv.DictReader(line for line in found.stdout.splitlines() if line.startswith('"')):
        launch = launches.setdefault(int(line["ID"]), {"kernel": line["Kernel Name"]})
        launch[names[line["Metric Name"]]] = int(line["Metric Value"].replace(",", ""))
    if not launches:
        raise ResultsError(f"ncu counted nothing: {(found.stdout + found.stderr).strip().splitlines()[-1:]}")
    of = {variant: [one for one in launches.values() if f"{variant}_kernel" in one["kernel"]] for variant in VARIANTS}
    reads = [launch for launch in launches.values() if "strided_sum" in launch["kernel"]]
    of |= {f"{4 * stride} bytes": [read] for stride, read in zip(STRIDES, reads, strict=True)}
    rows = [{"kernel": k} | {name: sum(one[name] for one in own) for name in COUNTERS} for k, own in of.items()]
    return {"wanted_bytes": 4 * WANTED, "weight_bytes": 2 * 3 * HIDDEN * INTERMEDIATE, "rows": rows}


def main() -> None:
    """Launch every kernel once."""
    from benchmarks.micro._kernels import strided_sums  # Triton, which not every system has
    from stage_c_fused_mlp.fused_mlp import load_operators

    device, dtype = torch.device("cuda"), torch.bfloat16
    load_operators(device)
    x, norm = torch.randn(1, HIDDEN, device=device, dtype=dtype), torch.ones(HIDDEN, device=device, dtype=dtype)
    gate_up = torch.randn(2 * INTERMEDIATE, HIDDEN, device=device, dtype=dtype) / 50
    down = torch.randn(HIDDEN, INTERMEDIATE, device=device, dtype=dtype) / 50
    for variant in VARIANTS:
        torch.ops.six_engines.fused_swiglu_mlp(x, norm, gate_up, down, x, 1e-6, variant)
    source = torch.ones(WANTED * max(STRIDES), device=device)
    for stride in STRIDES:
        strided_sums(source, stride, WANTED)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
