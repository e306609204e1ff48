"""int8 checkpoints in the Hugging Face layout, as the compressed-tensors library writes them.

`config.json` has a `quantization_config` that says what was done, and beside each matrix is `weight_scale`. Two storage
formats are read:

    int-quantized    `weight`: int8 [rows, columns]
    pack-quantized   `weight_packed`: four values of a row, plus 128, in one int32

with a scale per row or per row and 128 columns. The values are taken over as they are, not quantised again. Every other
method is refused by name: 4-bit formats (AWQ, GPTQ, NF4) need other kernels.
"""

from __future__ import annotations

from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path

import torch
from torch import Tensor

from beyond.quantization.options import GROUP_SIZE, QuantizationOptions
from stage_a_naive.checkpoint import LazyTensor, SafetensorsDirectory
from stage_a_naive.config_classes import CONFIG_CLASSES
from stage_a_naive.errors import ModelError
from stage_a_naive.loading import ModelSource, resolve
from stage_a_naive.model_config import check_config, read_json_object

STORAGE = ("int-quantized", "pack-quantized")


def resolve_quantized(model: str | PathLike[str]) -> ModelSource:
    """Stage A's `resolve`, which also takes a directory with an int8 checkpoint.

    Raises:
        ModelError: as in stage A, or the checkpoint is quantised in a way that is not supported.
    """
    path = Path(fspath(model)).expanduser()
    raw = read_json_object(path / "config.json") if (path / "config.json").is_file() else {}
    if not raw.get("quantization_config") or raw.get("model_type") not in list(CONFIG_CLASSES):
        return resolve(model)
    read_scheme(raw["quantization_config"], path)
    config = CONFIG_CLASSES[raw["model_type"]].from_pretrained(path)
    check_config(config)
    return ModelSource(fspath(model), config, path, path)


def read_scheme(config: dict, where: object) -> int | None:
    """Return how many columns share a scale (None: all of a row), from a checkpoint's `quantization_config`.

    Raises:
        ModelError: something other than symmetric int8 weights of all linear layers; the message names it.
    """
    method = config.get("quant_method")
    if method != "compressed-tensors":
        raise ModelError(
            f"{where} is quantised with {method!r}, which is not supported; compressed-tensors int8 is, and so is the "
            "unquantised checkpoint with quantization='int8' or 'fp8'"
        )
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise ModelError(f"{where} has {len(groups)} quantization groups; one, of all linear layers, is supported")
    [group] = groups
    weights = group.get("weights") or {}
    size = weights.get("group_size")
    for what, found, allowed in (
        ("format", group.get("format") or config.get("format"), STORAGE),
        ("weights.num_bits", weights.get("num_bits"), (8,)),
        ("weights.type", weights.get("type"), ("int",)),
        ("weights.symmetric", weights.get("symmetric"), (True,)),
        ("weights.strategy", weights.get("strategy"), ("channel", "group")),
        ("weights.group_size", size if weights.get("strategy") == "group" else None, (None, GROUP_SIZE)),
        ("weights.actorder", weights.get("actorder"), (None,)),
        ("input_activations", group.get("input_activations"), (None,)),
        ("targets", group.get("targets"), (["Linear"],)),
        ("ignore", config.get("ignore"), (["lm_head"],)),
        ("kv_cache_scheme", config.get("kv_cache_scheme"), (None,)),
    ):
        if found not in allowed:
            supported = ", ".join(map(repr, allowed))
            raise ModelError(f"{where}: quantization_config has {what}={found!r}; supported: {supported}")
    return size if weights["strategy"] == "group" else None


def options_of_checkpoint(source: ModelSource, options: QuantizationOptions) -> QuantizationOptions:
    """The options with the checkpoint's format, where it is quantised.

    Raises:
        ValueError: an option asks for another format, or for what a quantised checkpoint cannot have.
    """
    config = getattr(source.config, "quantization_config", None)
    if not config:
        return options
    group_size = read_scheme(config, source.path)
    if options.quantization not in (None, "int8") or options.quantization_group_size not in (None, group_size):
        asked = f"quantization={options.quantization!r}, quantization_group_size={options.quantization_group_size!r}"
        raise ValueError(f"{asked}: {source.path} is int8 with quantization_group_size={group_size!r}; leave them out")
    if options.tensor_parallel_size > 1:
        raise ValueError(
            "tensor_parallel_size above 1 cannot be combined with a quantised checkpoint; load the unquantised with "
            "quantization='int8'"
        )
    return replace(options, quantization="int8", quantization_group_size=group_size)


class CompressedTensors(SafetensorsDirectory):
    """An int8 checkpoint, in either storage format, as `weight` (int8) and `weight_scale`."""

    def names(self) -> set[str]:
        stored = super().names()
        renamed = {name.replace(".weight_packed", ".weight") for name in stored}
        return {name for name in renamed if not name.endswith(".weight_shape")}

    def shape(self, name: str) -> tuple[int, ...]:
        if f"{name}_scale" not in self._file_of:
            return super().shape(name)
        packed = f"{name}_packed" in self._file_of
        stored = f"{name}_packed" if packed else name
        rows, columns = self._files[self._file_of[stored]].get_slice(stored).get_shape()
        return rows, columns * 4 if packed else columns

    def lazy(self, name: str, shape: tuple[int, ...]) -> LazyTensor:
        if f"{name}_packed" in self._file_of:
            return unpack(super().lazy(f"{name}_packed", shape)[:])
        return super().lazy(name, shape)


def unpack(packed: Tensor) -> Tensor:
    """Four int8 values from each int32: `[rows, columns / 4]` -> `[rows, columns]`."""
    return (packed.view(torch.uint8).short() - 128).to(torch.int8)
