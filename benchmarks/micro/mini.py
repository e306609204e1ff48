"""The smallest persistent kernel, `mini.cu`, in its three versions: time per layer of Qwen2.5-0.5B's MLPs (GPU)."""

from __future__ import annotations

import re

from benchmarks.micro import caption, timed
from benchmarks.text import markdown, medians, number
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


def table(results: list[dict]) -> dict[str, list[str]]:
    lines = []
    for result in results:
        found = medians(result["rows"], "version")
        body = [
            [f"{version}: {text}", number(1e6 * found[version,]), f"{found[version,] / result['floor']:.2f} ×"]
            for version, text in VERSIONS.items()
        ]
        heads = ["version", "µs per layer", f"× the floor of {1e6 * result['floor']:.2f} µs"]
        lines += [*markdown(heads, body), "", caption(result, "24 layers, one row, bfloat16")]
    return {"mini": lines}
