"""One rank's share of an engine, built from what rank 0 says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from stage_a_naive.loading import resolve
from stage_d_paged.runtime import Runtime, choose_num_blocks, load_runtime
from stage_f_graph_tp.kernels import choose_layers
from stage_f_graph_tp.model_runner import GraphModelRunner
from stage_f_graph_tp.options import GraphOptions
from stage_f_graph_tp.parallel import RankGroup
from stage_f_graph_tp.rendezvous import Rendezvous
from stage_f_graph_tp.sharding import build_sharded_model
from stage_f_graph_tp.worker import Ranks, do_nothing


@dataclass(frozen=True)
class Job:
    """All that a rank needs to build its share of the engine."""

    model: str
    device: str
    dtype: str
    seed: int
    options: dict[str, object]

    @classmethod
    def of(cls, model: str, device: torch.device, dtype: torch.dtype, seed: int, options: GraphOptions) -> Job:
        return cls(model, device.type, str(dtype).removeprefix("torch."), seed, asdict(options))

    def encode(self) -> bytes:
        """As rank 0's first message."""
        return json.dumps(asdict(self)).encode()


def build_rank(job: Job, rendezvous: Rendezvous, ranks: Ranks | None = None) -> tuple[Runtime, GraphModelRunner]:
    """Load one rank's share and prepare to run it; all ranks take the number of pages that every one has room for."""
    options = GraphOptions(**job.options)
    device = rendezvous.device(torch.device(job.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    check = ranks.check if ranks is not None else do_nothing
    group = RankGroup(rendezvous, device, check)
    if ranks is not None:
        ranks.stop_waiting = group.stop_waiting
    build = partial(build_sharded_model, group=group)
    dtype = getattr(torch, job.dtype)
    patch = partial(choose_layers, fused=options.fused)
    runtime = load_runtime(resolve(job.model), options, device, dtype, job.seed, build, patch)
    rendezvous.agree("loaded", "", check)  # only now may a collective be entered: everybody will be there
    group.connect()
    num_blocks = min(map(int, rendezvous.agree("blocks", str(choose_num_blocks(runtime, options)), check)))
    return runtime, GraphModelRunner(runtime, runtime.make_pool(num_blocks), options, group, ranks)


def build_worker(rendezvous: Rendezvous, message: bytes) -> Callable[[bytes], None]:
    """What a worker does: build its share, then execute what rank 0 sends."""
    return build_rank(Job(**json.loads(message)), rendezvous)[1].execute_command
