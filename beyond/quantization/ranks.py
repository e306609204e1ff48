"""8-bit weights and caches on several ranks: every rank quantises its own shard.

Where a matrix is cut by rows (QKV, gate and up), a row's scale goes with the row. Where it is cut by columns (output,
down), every rank has a scale of its own for its part of each row, made of that part alone: finer than one rank's. Ranks
add up sums that are dequantised already, so that no scale has to travel. Keys and values are cut by heads, and so are
their scales.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from beyond.quantization.layers import QuantizedResidualLinear, empty_model
from beyond.quantization.options import QuantizationOptions
from beyond.quantization.runtime import load_quantized_runtime
from stage_a_naive.checkpoints.loading import resolve
from stage_d_paged.attention import AttentionBackend
from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_d_paged.runtime import Runtime
from stage_d_paged.weights import TensorSource
from stage_f_graph_tp.ranks import Job
from stage_f_graph_tp.tensor_parallel import RankGroup, Rendezvous, build_sharded_model
from stage_f_graph_tp.tensor_parallel.sharding import ShardedWeightLoader, VocabParallelEmbedding, shard_config


@dataclass(frozen=True)
class QuantizedJob(Job):
    """Everything that a rank needs to build its share of an engine with 8-bit weights or an 8-bit cache."""

    options_class: ClassVar[type[QuantizationOptions]] = QuantizationOptions

    def load(self, options: QuantizationOptions, device: torch.device, group: RankGroup) -> Runtime:
        build = partial(build_quantized_shard, group=group)
        return load_quantized_runtime(
            resolve(self.model), options, device, getattr(torch, self.dtype), self.seed, build
        )


def build_quantized_worker(rendezvous: Rendezvous, message: bytes) -> Callable[[bytes], None]:
    """Build a worker's share of the engine; returns what executes rank 0's commands."""
    return QuantizedJob(**json.loads(message)).build(rendezvous).execute_command


def build_quantized_shard(
    config: ModelConfig,
    backend: AttentionBackend,
    max_model_len: int,
    tensors: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    options: QuantizationOptions,
    group: RankGroup,
) -> DecoderModel:
    """Build this rank's share of the model, with its weights, quantised, and its collectives."""
    if options.quantization is None:
        return build_sharded_model(config, backend, max_model_len, tensors, dtype, device, group)
    shard = shard_config(config, group.size)
    model = empty_model(shard, backend, max_model_len, dtype, device, options)
    model.load(ShardedWeightLoader(tensors, config, group.rank, group.size))
    for layer in model.layers:
        layer.self_attn.o_proj = QuantizedRowParallelLinear(layer.self_attn.o_proj, group)
        layer.mlp.down_proj = QuantizedRowParallelLinear(layer.mlp.down_proj, group)
    tied = model.lm_head is model.embed_tokens
    model.embed_tokens = VocabParallelEmbedding(model.embed_tokens, config.vocab_size, group)
    model.lm_head = model.embed_tokens if tied else VocabParallelEmbedding(model.lm_head, config.vocab_size, group)
    return model


class QuantizedRowParallelLinear(nn.Module):
    """Some columns of the matrix: the ranks' partial sums are added up, then the residual."""

    def __init__(self, linear: QuantizedResidualLinear, group: RankGroup) -> None:
        super().__init__()
        self.linear = linear
        self.group = group

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.group.all_reduce(self.linear.product(x, self.linear.weight), residual)
