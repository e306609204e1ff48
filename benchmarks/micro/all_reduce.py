"""How long the ranks take to add up a tensor: what tensor parallelism pays twice per layer.

The all-reduce is stage F's (`RankGroup`), a hundred of them in a CUDA graph as in a decode step; on GPUs also NCCL's,
for comparison. On a CPU, without a graph, between processes. `ranks=2` or `ranks=2,4`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.micro import caption
from benchmarks.text import markdown, medians
from benchmarks.timing import call_seconds, graph_seconds
from stage_a_naive.presets import preset_config
from stage_f_graph_tp.tensor_parallel import RankGroup, Rendezvous

README, MARKERS = "stage_f_graph_tp/tensor_parallel", ("all-reduce",)
ROWS, CALLS, SAMPLES = (1, 32, 256), 100, 10


def measure(
    ranks: tuple[int, ...] = (2,),
    model: str = "qwen2.5-0.5b",
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> dict:
    """Median seconds of the all-reduce of `[rows, hidden]`; in processes of its own, one per rank."""
    hidden, rows = preset_config(model).hidden_size, []
    if device == "cuda" and torch.cuda.device_count() < max(ranks):
        raise ValueError(f"{max(ranks)} ranks need as many GPUs, and there are {torch.cuda.device_count()}")
    for size in ranks:
        for library in (False, True) if device == "cuda" else (False,):
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "result.json"
                mp.spawn(_measure_rank, (size, store.port, hidden, device, library, str(out)), nprocs=size)
                rows += json.loads(out.read_text())
    layers = preset_config(model).num_hidden_layers
    return {"rows": rows, "model": model, "calls_per_step": 2 * layers + 1}  # two per layer, one for the embedding


def _measure_rank(rank: int, size: int, port: int, hidden: int, kind: str, library: bool, out: str) -> None:
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
        x = torch.zeros(rows, hidden, dtype=dtype, device=device)
        if kind == "cuda":
            samples = graph_seconds([lambda x=x: group.all_reduce(x)] * CALLS, SAMPLES)
        else:
            samples = call_seconds(lambda x=x: [group.all_reduce(x) for _ in range(CALLS)], device, SAMPLES)
            samples = [seconds / CALLS for seconds in samples]
        found.append({"ranks": size, "rows": rows, "library": library, "samples": samples})
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def table(results: list[dict]) -> dict[str, list[str]]:
    """One line per number of ranks and implementation, one column per number of rows."""
    lines = []
    for result in results:
        found, body = medians(result["rows"], "ranks", "library", "rows"), []
        for ranks, library in dict.fromkeys(key[:2] for key in found):
            times = [found[ranks, library, rows] for rows in ROWS]
            step = f"{times[0] * result['calls_per_step'] * 1e3:.3f}"
            body.append([f"{ranks}, {'NCCL' if library else 'ours'}", *(f"{t * 1e6:.1f}" for t in times), step])
        heads = ["ranks, by", *(f"{rows} row{'s' * (rows > 1)}, µs" for rows in ROWS)]
        heads.append("all those of a decode step of one row, ms")
        lines += [f"**{result['model']}**", "", *markdown(heads, body), "", caption(result), ""]
    return {"all-reduce": lines[:-1]}
