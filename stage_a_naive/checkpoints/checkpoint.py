"""A checkpoint's tensors: found by name, checked against the model, and read once.

A checkpoint is a set of named tensors in one or several safetensors files, whose headers give each shape and dtype. A
tensor that is missing, has the wrong shape, is used twice or is never used is an error, because a model that lacks a
weight still runs, but writes nonsense.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stage_a_naive.checkpoints.model_config import read_json_object
from stage_a_naive.checkpoints.tensor_source import LazyTensor, TensorSource
from stage_a_naive.contract.errors import ModelError, one_line

PREFIX = "model."  # begins all names except the LM head's
FLOAT_TYPES = ("F32", "F16", "BF16")  # what safetensors calls float32, float16 and bfloat16


class SafetensorsDirectory:
    """A directory with `model.safetensors`, or with several files and `model.safetensors.index.json`.

    A model saved without its LM head has names without the prefix `model.`; the prefix is added here.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._files = {file: _open(file) for file in checkpoint_files(path)}
        self._file_of: dict[str, Path] = {}
        for file, handle in self._files.items():
            for tensor in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                if tensor in self._file_of:
                    raise ModelError(f"{tensor} is stored twice: in {self._file_of[tensor].name} and in {file.name}")
                self._file_of[tensor] = file
        self._left_out = "" if any(tensor.startswith(PREFIX) for tensor in self._file_of) else PREFIX

    def names(self) -> set[str]:
        return {name if name.startswith("lm_head.") else self._left_out + name for name in self._file_of}

    def shape(self, name: str) -> tuple[int, ...]:
        stored = name.removeprefix(self._left_out)
        part = self._files[self._file_of[stored]].get_slice(stored)
        if part.get_dtype() not in FLOAT_TYPES:
            raise ModelError(
                f"{name} in {self._file_of[stored]} is stored as {part.get_dtype()}; "
                f"supported are {', '.join(FLOAT_TYPES)}"
            )
        return tuple(part.get_shape())

    def lazy(self, name: str, shape: tuple[int, ...]) -> LazyTensor:
        stored = name.removeprefix(self._left_out)
        try:
            return self._files[self._file_of[stored]].get_slice(stored)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {name} from {self._file_of[stored]}: {error}") from error


class WeightLoader:
    """Fills the layers' weights from a source and checks that no tensor is left over."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        """Return whether the checkpoint stores this tensor (a source that makes tensors stores none)."""
        return name in (self._source.names() or ())

    def fill(self, target: Tensor, name: str) -> None:
        """Copy the tensor `name`, which must have `target`'s shape, into `target`, converted to its dtype."""
        target.copy_(self.read(name, tuple(target.shape)))
        check_finite(target, name)

    def check_equal(self, target: Tensor, name: str) -> None:
        """Check that a weight stored twice (`name` and `target`, as with tied embeddings) has the same values."""
        if not torch.equal(self.read(name, tuple(target.shape)).to(target), target):
            raise ModelError(f"{self._source.name}: {name} differs from the weight that the config ties it to")

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read the tensor `name`, which must have that shape."""
        return self.lazy(name, shape)[:]

    def lazy(self, name: str, shape: tuple[int, ...]) -> LazyTensor:
        """Find the tensor `name` without reading it.

        Raises:
            ModelError: it is missing, was used before, or has another shape.
        """
        available = self._source.names()
        if available is not None and name not in available:
            raise ModelError(f"{self._source.name}: the weight {name} is missing")
        if name in self._used:
            raise ModelError(f"{self._source.name}: the weight {name} is used twice")
        stored = self._source.shape(name)
        if stored is not None and stored != shape:
            raise ModelError(
                f"{self._source.name}: the weight {name} has shape {list(stored)}; the config asks for {list(shape)}"
            )
        self._used.add(name)
        return self._source.lazy(name, shape)

    def finish(self) -> None:
        """Reject a checkpoint that has tensors that the model did not use."""
        # Some old Llama checkpoints also store the rotary frequencies, which the config defines.
        extra = sorted(
            name for name in (self._source.names() or set()) - self._used if not name.endswith("rotary_emb.inv_freq")
        )
        if extra:
            shown = ", ".join(extra[:3]) + (", …" if len(extra) > 3 else "")
            raise ModelError(f"{self._source.name}: {len(extra)} weights that the model does not have: {shown}")


def check_finite(weight: Tensor, name: str) -> None:
    """Reject a weight with NaN or infinite values, which would make every logit NaN and every token the same."""
    if weight.is_meta:  # a model that was built only for its shapes
        return
    least, most = torch.aminmax(weight.detach())  # both are NaN if any value is
    if not math.isfinite(least) or not math.isfinite(most):
        raise ModelError(f"the weight {name} holds NaN or infinite values in {weight.dtype}; its file may be damaged")


def checkpoint_files(path: Path) -> list[Path]:
    """Return the safetensors files of a model directory; `ModelError` if one is missing."""
    single = path / "model.safetensors"
    if single.is_file():
        return [single]
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        raise ModelError(f"{path} holds no weights: neither model.safetensors nor {index.name} is there")
    try:
        files = sorted({path / name for name in read_json_object(index)["weight_map"].values()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{index} names files that are not there: {', '.join(missing)}")
    return files


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {file}: {one_line(error)}; it may be truncated, download it again") from error
