"""The source of this stage's weights: a checkpoint's files, or random numbers.

The layers request tensors by their Hugging Face names. Stage A's `WeightLoader` reads them directly from the
memory-mapped file into the layer's memory and records which tensors were used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stage_a_naive.checkpoints.checkpoint import SafetensorsDirectory, TensorSource, WeightLoader
from stage_a_naive.checkpoints.loading import ModelSource, random_tensor

__all__ = ["RandomWeights", "SafetensorsDirectory", "TensorSource", "WeightLoader", "tensor_source"]


class RandomWeights:
    """The weights of a `random:` preset: made on demand, the same in every stage for the same seed."""

    def __init__(self, name: str, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self.name = name
        self._seed = seed
        self._device = device
        self._dtype = dtype

    def names(self) -> None:
        return None

    def shape(self, name: str) -> None:
        return None

    def lazy(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return random_tensor(name, shape, self._seed, self._device, self._dtype)


def tensor_source(source: ModelSource, seed: int, dtype: torch.dtype, device: torch.device) -> TensorSource:
    """Return the source of a resolved model's weights: its directory, or random numbers."""
    if source.path is None:
        return RandomWeights(source.name, seed, device, dtype)
    return SafetensorsDirectory(source.path)
