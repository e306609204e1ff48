"""How each rank of a pipeline builds its part of the engine.

A rank belongs to a stage (`Position`) and shares the stage's layers with the others of it by tensor parallelism:

    pipeline_parallel_size=2, tensor_parallel_size=2     stage 0: ranks 0 and 1     stage 1: ranks 2 and 3
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from beyond.scale_out.links import Position, StageLinks, stop_all, subgroup
from beyond.scale_out.options import ScaleOutOptions
from beyond.scale_out.pipeline_runner import PipelineRunner
from beyond.scale_out.stages import StageTensors, layers_of, replace_ends, stage_config
from stage_a_naive.checkpoints.loading import resolve
from stage_a_naive.contract.errors import ModelError
from stage_d_paged.attention import AttentionBackend
from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_d_paged.runtime import MODEL_DTYPE, Formats, Runtime, build_model, choose_num_blocks, load_runtime
from stage_d_paged.weights import TensorSource
from stage_e_batching.llm import make_sampler
from stage_f_graph_tp.kernels import choose_layers
from stage_f_graph_tp.rank_runner import Job
from stage_f_graph_tp.tensor_parallel import RankGroup, Rendezvous, Workers, build_sharded_model


@dataclass(frozen=True)
class OneStageJob(Job):
    """Stage F's job, with this package's options."""

    options_class: ClassVar[type[ScaleOutOptions]] = ScaleOutOptions


def build_one_stage_worker(rendezvous: Rendezvous, message: bytes) -> Callable[[bytes], None]:
    """Build a worker's share of an engine with one stage; returns what executes rank 0's commands."""
    return OneStageJob(**json.loads(message)).build(rendezvous)[1].execute_command


@dataclass(frozen=True)
class PipelineJob(OneStageJob):
    """Everything that a rank needs to build its part of a pipeline."""

    @property
    def num_ranks(self) -> int:
        return self.options_class(**self.options).num_ranks

    @property
    def asked(self) -> str:
        names = ("pipeline_parallel_size", "tensor_parallel_size")
        return ", ".join(f"{name}={self.options[name]}" for name in names)

    def build(self, rendezvous: Rendezvous, workers: Workers | None = None) -> tuple[Runtime, PipelineRunner]:
        """Build one rank's part. All stages' pools have the number of blocks that every rank has room for."""
        options = self.options_class(**self.options)
        device = rendezvous.device(torch.device(self.device))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        config = ModelConfig.from_hf(resolve(self.model).config)
        position = Position(rendezvous.rank, options.pipeline_parallel_size, options.tensor_parallel_size)
        part = subgroup(rendezvous, f"stage{position.stage}", position.rank_in_stage, position.stage_size)
        group = RankGroup(part, device, workers)
        rows = options.max_num_batched_tokens if position.stage else options.max_num_seqs  # the most that arrive
        states = torch.zeros(rows, config.hidden_size, dtype=getattr(torch, self.dtype), device=device)
        # The last stage may have this many steps' states on their way back; with fewer it would wait for stage 0.
        links = StageLinks(position, rendezvous, device, states, workers, max_unsent=options.batches_in_flight + 1)
        check = (lambda: None) if workers is None else workers.check
        if workers is not None:
            workers.stop_waiting = stop_all([group, *links.links])
        runtime = self.load_stage(options, device, group, links, position)
        rendezvous.gather("loaded", "", check)  # a collective may only be entered when every rank will enter it
        if group.size > 1:
            group.connect()
        links.connect()
        sampler = make_sampler(runtime, options)
        num_blocks = min(map(int, rendezvous.gather("blocks", str(choose_num_blocks(runtime, options)), check)))
        return runtime, PipelineRunner(runtime, runtime.make_pool(num_blocks), sampler, options, group, workers, links)

    def load_stage(
        self, options: ScaleOutOptions, device: torch.device, group: RankGroup, links: StageLinks, position: Position
    ) -> Runtime:
        """Load the layers of a stage, or a rank's share of them."""

        def patch(model: DecoderModel, options: ScaleOutOptions, device: torch.device) -> str:
            line = choose_layers(model, options, device, fused=options.fused)
            replace_ends(model, links.states, links.stage == 0, links.is_last)
            return f"{position.num_stages} stages; {line}"

        build = partial(build_stage, group=group, position=position)
        source, dtype = resolve(self.model), getattr(torch, self.dtype)
        return load_runtime(source, options, device, dtype, self.seed, build, patch)


def build_stage_worker(rendezvous: Rendezvous, message: bytes) -> Callable[[bytes], None]:
    """Build a worker's part of a pipeline; returns what executes rank 0's commands."""
    return PipelineJob(**json.loads(message)).build(rendezvous)[1].execute_command


def build_stage(
    config: ModelConfig,
    backend: AttentionBackend,
    max_model_len: int,
    tensors: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    formats: Formats = MODEL_DTYPE,
    *,
    group: RankGroup,
    position: Position,
) -> DecoderModel:
    """Build a stage's layers with their weights: whole, or this rank's share of them.

    Raises:
        ModelError: a weight of this stage is missing, damaged or has another shape.
    """
    layers = layers_of(position.stage, position.num_stages, config.num_layers)
    part = stage_config(config, position.stage, position.num_stages)
    part_tensors = StageTensors(tensors, layers, config.num_layers, has_tables=position.stage == 0)
    build = build_model if group.size == 1 else partial(build_sharded_model, group=group)
    try:
        return build(part, backend, max_model_len, part_tensors, dtype, device, formats)
    except ModelError as error:
        numbers = f"stage {position.stage}, whose layer 0 is the model's layer {layers.start}"
        raise ModelError(f"{numbers}: {error}") from None
