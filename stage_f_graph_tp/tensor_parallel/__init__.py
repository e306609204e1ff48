"""Tensor parallelism: one engine on several GPUs. `start_ranks` is the way in for the rest of stage F.

What a rank does with a command is the caller's business: it passes a function. Nothing in here imports the rest of
stage F.
"""

from __future__ import annotations

import torch

from stage_f_graph_tp.tensor_parallel.rank_group import RankGroup
from stage_f_graph_tp.tensor_parallel.shard_sampling import ShardSampler
from stage_f_graph_tp.tensor_parallel.sharding import build_sharded_model, check_divisible
from stage_f_graph_tp.tensor_parallel.watch.rendezvous import Rendezvous, open_rendezvous, started_by_torchrun
from stage_f_graph_tp.tensor_parallel.watch.worker_loop import run_torchrun_worker
from stage_f_graph_tp.tensor_parallel.watch.workers import Build, WorkerError, Workers, check_number

__all__ = [
    "Build",
    "RankGroup",
    "Rendezvous",
    "ShardSampler",
    "WorkerError",
    "Workers",
    "build_sharded_model",
    "check_divisible",
    "check_number",
    "start_ranks",
]


def start_ranks(size: int, asked: str, device: torch.device, build: Build) -> tuple[Rendezvous, Workers]:
    """Start the other ranks, or find those that torchrun started. Returns on rank 0 only.

    Args:
        size: the number of ranks.
        asked: the options that ask for them, as an error names them.
        device: where they compute.
        build: a function of a module. A rank other than 0 calls it with its rendezvous and rank 0's first message. What
            it returns is called with every further message.

    Raises:
        ValueError: there are not that many GPUs or processes of torchrun.
    """
    if device.type == "cuda" and not started_by_torchrun() and size > torch.cuda.device_count():
        raise ValueError(f"{asked}, but there are {torch.cuda.device_count()} GPUs")
    rendezvous = open_rendezvous(size, asked)
    if rendezvous.rank > 0:
        run_torchrun_worker(rendezvous, build)
    workers = Workers(rendezvous, build)
    return workers.rendezvous, workers
