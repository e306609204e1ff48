"""Stages of stage F's fused layers against stages of stage D's, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import CPU, F32
from torch import Tensor

from beyond.scale_out.links import Position
from beyond.scale_out.pipeline_ranks import build_stage
from beyond.scale_out.stages import replace_ends
from stage_a_naive.checkpoints.loading import resolve
from stage_d_paged.attention import AttentionMetadata, pick_backend
from stage_d_paged.config import ModelConfig
from stage_d_paged.kv_cache import KVCache, PoolShape
from stage_d_paged.runtime import Plan
from stage_d_paged.weights import RandomWeights
from stage_f_graph_tp.tensor_parallel import RankGroup, Rendezvous

SKINNY = 4  # tokens up to which a layer uses the skinny GEMMs
STEPS = [9, 3, 1]  # tokens of one sequence: more than a few, then few
NUM_STAGES, NUM_LAYERS = 3, 4  # of 1, 1 and 2 layers


@pytest.mark.slow
def test_fused_stages_are_right_in_the_interpreter(run_interpreted_tests):
    run_interpreted_tests(__file__)


@pytest.mark.interpreted
@pytest.mark.parametrize("stage", range(NUM_STAGES), ids=["first", "middle", "last"])
@torch.inference_mode()
def test_a_stage_hands_on_what_the_stage_of_separate_kernels_does(stage, draw_norm_weights):
    plain, fused = (make_stage(stage, draw_norm_weights, is_fused) for is_fused in (False, True))
    generator, start = torch.Generator().manual_seed(stage), 0
    for count in STEPS:
        states = torch.randn(count, plain.model.config.hidden_size, generator=generator)
        ids = torch.randint(1, 4000, (count,), generator=generator) if stage == 0 else torch.zeros(count).long()
        returned = [run(part, ids, start, states) for part in (plain, fused)]
        torch.testing.assert_close(returned[1], returned[0], rtol=1e-4, atol=1e-4)
        start += count


def make_stage(stage: int, draw_norm_weights, is_fused: bool) -> SimpleNamespace:
    from stage_f_graph_tp.kernels.fused_layers import fuse_layers

    config = ModelConfig.from_hf(resolve("random:qwen3-tiny").config)
    config = replace(config, layers=config.layers[:1] * NUM_LAYERS)
    backend, weights = pick_backend("reference", CPU, F32, config.head_dim), RandomWeights("random", 0, CPU, F32)
    group, position = RankGroup(Rendezvous(None, 0, 1), CPU), Position(stage, NUM_STAGES, 1)
    model = build_stage(Plan(config, backend, 64, weights, F32, CPU), group, position)
    draw_norm_weights(model)
    if is_fused:
        fuse_layers(model, SKINNY)
    states = torch.zeros(max(STEPS), config.hidden_size)
    replace_ends(model, states, stage == 0, stage == NUM_STAGES - 1)
    cache = KVCache(PoolShape(len(model.layers), 4, 4, config.num_kv_heads, config.head_dim, F32, CPU))
    return SimpleNamespace(model=model, states=states, cache=cache)


def run(part: SimpleNamespace, ids: Tensor, start: int, states: Tensor) -> Tensor:
    """Run the next tokens of one sequence, from position `start` on; returns the output of the stage's model."""
    count, end = len(ids), start + len(ids)
    part.states[:count] = states
    positions = torch.arange(start, end)
    lengths, tables = torch.tensor([end]).int(), torch.arange(4).int()[None]
    metadata = AttentionMetadata(torch.tensor([0, count]).int(), lengths, positions, tables, count, end)
    return part.model(ids, positions, part.cache, metadata)
