"""Where this stage's layers take their weights from: a checkpoint's files, or random numbers.

The layers ask for tensors by their Hugging Face names. Stage A's `WeightLoader` between them and the files reads
straight from the memory-mapped file into the layer's memory and keeps account of what was asked for.
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
    """Find the weights of a model that stage A resolved: in its directory, or random."""
    if source.path is None:
        return RandomWeights(source.name, seed, device, dtype)
    return SafetensorsDirectory(source.path)
