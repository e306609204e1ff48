"""What a source of weights promises: tensors by name, read in part or whole.

A checkpoint is one (`checkpoint.py`). Others wrap a source and change what it gives: names, or a part of each tensor.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LazyTensor(Protocol):
    """A stored tensor. Indexing reads a part of it, and `[:]` reads the whole."""

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> Tensor: ...


class TensorSource(Protocol):
    """A source of named tensors."""

    @property
    def name(self) -> str:
        """The source's name in error messages."""
        ...

    def names(self) -> set[str] | None:
        """Return the names of all tensors; None if the source can make any."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape; None if it takes any requested shape."""
        ...

    def lazy(self, name: str, shape: tuple[int, ...]) -> LazyTensor:
        """Return the tensor `name` of that shape without reading it."""
        ...
