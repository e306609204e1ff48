"""Starting ranks and telling them what to do: stage F's own way, and what torch's launcher and store offer for it.

*Start*: seconds from the command to the answer of one token, with two CPU ranks. *Command*: a step's command of 4 KB to
another process and a short answer back, half of the round trip.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.micro import caption
from benchmarks.results import ROOT
from benchmarks.text import markdown
from stage_f_graph_tp.tensor_parallel import RankGroup, Rendezvous

README, MARKERS = "beyond/scale_out", ("rank-start",)
REPEATS, CALLS, COMMAND = 3, 300, bytes(4096)
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
STARTS = {"LLM(…) starts them": [], "torchrun": TORCHRUN}
WAYS = ("socket pair", "gloo broadcast", "TCPStore")


def measure() -> dict:
    """Seconds of each, in turns."""
    starts: dict[str, list[float]] = {name: [] for name in STARTS}
    for _ in range(REPEATS):
        for name, launcher in STARTS.items():
            command = [sys.executable, "-m", *launcher, "stage_f_graph_tp", "--tensor-parallel-size", "2"]
            begin = time.perf_counter()
            subprocess.run(
                [*command, "--device", "cpu", "--max-tokens", "1", "--prompt", "Hello"],
                cwd=ROOT, check=True, capture_output=True,
            )  # fmt: skip
            starts[name].append(time.perf_counter() - begin)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pair = socket.socketpair()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        mp.start_processes(_measure_rank, (store.port, pair, str(out)), nprocs=2, start_method="fork")
        found = json.loads(out.read_text())
    rows = [{"study": "start", "way": name, "samples": samples} for name, samples in starts.items()]
    return {"rows": rows + [{"study": "command", "way": name, "samples": found[name]} for name in WAYS]}


def _measure_rank(rank: int, port: int, pair: tuple[socket.socket, socket.socket], out: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group = RankGroup(Rendezvous(store, rank, 2), torch.device("cpu"))
    group.connect()
    connection = Connection(pair[rank].detach())
    there, back = torch.zeros(len(COMMAND), dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)

    def by_connection(call: int) -> None:
        if rank == 0:
            connection.send_bytes(COMMAND)
            connection.recv_bytes()
        else:
            connection.recv_bytes()
            connection.send_bytes(b"x")

    def by_broadcast(call: int) -> None:
        group.broadcast(there)
        group.all_reduce(back)

    def by_store(call: int) -> None:
        if rank == 0:
            store.set(f"command{call}", COMMAND)
            store.get(f"answer{call}")
        else:
            store.get(f"command{call}")
            store.set(f"answer{call}", b"x")

    found = {name: _times(way) for name, way in zip(WAYS, (by_connection, by_broadcast, by_store), strict=True)}
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def _times(way: Callable[[int], None]) -> list[float]:
    samples = []
    for call in range(CALLS):
        begin = time.perf_counter()
        way(call)
        samples.append((time.perf_counter() - begin) / 2)
    return samples[CALLS // 10 :]  # without the first ones, which connect


def table(results: list[dict]) -> dict[str, list[str]]:
    """One line per way."""
    result = results[0]
    seconds = [row for row in result["rows"] if row["study"] == "start"]
    body = [[row["way"], f"{statistics.median(row['samples']):.1f} s", ""] for row in seconds]
    commands = [row for row in result["rows"] if row["study"] == "command"]
    body += [[row["way"], "", f"{statistics.median(row['samples']) * 1e6:,.0f} µs"] for row in commands]
    heads = ["two ranks", "start to first token", "a command of 4 KB"]
    return {"rank-start": [*markdown(heads, body), "", caption(result)]}
