"""int8 checkpoints in the Hugging Face layout, as the libraries compressed-tensors and torchao write them.

`config.json` has a `quantization_config` that describes the format, and each matrix has a tensor of scales. Three
layouts are supported:

    compressed-tensors, int-quantized     weight: int8 [rows, columns]         weight_scale
    compressed-tensors, pack-quantized    weight_packed: four values of a      weight_scale
                                          row, plus 128, in one int32
    torchao, Int8WeightOnlyConfig         _weight_qdata: int8 [rows, columns]  _weight_scale

with a scale per row or per row and 128 columns. The values are used unchanged, not quantised again. Every other method
is refused by name: 4-bit formats (AWQ, GPTQ, NF4) need other kernels.
"""

from __future__ import annotations

from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beyond.options import Options
from beyond.quantization.options import GROUP_SIZE
from stage_a_naive.checkpoints.checkpoint import SafetensorsDirectory
from stage_a_naive.checkpoints.config_classes import CONFIG_CLASSES
from stage_a_naive.checkpoints.loading import ModelSource, resolve
from stage_a_naive.checkpoints.model_config import check_config, read_json_object
from stage_a_naive.checkpoints.tensor_source import LazyTensor
from stage_a_naive.contract.errors import ModelError
from stage_d_paged.weights import TensorSource, tensor_source

STORAGE = ("int-quantized", "pack-quantized")
# Names that become `weight` and `weight_scale`, and a name that is not needed: the file gives a packed matrix's shape.
RENAMED = {"weight_packed": "weight", "_weight_qdata": "weight", "_weight_scale": "weight_scale"}
UNUSED = ("weight_shape", "_weight_zero_point")

Condition = tuple[str, object, tuple[object, ...]]  # name, value, allowed values


def resolve_quantized(model: str | PathLike[str]) -> ModelSource:
    """Stage A's `resolve`, which also takes a directory with an int8 checkpoint.

    Raises:
        ModelError: as in stage A, or the checkpoint is quantised in a way that is not supported.
    """
    if not isinstance(model, (str, PathLike)):
        return resolve(model)
    path = Path(model).expanduser()
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
    if method not in SCHEMES:
        raise ModelError(
            f"{where} is quantised with {method!r}, which is not supported; int8 of {' and '.join(SCHEMES)} is, and so "
            "is the unquantised checkpoint with quantization='int8' or 'fp8'"
        )
    group_size, conditions = SCHEMES[method](config, where)
    for what, found, allowed in [*conditions, ("group_size", group_size, (None, GROUP_SIZE))]:
        if found not in allowed:
            supported = ", ".join(map(repr, allowed))
            raise ModelError(f"{where}: quantization_config has {what}={found!r}; supported: {supported}")
    return group_size


def _compressed_tensors(config: dict, where: object) -> tuple[int | None, list[Condition]]:
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise ModelError(f"{where} has {len(groups)} quantization groups; one, of all linear layers, is supported")
    [group] = groups
    weights = group.get("weights") or {}
    return weights.get("group_size") if weights.get("strategy") == "group" else None, [
        ("format", group.get("format") or config.get("format"), STORAGE),
        ("weights.num_bits", weights.get("num_bits"), (8,)),
        ("weights.type", weights.get("type"), ("int",)),
        ("weights.symmetric", weights.get("symmetric"), (True,)),
        ("weights.strategy", weights.get("strategy"), ("channel", "group")),
        ("weights.actorder", weights.get("actorder"), (None,)),
        ("input_activations", group.get("input_activations"), (None,)),
        ("output_activations", group.get("output_activations"), (None,)),
        ("targets", group.get("targets"), (["Linear"],)),
        ("ignore", config.get("ignore"), (["lm_head"],)),
        ("kv_cache_scheme", config.get("kv_cache_scheme"), (None,)),
        ("transform_config", config.get("transform_config") or None, (None,)),  # rotations of activations (SpinQuant)
    ]


def _torchao(config: dict, where: object) -> tuple[int | None, list[Condition]]:
    kind = config.get("quant_type")
    kind = (kind.get("default") or {}) if isinstance(kind, dict) else {"_type": kind}
    granularity = (kind.get("_data") or {}).get("granularity") or {}
    size = (granularity.get("_data") or {}).get("group_size")
    return size if granularity.get("_type") == "PerGroup" else None, [
        ("quant_type", kind.get("_type"), ("Int8WeightOnlyConfig",)),  # always symmetric: its zero points are zeros
        ("quant_type version", kind.get("_version"), (2,)),
        ("granularity", granularity.get("_type"), ("PerRow", "PerGroup")),
        ("modules_to_not_convert", config.get("modules_to_not_convert"), (None, ["lm_head"])),
        ("include_input_output_embeddings", config.get("include_input_output_embeddings"), (None, False)),
    ]


SCHEMES = {"compressed-tensors": _compressed_tensors, "torchao": _torchao}


def options_of_checkpoint(source: ModelSource, options: Options) -> Options:
    """Return the options with the checkpoint's format, if it is quantised.

    Raises:
        ValueError: an option asks for another format, or cannot be combined with a quantised checkpoint.
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


class Int8Tensors:
    """An int8 checkpoint in any of the layouts, read as `weight` (int8) and `weight_scale`."""

    def __init__(self, directory: SafetensorsDirectory) -> None:
        self.name, self._directory = directory.name, directory
        self._stored_as: dict[str, str] = {}
        for stored in directory.names():
            module, dot, last = stored.rpartition(".")
            if last not in UNUSED:
                self._stored_as[f"{module}{dot}{RENAMED.get(last, last)}"] = stored

    def names(self) -> set[str]:
        return set(self._stored_as)

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored_as[name]
        if f"{name}_scale" not in self._stored_as:
            return self._directory.shape(stored)
        part: Any = self._directory.lazy(stored, ())
        if part.get_dtype() not in ("I8", "I32"):
            raise ModelError(f"{stored} in {self.name} is stored as {part.get_dtype()}; supported is int8")
        rows, columns = part.get_shape()
        return rows, columns * 4 if stored.endswith("_packed") else columns

    def lazy(self, name: str, shape: tuple[int, ...]) -> LazyTensor:
        stored = self._stored_as[name]
        tensor = self._directory.lazy(stored, shape)
        return unpack(tensor[:]) if stored.endswith("_packed") else tensor


def open_tensors(source: ModelSource, seed: int, dtype: torch.dtype, device: torch.device) -> TensorSource:
    """Find the weights of a model, as stage D's `tensor_source` does, also in an int8 checkpoint."""
    tensors = tensor_source(source, seed, dtype, device)
    if getattr(source.config, "quantization_config", None) and isinstance(tensors, SafetensorsDirectory):
        return Int8Tensors(tensors)
    return tensors


def unpack(packed: Tensor) -> Tensor:
    """Unpack four int8 values from each int32: `[rows, columns / 4]` -> `[rows, columns]`."""
    return (packed.view(torch.uint8).short() - 128).to(torch.int8)
