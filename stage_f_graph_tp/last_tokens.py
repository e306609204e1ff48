"""The last sampled tokens, on the device: a step reads the tokens that the previous step has written.

The host gets a copy of every token, but the device does not wait for the host to send it back.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from stage_f_graph_tp.step_input import StepInput, StepShape, TokenSource


class Tokens(Protocol):
    """The tokens that are already on the device: `LastTokens`, or a larger table."""

    by_slot: Tensor  # int64 [num_slots + 1]: each batch slot's last token
    num_slots: int

    def read(self, inputs: StepInput[Tensor], shape: StepShape) -> None:
        """Complete a step's input on the device."""
        ...

    def keep(self, ids: Tensor, inputs: StepInput[Tensor], shape: StepShape) -> Tensor:
        """Keep a step's sampled tokens for the next step; returns what the host may see of them."""
        ...


class LastTokens:
    """Each batch slot's last sampled token.

    Args:
        num_slots: batch slots.
        device: the model's.

    Attributes:
        by_slot: int64 `[num_slots + 1]`; padding rows of a graph write to the last entry.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.by_slot = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)

    def read(self, inputs: StepInput[Tensor], shape: StepShape) -> None:
        """Fill in the tokens of a step's decodes on the device, unless the host has sent them."""
        decodes = shape.num_decodes
        if decodes and shape.source == TokenSource.DEVICE:
            torch.index_select(self.by_slot, 0, inputs.batch_slots[:decodes], out=inputs.input_ids[:decodes])

    def keep(self, ids: Tensor, inputs: StepInput[Tensor], shape: StepShape) -> Tensor:
        """Keep a step's sampled tokens for the next step; returns what the host may see of them."""
        self.by_slot.index_copy_(0, inputs.sample_slots[: len(ids)], ids)
        return ids
