"""Build one rank's part of a pipeline.

A rank belongs to a stage (`Position`) and shares the stage's layers with its other ranks by tensor parallelism:

    pipeline_parallel_size=2, tensor_parallel_size=2     stage 0: ranks 0 and 1     stage 1: ranks 2 and 3
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from beyond.options import Options
from beyond.scale_out.links import Position, StageLinks, subgroup
from beyond.scale_out.spans import Spans
from beyond.scale_out.stage_head import SAMPLE, StageHead, TimedRanks
from beyond.scale_out.stages import StageTensors, layers_of, replace_ends, stage_config
from stage_a_naive.contract.errors import ModelError
from stage_d_paged.model import DecoderModel
from stage_d_paged.runtime import Plan, build_model, choose_num_blocks
from stage_f_graph_tp.compose import make_buffers, record_graphs
from stage_f_graph_tp.forward import Layers, Run, StepOutput
from stage_f_graph_tp.last_tokens import LastTokens
from stage_f_graph_tp.ranks import Job, MakeBatch, Rank, RankHead, RankRunner, Ranks
from stage_f_graph_tp.step_input import StepBuffers, StepInput, StepShape, largest_input
from stage_f_graph_tp.tensor_parallel import RankGroup, Rendezvous, Workers, build_sharded_model


@dataclass(frozen=True)
class StageRank(Rank):
    """One rank's part of a pipeline."""

    head: StageHead

    def execute_command(self, message: bytes) -> None:
        """Execute rank 0's command: a step, or the sampling of the oldest step."""
        if message != SAMPLE:
            super().execute_command(message)
            return
        self.runner.ranks.begin_command()
        if self.head.links.stage == 0:
            self.head.sample_here()

    def choose_run(self, shape: StepShape) -> tuple[Run, StepShape]:
        """Choose the forward of a step; later stages first receive the states of the previous stage."""
        run, shape = super().choose_run(shape)
        return (run if self.head.links.stage == 0 else partial(self._receive_and_run, run)), shape

    def _receive_and_run(self, run: Run, inputs: StepInput[Tensor], shape: StepShape, needs: int) -> StepOutput:
        self.head.links.receive(shape.num_tokens, self.runner.ranks.number)
        return run(inputs, shape, needs)


def build_stage_rank(
    job: Job, options: Options, rendezvous: Rendezvous, workers: Workers | None, batch: MakeBatch
) -> StageRank:
    """Build one rank's part of a pipeline. All stages' pools have as many blocks as fit on every rank.

    Args:
        job: loads this stage's layers, and makes the sampler.
        options: the job's.
        rendezvous, workers, batch: as of `Job.build`.
    """
    device = job.own_device(rendezvous)
    position = Position(rendezvous.rank, options.pipeline_parallel_size, options.tensor_parallel_size)
    part = subgroup(rendezvous, f"stage{position.stage}", position.rank_in_stage, position.stage_size)
    group = RankGroup(part, device, workers, options.uses("one_shot_all_reduce"), options.uses("pdl"))
    runtime = job.load(options, device, partial(build_stage, group=group, position=position))
    runtime = replace(runtime, notes=(*runtime.notes, f"pipeline: {position.num_stages} stages"))
    rows = options.max_num_batched_tokens if position.stage else options.max_num_seqs  # the most that can arrive
    states = torch.zeros(rows, runtime.config.hidden_size, dtype=runtime.dtype, device=device)
    traced = options.trace and position.rank_in_stage == 0
    spans = Spans(f"{options.trace}.stage{position.stage}", device) if traced else None
    # The last stage may have the states of this many steps in flight to stage 0; with fewer it would wait for stage 0.
    unsent = options.batches_in_flight + 1
    links = StageLinks(position, rendezvous, device, states, workers, unsent, spans)
    replace_ends(runtime.model, states, links.stage == 0, links.is_last)
    check = (lambda: None) if workers is None else workers.check
    rendezvous.gather("loaded", "", check)  # enter a collective only when every rank will enter it
    if group.size > 1:
        group.connect()
    links.connect()
    sampler = job.make_sampler(runtime, options)
    num_blocks = min(map(int, rendezvous.gather("blocks", str(choose_num_blocks(runtime, options)), check)))
    kv_cache = runtime.make_pool(num_blocks)
    inputs = batch(options.max_num_seqs, runtime.max_model_len, runtime.block_size)
    buffers = make_buffers(runtime, options, inputs)
    head_bytes = largest_input(options.max_num_batched_tokens, options.max_num_seqs + 1, 0)
    tokens = LastTokens(options.max_num_seqs, device)
    ranks = Ranks(group, workers) if spans is None else TimedRanks(group, workers, spans)
    sampling = None
    if position.stage == 0:
        sampling = RankHead(runtime.model, runtime.config.vocab_size, runtime.dtype, sampler, tokens, ranks)
    head = StageHead(links, ranks, buffers, sampling, StepBuffers(head_bytes, device))
    runner = RankRunner(ranks, inputs, buffers, sampler, Layers(runtime.model, kv_cache, tokens), head)
    record_graphs(
        runner,
        runtime,
        options,
        most_decodes(options),
        lambda line: ranks.report(f"stage {links.stage}: {line}"),
        ranks.watch,
    )
    return StageRank(runtime, runner, (group, *links.links), head)


def most_decodes(options: Options) -> int:
    """Return the number of sequences in a batch's largest decode step."""
    return -(-options.max_num_seqs // options.batches_in_flight)


def build_stage(plan: Plan, group: RankGroup, position: Position) -> DecoderModel:
    """Build a stage's layers with their weights, whole or this rank's share; `plan` is the whole model's.

    Raises:
        ModelError: a weight of this stage is missing, damaged or has another shape.
    """
    num_layers = plan.config.num_layers
    layers = layers_of(position.stage, position.num_stages, num_layers)
    part = stage_config(plan.config, position.stage, position.num_stages)
    tensors = StageTensors(plan.tensors, layers, num_layers, has_tables=position.stage == 0)
    build = build_model if group.size == 1 else partial(build_sharded_model, group=group)
    try:
        return build(plan._replace(config=part, tensors=tensors))
    except ModelError as error:
        numbers = f"stage {position.stage}, whose layer 0 is the model's layer {layers.start}"
        raise ModelError(f"{numbers}: {error}") from None
