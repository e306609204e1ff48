"""Divide the layers among stages, and turn stage D's model into a stage.

A stage is stage D's model with fewer layers. Two parts are replaced once the weights are loaded: instead of looking up
embeddings, a later stage reads the hidden states that it has received; instead of applying the last norm, an earlier
stage returns its states unchanged. The model's `forward` does not change:

    x = embed_tokens(ids)      later stages: the hidden states that have arrived
    x = layer(x) …             this stage's layers, with their own blocks of the KV cache
    return norm(x)             all but the last stage: x

Receiving and sending happen outside (`stage_head.py`), so a stage's computation can be a CUDA graph.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stage_a_naive.checkpoints.tensor_source import LazyTensor
from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_d_paged.weights import TensorSource

LAYER = re.compile(r"model\.layers\.(\d+)\.")
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def check_stages(config: ModelConfig, num_stages: int) -> None:
    """Raise `ValueError` if a stage would have no layer."""
    if num_stages > config.num_layers:
        raise ValueError(
            f"pipeline_parallel_size={num_stages}, but the model has {config.num_layers} layers: give at most that many"
        )


def layers_of(stage: int, num_stages: int, num_layers: int) -> range:
    """Divide the layers among the stages: consecutive layers, with counts that differ by at most one.

    Stage 0 also has the LM head, so it is one of the stages with the fewest layers.
    """
    return range(stage * num_layers // num_stages, (stage + 1) * num_layers // num_stages)


def stage_config(config: ModelConfig, stage: int, num_stages: int) -> ModelConfig:
    """Return the shape of a stage. Only stage 0 has the embedding and the LM head; the others have one row of zeros."""
    own = layers_of(stage, num_stages, config.num_layers)
    layers = config.layers[own.start : own.stop]
    if stage == 0:
        return replace(config, layers=layers)
    return replace(config, layers=layers, vocab_size=1, tie_word_embeddings=True, embedding_scale=1.0)


@dataclass(frozen=True)
class StageTensors:
    """One stage's view of a checkpoint: its layers, counted from 0, the last norm, and on stage 0 the two tables.

    Args:
        whole: all weights.
        layers: those of this stage.
        num_layers: of the whole model.
        has_tables: whether this is stage 0, which has the embedding and the LM head.
    """

    whole: TensorSource
    layers: range
    num_layers: int
    has_tables: bool

    @property
    def name(self) -> str:
        return self.whole.name

    def names(self) -> set[str] | None:
        """Return the stage's names of its weights, or None if weights are made on demand."""
        whole = self.whole.names()
        if whole is None:
            return None
        return {own for name in whole if (own := self._own_name(name)) is not None}

    def shape(self, name: str) -> tuple[int, ...] | None:
        return None if self._is_missing(name) else self.whole.shape(self._whole_name(name))

    def lazy(self, name: str, shape: tuple[int, ...]) -> LazyTensor:
        return torch.zeros(shape) if self._is_missing(name) else self.whole.lazy(self._whole_name(name), shape)

    def _is_missing(self, name: str) -> bool:
        return name in TABLES and not self.has_tables

    def _whole_name(self, name: str) -> str:
        return LAYER.sub(lambda match: f"model.layers.{int(match[1]) + self.layers.start}.", name)

    def _own_name(self, name: str) -> str | None:
        match = LAYER.match(name)
        if match is None or int(match[1]) >= self.num_layers:
            return name  # not in a layer, or in a layer that the model lacks, which the loader refuses
        layer = int(match[1])
        return LAYER.sub(f"model.layers.{layer - self.layers.start}.", name) if layer in self.layers else None


class Received(nn.Module):
    """Replaces the embedding: returns the hidden states from the previous stage, `[tokens, hidden]`.

    Args:
        states: `[rows, hidden]`, receives them; the layers may overwrite them.
    """

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.states[: len(input_ids)]


def replace_ends(model: DecoderModel, states: Tensor, is_first: bool, is_last: bool) -> None:
    """Replace the parts of a built stage that belong to another stage; see `Received` for `states`."""
    if not is_first:
        model.embed_tokens = Received(states)
    if not is_last:
        model.norm = nn.Identity()
