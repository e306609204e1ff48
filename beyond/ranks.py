"""An engine on several ranks, with all options: build each rank's part.

Formats need no special treatment. If a matrix is cut by rows (QKV, gate and up), a row's scale stays with the row. If
it is cut by columns (output, down), every rank computes a scale from its part of each row, which is finer than one
scale for the whole row. Ranks add up dequantised sums, so no scales are sent. Keys and values are cut by heads, and so
are their scales.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from beyond.experts.parallel import check_expert_parallel, divide_experts
from beyond.options import Options
from beyond.quantization.checkpoint import resolve_quantized
from beyond.quantization.parts import load_quantized_runtime
from beyond.scale_out.hosts import join_ranks
from beyond.scale_out.pipeline_ranks import build_stage_rank
from beyond.speculation.drafts import draft_of
from beyond.structured.constraints import constrained_sampler
from beyond.windows.parts import divide_pool, hybrid_batch
from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_d_paged.runtime import BuildModel, Plan, Runtime
from stage_e_batching.sampler import Sampler
from stage_f_graph_tp import ranks
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.tensor_parallel import Build, Rendezvous, Workers, started_by_torchrun


@dataclass(frozen=True)
class Job(ranks.Job):
    """Everything that a rank needs to build its part of the engine."""

    options_class: ClassVar[type[Options]] = Options

    @property
    def num_ranks(self) -> int:
        return self.options_class(**self.options).num_ranks

    @property
    def asked(self) -> str:
        names = ("pipeline_parallel_size", "tensor_parallel_size")
        return ", ".join(f"{name}={self.options[name]}" for name in names if self.options[name] > 1)

    def check(self, config: ModelConfig) -> None:
        """As stage F's, also for ranks with whole experts: see `check_expert_parallel`."""
        options = self.options_class(**self.options)
        check_expert_parallel(config, options, self.device)
        super().check(divide_experts(config, options))

    def start(self, build_worker: Build) -> tuple[Rendezvous, Workers]:
        """Start the other ranks, or find those that torchrun started. Returns on rank 0 only."""
        if started_by_torchrun():
            return join_ranks(self.num_ranks, self.asked, build_worker)
        return super().start(build_worker)

    def build(
        self, rendezvous: Rendezvous, workers: Workers | None = None, batch: ranks.MakeBatch = InputBatch
    ) -> ranks.Rank:
        """Build one rank's part: a share of the whole model, or of a stage."""
        options = self.options_class(**self.options)
        if options.pipeline_parallel_size == 1:
            return super().build(rendezvous, workers, hybrid_batch(options, batch))
        return build_stage_rank(self, options, rendezvous, workers, batch)

    def make_sampler(self, runtime: Runtime, options: Options) -> Sampler:
        """Make the sampler, with the constraints that requests may ask for."""
        return constrained_sampler(runtime, options, resolve_quantized(self.model), draft_of)

    def load(self, options: Options, device: torch.device, build: BuildModel) -> Runtime:
        """Load one rank's share of the model, built by `build`."""
        source, dtype = resolve_quantized(self.model), getattr(torch, self.dtype)

        def build_divided(plan: Plan) -> DecoderModel:
            return build(plan._replace(config=divide_experts(plan.config, options)))

        return divide_pool(load_quantized_runtime(source, options, device, dtype, self.seed, build_divided), options)


def build_worker(rendezvous: Rendezvous, message: bytes) -> Callable[[bytes], None]:
    """Build a worker's part of the engine; returns the function that executes rank 0's commands."""
    return Job(**json.loads(message)).build(rendezvous).execute_command
