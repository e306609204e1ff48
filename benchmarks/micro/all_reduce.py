"""How long the ranks take to add up a tensor: what tensor parallelism pays twice per layer.

The all-reduce is stage F's (`RankGroup`), a hundred of them in a CUDA graph as in a decode step; on GPUs also NCCL's,
for comparison, and the product of a layer's `down` with the sum over the ranks inside it. On a CPU, without a graph,
between processes. `ranks=2` or `ranks=2,4`.
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

from benchmarks.micro import caption
from benchmarks.text import markdown, medians
from benchmarks.timing import call_seconds, graph_seconds
from stage_a_naive.presets import preset_config
from stage_f_graph_tp.tensor_parallel import RankGroup, Rendezvous

if TYPE_CHECKING:
    from transformers import PretrainedConfig

README, MARKERS = "stage_f_graph_tp/tensor_parallel", ("all-reduce",)
ROWS, PRODUCT_ROWS, CALLS, SAMPLES, REPLAYS = (1, 8, 32, 256), (1, 8, 32), 100, 10, 10
WEIGHT_BYTES = 2**28  # of different weights in a graph of products: more than the L2 cache holds


def measure(
    ranks: tuple[int, ...] = (2,),
    model: str = "qwen2.5-0.5b",
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> dict:
    """Median seconds of the all-reduce of `[rows, hidden]`; in processes of its own, one per rank."""
    config, rows = preset_config(model), []
    if device == "cuda" and torch.cuda.device_count() < max(ranks):
        raise ValueError(f"{max(ranks)} ranks need as many GPUs, and there are {torch.cuda.device_count()}")
    for size in ranks:
        for library in (False, True) if device == "cuda" else (False,):
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "result.json"
                mp.spawn(_measure_rank, (size, store.port, config, device, library, str(out)), nprocs=size)
                rows += json.loads(out.read_text())
    return {"rows": rows, "model": model}


def _measure_rank(
    rank: int, size: int, port: int, config: PretrainedConfig, kind: str, library: bool, out: str
) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    if kind == "cuda":
        torch.cuda.set_device(device)
    group = RankGroup(Rendezvous(dist.TCPStore("127.0.0.1", port, is_master=False), rank, size), device)
    group.connect()
    if library:  # by NCCL alone
        group.one_shot = None
    found = []
    for rows in ROWS:
        x = torch.zeros(rows, config.hidden_size, dtype=dtype, device=device)
        if kind == "cuda":
            samples = graph_seconds([lambda x=x: group.all_reduce(x)] * CALLS, SAMPLES, REPLAYS)
        else:
            samples = call_seconds(lambda x=x: [group.all_reduce(x) for _ in range(CALLS)], device, SAMPLES)
            samples = [seconds / CALLS for seconds in samples]
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


def table(results: list[dict]) -> dict[str, list[str]]:
    """One line per number of ranks and implementation, one column per number of rows; then the products."""
    lines = []
    for result in results:
        sums = [row for row in result["rows"] if "library" in row]
        found, body, rows = medians(sums, "ranks", "library", "rows"), [], sorted({row["rows"] for row in sums})
        for ranks, library in dict.fromkeys(key[:2] for key in found):
            times = [f"{found[ranks, library, count] * 1e6:.1f}" for count in rows]
            body.append([f"{ranks}, {'NCCL' if library else 'ours'}", *times])
        heads = ["ranks, by", *(f"{count} row{'s' * (count > 1)}, µs" for count in rows)]
        lines += [f"**{result['model']}**", "", *markdown(heads, body), "", *_product_table(result)]
        lines += [caption(result), ""]
    return {"all-reduce": lines[:-1]}


def _product_table(result: dict) -> list[str]:
    found = medians([row for row in result["rows"] if "product" in row], "ranks", "product", "rows")
    body = [
        [f"{ranks}, {product}", *(f"{found[ranks, product, rows] * 1e6:.1f}" for rows in PRODUCT_ROWS)]
        for ranks, product in dict.fromkeys(key[:2] for key in found)
    ]
    heads = ["ranks, product of `down`", *(f"{rows} row{'s' * (rows > 1)}, µs" for rows in PRODUCT_ROWS)]
    return [*markdown(heads, body), ""] if body else []
