"""A step's block tables for both kinds of layers: joined on the way to the device, split for the layers.

    on the host      [ 7 2 9 4 | - - 3 1 ]     a row of the step's input: its blocks, and the windowed block of each
    on the device    a full layer gets 7 2 9 4; a windowed one gets - - 3 1 and the slots of its new tokens

Stage F's input has room for tables of any width, so nothing else changes: both tables travel in the same copy, also to
other ranks, and are split inside the CUDA graph.
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
    """Builds a step's input as the given batch does, with block tables twice as wide.

    Args:
        batch: stage F's input builder, or another with the same interface.

    Attributes:
        windows: the windowed blocks; set before the first step.
    """

    windows: WindowBlocks

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch
        self.block_size, self.max_model_len = batch.block_size, batch.max_model_len
        self.max_blocks = 2 * batch.max_blocks  # columns of the widest table

    def update(self, step: ScheduledStep) -> None:
        """Update the tables with the step's changes."""
        self._batch.update(step)

    def shape_of(self, step: ScheduledStep) -> StepShape:
        """Return the sizes of a step's input."""
        shape = self._batch.shape_of(step)
        return shape._replace(table_width=2 * shape.table_width)

    def fill(self, step: ScheduledStep, out: StepInput[np.ndarray]) -> np.ndarray:
        """Write a step's input: see `InputBatch.fill`. Blocks that only this step still sees are then freed."""
        width = out.block_tables.shape[1] // 2
        generated = self._batch.fill(step, out._replace(block_tables=out.block_tables[:, :width]))
        tables = out.block_tables[: len(step)]
        # Where there is no windowed block none is read; block 0 is there for kernels that copy whole rows.
        tables[:, width:] = np.maximum(self.windows.of_block[tables[:, :width]], 0)
        self.windows.slide()
        return generated


def use_own_tables(model: DecoderModel, is_windowed: tuple[bool, ...], block_size: int) -> None:
    """Let every layer of a model read its kind's half of the block tables that `HybridBatch` makes."""
    tables = _Tables(block_size)
    for layer, kind in zip(model.layers, is_windowed, strict=True):
        layer.register_forward_pre_hook(tables.of_kind(kind))


class _Tables:
    """The tables of each kind of layer, split once per step."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._both: AttentionMetadata | None = None  # what was taken apart last
        self._apart: tuple[AttentionMetadata, AttentionMetadata] | None = None

    def of_kind(self, kind: bool) -> Callable[[nn.Module, tuple], tuple | None]:
        """Return a forward pre-hook, which may replace a layer's arguments."""

        def choose(layer: nn.Module, arguments: tuple[Any, Any, Any, AttentionMetadata]) -> tuple | None:
            x, rotation, layer_cache, both = arguments
            if layer_cache[0].shape[0] == 1:
                return None  # every table leads to its only block, as when the memory of a step is measured
            if both is not self._both or self._apart is None:
                self._both, self._apart = both, take_apart(both, self._block_size)
            return x, rotation, layer_cache, self._apart[kind]

        return choose


def take_apart(both: AttentionMetadata, block_size: int) -> tuple[AttentionMetadata, AttentionMetadata]:
    """Split joined tables into the metadata of full layers and that of windowed layers."""
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
