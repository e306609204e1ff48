"""How long the ranks of a step take to add up a tensor: what tensor parallelism pays for every layer, twice.

The all-reduce is stage F's (`RankGroup`), a hundred of them in a CUDA graph as in a decode step; on GPUs also
NCCL's, for comparison. On a CPU, without a graph, between processes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from stage_f_graph_tp.tensor_parallel import RankGroup, Rendezvous

CALLS = 100  # in a sample
SAMPLES = 10


def all_reduce_microseconds(
    ranks: int, rows: Sequence[int], hidden: int, dtype: torch.dtype, device_type: str, library: bool = False
) -> dict[int, float]:
    """Median time of the all-reduce of `[rows, hidden]`, by rows; in processes of its own, one a rank.

    `library`: by NCCL or gloo alone.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        arguments = (ranks, store.port, tuple(rows), hidden, dtype, device_type, library, str(out))
        mp.spawn(_measure_rank, arguments, nprocs=ranks)
        return {int(n): microseconds for n, microseconds in json.loads(out.read_text()).items()}


def _measure_rank(
    rank: int,
    ranks: int,
    port: int,
    rows: tuple[int, ...],
    hidden: int,
    dtype: torch.dtype,
    device_type: str,
    library: bool,
    out: str,
) -> None:
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group = RankGroup(Rendezvous(store, rank, ranks), device)
    group.connect()
    if library:
        group.one_shot = None
    measure = _in_a_graph if device.type == "cuda" else _in_a_loop
    found = {}
    for n in rows:
        samples = measure(group, torch.zeros(n, hidden, dtype=dtype, device=device))
        found[n] = 1e6 * statistics.median(samples) / CALLS
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def _in_a_loop(group: RankGroup, x: Tensor) -> list[float]:
    samples = []
    for _ in range(SAMPLES + 1):
        start = time.perf_counter()
        for _ in range(CALLS):
            group.all_reduce(x)
        samples.append(time.perf_counter() - start)
    return samples[1:]


def _in_a_graph(group: RankGroup, x: Tensor) -> list[float]:
    group.all_reduce(x)  # makes the connections, which a graph cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            group.all_reduce(x)
    samples = []
    for _ in range(SAMPLES + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(1e-3 * begin.elapsed_time(end))
    return samples[1:]
