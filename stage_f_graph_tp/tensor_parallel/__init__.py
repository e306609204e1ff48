"""Tensor parallelism: one engine on several GPUs. The rest of stage F calls `start_ranks`.

The caller passes a function that executes commands on a rank. Nothing in this package imports the rest of stage F.
"""

from __future__ import annotations

import os

import torch

from stage_f_graph_tp.tensor_parallel.rank_group import RankGroup
from stage_f_graph_tp.tensor_parallel.shard_sampling import ShardSampler
from stage_f_graph_tp.tensor_parallel.sharding import build_sharded_model, check_divisible
from stage_f_graph_tp.tensor_parallel.watch.rendezvous import Rendezvous, open_rendezvous
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
    "started_by_torchrun",
]


def start_ranks(size: int, asked: str, device: torch.device, build: Build) -> tuple[Rendezvous, Workers]:
    """Start the other ranks, each in a process of this machine.

    Args:
        size: the number of ranks.
        asked: the options that set the number of ranks, for error messages.
        device: the kind of device.
        build: a module-level function. Every rank but rank 0 calls it with its rendezvous and rank 0's first message,
            and calls the returned function with every further message.

    Raises:
        ValueError: there are too few GPUs, or torchrun has already started other processes.
    """
    if started_by_torchrun():
        raise ValueError(f"{asked} under torchrun: use `from beyond import LLM`, or start one process without torchrun")
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise ValueError(f"{asked}, but there are {torch.cuda.device_count()} GPUs")
    rendezvous = open_rendezvous(size)
    return rendezvous, Workers(rendezvous, build)


def started_by_torchrun() -> bool:
    """Tell whether `torchrun` started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
