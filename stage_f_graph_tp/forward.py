"""A forward takes a step from its input to the model's final states, or further; a runner has several to choose from.

    megakernel       a few decodes: one launch up to the sampled tokens      (megakernel_steps.py)
    decode graphs    decodes: one replay up to the sampled tokens            (cuda_graph.py)
    prefill graphs   up to some thousand tokens: one replay, final states    (prefill_graphs.py)
    layers           every step: launched kernel by kernel, final states     (here)

What a forward has not made, the head and the sampler make after it (`head.py`). A graph is recorded from the layers and
from them, so that it computes what would be computed without it.
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
    """Outputs of a forward; None for what it did not produce. What is recorded is at fixed addresses."""

    hidden: Tensor | None = None  # [tokens, hidden], or of the rows that sample alone: the final states
    logits: Tensor | None = None  # [rows, vocab]; None also where several ranks have a part each
    ids: Tensor | None = None  # int64 [rows]: the sampled tokens
    told: Tensor | None = None  # int64 [rows]: the same, with `NO_TOKEN` where none could be chosen
    kept: Tensor | None = None  # int64 [rows]: those for the host
    check: Callable[[], None] | None = None  # waits for the step, and raises if its results are invalid
    is_on_host: bool = False  # `kept` is in the host's memory when `check` has returned


Run = Callable[[StepInput[Tensor], StepShape, int], StepOutput]  # a forward's `run`


class Forward(Protocol):
    """One way to run a step."""

    def takes(self, shape: StepShape) -> StepShape | None:
        """Return the shape in which it would run a step of this shape; None if it does not run such steps.

        A shape that was returned is taken as it is: a rank that is sent it chooses the same forward.
        """
        ...

    def pad(self, host: StepInput, exact: StepShape) -> None:
        """Pad what a step of shape `exact` leaves unfilled."""
        ...

    def run(self, inputs: StepInput[Tensor], shape: StepShape, needs: int) -> StepOutput:
        """Run a step whose input is on the device; `needs` is what its rows need of the sampler."""
        ...


class StepHead(Protocol):
    """What follows a forward: the LM head and the sampler (`head.py`), or the next stage of a pipeline."""

    def prepare(self, shapes: list[StepShape], record: Callable) -> list[str]:
        """Get ready for steps of these shapes to be recorded; returns a line about each kind that it records itself."""
        ...

    def sample(self, output: StepOutput, inputs: StepInput[Tensor], shape: StepShape) -> StepOutput:
        """Do what is recorded behind a forward."""
        ...

    def finish(
        self, output: StepOutput, inputs: StepInput[Tensor], shape: StepShape, sample_slots: np.ndarray, needs: int
    ) -> InFlight:
        """Do what is left of a step."""
        ...

    def discard(self, last: InFlight) -> None:
        """Wait for what is under way, up to the step that was launched last, and drop it."""
        ...

    def release(self) -> None:
        """Release the graphs."""
        ...


class Layers:
    """Runs a step kernel by kernel, up to the final states.

    Args:
        model, kv_cache: what every step runs on.
        tokens: the tokens that the device already has.
    """

    def __init__(self, model: DecoderModel, kv_cache: KVCache, tokens: Tokens) -> None:
        self.model, self.kv_cache, self.tokens = model, kv_cache, tokens

    def takes(self, shape: StepShape) -> StepShape:
        """Take every step, as it is."""
        return shape

    def pad(self, host: StepInput, exact: StepShape) -> None:
        """Leave the input alone: it has no padding."""

    def run(self, inputs: StepInput[Tensor], shape: StepShape, needs: int = 0) -> StepOutput:
        """Compute the final states of all tokens."""
        self.tokens.read(inputs, shape)
        metadata = attention_metadata(inputs, shape)
        return StepOutput(self.model(inputs.input_ids, inputs.positions, self.kv_cache, metadata))
