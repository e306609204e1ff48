"""A step's block tables for both kinds of layers: side by side on their way to the device, apart in the layers.

    on the host      [ 7 2 9 4 | - - 3 1 ]     a row of the step's input: its blocks, and the windowed block of each
    on the device    a full layer is told 7 2 9 4, a windowed one - - 3 1, and in which slots its new tokens go there

Stage F's input has room for tables of any width, so nothing else changes on the way: one copy carries them, other ranks
get them with it, and they are taken apart inside a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from beyond.windows.blocks import WindowBlocks
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.model import DecoderModel
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.step_input import StepInput, StepShape


class HybridBatch:
    """Builds a step's input as the batch does that it is given, with block tables twice as wide.

    Args:
        batch: stage F's builder of inputs, or another one's that is called alike.

    Attributes:
        windows: the windowed blocks; None where the pool has one block, for all layers.
    """

    def __init__(self, batch: InputBatch) -> None:
        self.windows: WindowBlocks | None = None
        self._batch = batch
        self.block_size, self.max_model_len = batch.block_size, batch.max_model_len
        self.max_blocks = 2 * batch.max_blocks  # columns of the widest table

    def update(self, step: ScheduledStep) -> None:
        """Take over what the step changed."""
        self._batch.update(step)

    def shape_of(self, step: ScheduledStep) -> StepShape:
        """Return the sizes of a step's input."""
        shape = self._batch.shape_of(step)
        return shape._replace(table_width=2 * shape.table_width)

    def fill(self, step: ScheduledStep, out: StepInput[np.ndarray]) -> np.ndarray:
        """Write a step's input: see `InputBatch.fill`. What it is the last to see is free from here on."""
        width = out.block_tables.shape[1] // 2
        generated = self._batch.fill(step, out._replace(block_tables=out.block_tables[:, :width]))
        if self.windows is None:
            return generated
        tables = out.block_tables[: len(step)]
        # Where there is no windowed block none is read; block 0 is there for kernels that copy whole rows.
        tables[:, width:] = np.maximum(self.windows.of_block[tables[:, :width]], 0)
        self.windows.slide()
        return generated


def use_own_tables(model: DecoderModel, is_windowed: tuple[bool, ...], block_size: int) -> None:
    """Let every layer of a model read the block tables of its own kind, out of those that `HybridBatch` makes."""
    tables = _Tables(block_size)
    for layer, kind in zip(model.layers, is_windowed, strict=True):
        layer.register_forward_pre_hook(tables.of_kind(kind))


class _Tables:
    """The tables of each kind of layer, taken apart once per step."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._both: AttentionMetadata | None = None  # what was taken apart last
        self._apart: tuple[AttentionMetadata, AttentionMetadata] | None = None

    def of_kind(self, kind: bool) -> Callable[[nn.Module, tuple], tuple | None]:
        """Return what is called with a layer's arguments and may return others (a forward pre-hook)."""

        def choose(layer: nn.Module, arguments: tuple[Any, Any, Any, AttentionMetadata]) -> tuple | None:
            x, rotation, layer_cache, both = arguments
            if layer_cache[0].shape[0] == 1:
                return None  # one block for all layers, as when the memory of a step is measured
            if both is not self._both or self._apart is None:
                self._both, self._apart = both, take_apart(both, self._block_size)
            return x, rotation, layer_cache, self._apart[kind]

        return choose


def take_apart(both: AttentionMetadata, block_size: int) -> tuple[AttentionMetadata, AttentionMetadata]:
    """Return what full and what windowed layers are told of a step, from tables that stand side by side."""
    width = both.block_tables.shape[1] // 2
    full, windowed = (half.contiguous() for half in both.block_tables.split(width, dim=1))
    slots = windowed_slots(both, windowed, block_size)
    return replace(both, block_tables=full), replace(both, block_tables=windowed, slot_mapping=slots)


def windowed_slots(metadata: AttentionMetadata, tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """Find the slot of each token in the blocks of `tables`, int64 `[tokens]`; -1 for padding."""
    lengths, ends = metadata.context_lens, metadata.cu_seqlens_q[1:]
    rows = torch.arange(len(metadata.slot_mapping), dtype=torch.int32, device=lengths.device)
    owners = rows  # the row of each token's sequence
    if metadata.max_query_len > 1:
        owners = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
    # A sequence's tokens are the last of its context. Padding has positions that are in no table.
    positions = lengths[owners] - ends[owners] + rows
    positions = torch.minimum(positions, lengths[owners] - 1).clamp_(min=0)
    slots = tables[owners, positions // block_size].long() * block_size + positions % block_size
    return slots.masked_fill_(metadata.slot_mapping < 0, -1)
