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

from beyond.quantization.options import QuantizationOptions
from beyond.quantization.parts import load_quantized_runtime
from stage_a_naive.checkpoints.loading import resolve
from stage_d_paged.runtime import Runtime
from stage_f_graph_tp.ranks import Job
from stage_f_graph_tp.tensor_parallel import RankGroup, Rendezvous, build_sharded_model


@dataclass(frozen=True)
class QuantizedJob(Job):
    """Everything that a rank needs to build its share of an engine with 8-bit weights or an 8-bit cache."""

    options_class: ClassVar[type[QuantizationOptions]] = QuantizationOptions

    def load(self, options: QuantizationOptions, device: torch.device, group: RankGroup) -> Runtime:
        build, dtype = partial(build_sharded_model, group=group), getattr(torch, self.dtype)
        return load_quantized_runtime(resolve(self.model), options, device, dtype, self.seed, build)


def build_quantized_worker(rendezvous: Rendezvous, message: bytes) -> Callable[[bytes], None]:
    """Build a worker's share of the engine; returns what executes rank 0's commands."""
    return QuantizedJob(**json.loads(message)).build(rendezvous).execute_command
