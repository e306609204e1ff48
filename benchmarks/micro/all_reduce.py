"""The time of an all-reduce, which tensor parallelism pays twice per layer (GPUs).

Stage F's all-reduce of `[rows, hidden]` (`RankGroup`), a hundred of them in a CUDA graph, is compared with NCCL's. The
product of a layer's `down` is timed with the sum over the ranks inside it. `ranks=2` or `ranks=2,4`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from benchmarks.timing import graph_seconds
from stage_a_naive.checkpoints.presets import preset_config
from stage_f_graph_tp.tensor_parallel import RankGroup, Rendezvous

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NEEDS_GPU = True
ROWS, PRODUCT_ROWS, CALLS, SAMPLES, REPLAYS = (1, 8, 32, 256, 8192), (1, 8, 32), 100, 10, 10
WEIGHT_BYTES = 2**28  # of different weights in a graph of products: more than the L2 cache holds


def measure(ranks: tuple[int, ...] = (2,), model: str = "qwen2.5-0.5b") -> dict:
    """Measure each number of ranks in separate processes, one per rank: with our kernel, and with NCCL only."""
    if torch.cuda.device_count() < max(ranks):
        raise ValueError(f"{max(ranks)} ranks need as many GPUs, and there are {torch.cuda.device_count()}")
    rows = []
    for size in ranks:
        for library in False, True:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "result.json"
                mp.spawn(_measure_rank, (size, store.port, preset_config(model), library, str(out)), nprocs=size)
                rows += json.loads(out.read_text())
    return {"rows": rows, "model": model}


def _measure_rank(rank: int, size: int, port: int, config: PretrainedConfig, library: bool, out: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = RankGroup(Rendezvous(dist.TCPStore("127.0.0.1", port, is_master=False), rank, size), device)
    group.connect()
    if library:
        group.one_shot = None
    found = []
    for rows in ROWS:
        x = torch.zeros(rows, config.hidden_size, dtype=torch.bfloat16, device=device)
        samples = graph_seconds([lambda x=x: group.all_reduce(x)] * CALLS, SAMPLES, REPLAYS)
        found.append({"ranks": size, "rows": rows, "library": library, "samples": samples})
    if group.one_shot is not None:
        with torch.inference_mode():
            found += [row for rows in PRODUCT_ROWS for row in _measure_products(rows, group, config, device)]
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def _measure_products(rows: int, group: RankGroup, config: PretrainedConfig, device: torch.device) -> list[dict]:
    """`down`: our product, the same with the sum over the ranks in it, and the library's with all that follows it."""
    from stage_f_graph_tp.kernels.skinny_gemm import product_add, sum_squares  # here: only GPUs need Triton

    columns, hidden = config.intermediate_size // group.size, config.hidden_size
    x, residual = (torch.zeros(rows, n, dtype=torch.bfloat16, device=device) for n in (columns, hidden))
    counters = torch.zeros(4096, dtype=torch.int32, device=device)
    peers = group.one_shot.peers
    works = {
        "alone": lambda w: product_add(x, w, residual, counters),
        "with the sum over the ranks": lambda w: product_add(x, w, residual, counters, peers=peers),
        "library's, all-reduce, squares": lambda w: sum_squares(group.all_reduce(F.linear(x, w), residual)),
    }
    weights = torch.zeros(max(2, WEIGHT_BYTES // (2 * columns * hidden)), hidden, columns, dtype=x.dtype, device=device)
    found = []
    for product, work in works.items():
        samples = graph_seconds([lambda w=w, work=work: work(w) for w in weights], SAMPLES, REPLAYS)
        found.append({"ranks": group.size, "rows": rows, "product": product, "samples": samples})
    return found
