"""The smallest persistent kernel, `mini.cu`, in its three versions: time per layer of Qwen2.5-0.5B's MLPs (GPU)."""

from __future__ import annotations

import re

from benchmarks.micro import take_turns, timed
from stage_c_fused_mlp.extension import plan
from stage_f_graph_tp.megakernel import mini

NEEDS_GPU = True
VERSIONS = {
    1: "a barrier of the grid before each product",
    2: "values that travel with a flag",
    3: "the same, and weights loaded while a block waits",
}


def measure(repeats: int = 5) -> dict:
    """Measure seconds per layer of each version, in a fresh process each; the versions take turns."""
    compiler = mini.nvcc(plan("megakernel").architectures)

    def run(version: int) -> tuple[float, float]:
        found = re.search(r"([\d.]+) us per layer.*\(([\d.]+) us\)", mini.run(version, compiler))
        if found is None:
            raise RuntimeError(f"version {version} printed no time")
        return float(found[1]) / 1e6, float(found[2]) / 1e6

    times = take_turns(run, VERSIONS, repeats, warm_ups=0)
    rows = [timed([seconds for seconds, _ in own], version=version) for version, own in times.items()]
    return {"floor": times[max(VERSIONS)][-1][1], "rows": rows}
