"""The smallest persistent kernel, `mini.cu`, in its three versions: time per layer of Qwen2.5-0.5B's MLPs (GPU)."""

from __future__ import annotations

import re

from benchmarks.micro import timed
from stage_c_fused_mlp.extension import plan
from stage_f_graph_tp.megakernel import mini

NEEDS_GPU = True
VERSIONS = {
    1: "a barrier of the grid before each product",
    2: "values that travel with a flag",
    3: "the same, and weights loaded while a block waits",
}


def measure(repeats: int = 5) -> dict:
    """Seconds per layer of each version, a fresh process each, the versions taking turns."""
    compiler = mini.nvcc(plan("megakernel").architectures)
    samples: dict[int, list[float]] = {version: [] for version in VERSIONS}
    floor = 0.0
    for _ in range(repeats):
        for version in VERSIONS:
            found = re.search(r"([\d.]+) us per layer.*\(([\d.]+) us\)", mini.run(version, compiler))
            if found is None:
                raise RuntimeError(f"version {version} printed no time")
            samples[version].append(float(found[1]) / 1e6)
            floor = float(found[2]) / 1e6
    return {"floor": floor, "rows": [timed(samples[version], version=version) for version in VERSIONS]}


TABLES = """
[mini]
corner = "version"
line = "{version}: {VERSIONS[version]}"
columns."µs per layer" = "{us:n}"
column = "× the floor of {1e6 * floor:.2f} µs"
cell = "{seconds / floor:.2f} ×"
note = "24 layers, one row, bfloat16"
each = true
"""
