"""Forwards: each runs a step from its input to the model's final states, or further. A runner chooses one per step.

    megakernel       a few decodes: one launch up to the sampled tokens      (megakernel_steps.py)
    decode graphs    decodes: one replay up to the sampled tokens            (cuda_graph.py)
    prefill graphs   up to some thousand tokens: one replay                  (prefill_graphs.py)
    layers           every step: launched kernel by kernel, final states     (here)

The head and the sampler (`head.py`) then compute the outputs that the forward did not produce. A graph is recorded from
the same layers, head and sampler, so it computes what they compute without a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from stage_d_paged.kv_cache import KVCache
from stage_d_paged.model import DecoderModel
from stage_e_batching.parts import InFlight
from stage_f_graph_tp.last_tokens import Tokens
from stage_f_graph_tp.step_input import StepInput, StepShape, attention_metadata


class StepOutput(NamedTuple):
    """Outputs of a forward; None for what it did not produce. Outputs of a graph have fixed addresses."""

    hidden: Tensor | None = None  # final states [tokens, hidden], or only those of the rows that sample
    logits: Tensor | None = None  # [rows, vocab]; None also if each rank has only a part
    ids: Tensor | None = None  # int64 [rows]: the sampled tokens
    told: Tensor | None = None  # int64 [rows]: the same, with `NO_TOKEN` if no token could be chosen
    kept: Tensor | None = None  # int64 [rows]: the tokens to copy to the host
    check: Callable[[], None] | None = None  # waits for the step, and raises if its results are invalid
    is_on_host: bool = False  # `kept` is in host memory once `check` has returned


Run = Callable[[StepInput[Tensor], StepShape, int], StepOutput]  # a forward's `run`


class Forward(Protocol):
    """One way to run a step."""

    def takes(self, shape: StepShape) -> StepShape | None:
        """Return the shape in which this forward would run a step of `shape`; None if it cannot run it.

        A returned shape is accepted unchanged, so a rank that receives it chooses the same forward.
        """
        ...

    def pad(self, host: StepInput, exact: StepShape) -> None:
        """Pad the rows that `exact` leaves unfilled."""
        ...

    def run(self, inputs: StepInput[Tensor], shape: StepShape, needs: int) -> StepOutput:
        """Run a step whose input is on the device. `needs`: flags of the sampler features that its rows use."""
        ...


class StepHead(Protocol):
    """What follows a forward: the LM head and the sampler (`head.py`), or the next stage of a pipeline."""

    def prepare(self, shapes: list[StepShape], record: Callable) -> list[str]:
        """Prepare the recording of steps of these shapes; returns a line per kind of step that it records itself."""
        ...

    def sample(self, output: StepOutput, inputs: StepInput[Tensor], shape: StepShape) -> StepOutput:
        """Run the part after a forward that a graph can hold."""
        ...

    def finish(
        self, output: StepOutput, inputs: StepInput[Tensor], shape: StepShape, sample_slots: np.ndarray, needs: int
    ) -> InFlight:
        """Run the rest of a step."""
        ...

    def discard(self, last: InFlight) -> None:
        """Wait for all steps in flight, up to the last launched one, and drop them."""
        ...

    def release(self) -> None:
        """Release the graphs."""
        ...


class Layers:
    """Runs any step kernel by kernel, up to the final states.

    Args:
        model, kv_cache: used by every step.
        tokens: the tokens that are already on the device.
    """

    def __init__(self, model: DecoderModel, kv_cache: KVCache, tokens: Tokens) -> None:
        self.model, self.kv_cache, self.tokens = model, kv_cache, tokens

    def takes(self, shape: StepShape) -> StepShape:
        """Accept every step, with its shape unchanged."""
        return shape

    def pad(self, host: StepInput, exact: StepShape) -> None:
        """Do nothing: the input has no padding."""

    def run(self, inputs: StepInput[Tensor], shape: StepShape, needs: int = 0) -> StepOutput:
        """Compute the final states of all tokens."""
        self.tokens.read(inputs, shape)
        metadata = attention_metadata(inputs, shape)
        return StepOutput(self.model(inputs.input_ids, inputs.positions, self.kv_cache, metadata))
