"""From a model's name to a model on a device.

A name is one of four things: `tutor` (the model embedded in this repository), `random:<preset>` (a real shape with
random weights), a directory in the Hugging Face layout, or a hub id such as `Qwen/Qwen2.5-0.5B-Instruct`. Everything
that can be wrong with a model is found here, before anything runs, and raised as a `ModelError` that says what to do.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from stage_a_naive.checkpoints import names
from stage_a_naive.checkpoints.checkpoint import SafetensorsDirectory, WeightLoader, check_finite
from stage_a_naive.checkpoints.experts import ExpertTensors, names_of_experts
from stage_a_naive.checkpoints.memory import check_room
from stage_a_naive.checkpoints.model_config import read_config, read_json_object
from stage_a_naive.checkpoints.presets import preset_config
from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.contract.errors import ModelError, one_line, shown
from stage_a_naive.contract.params import as_integer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in names.DTYPES}


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from; its files are checked, but its weights are not read yet."""

    name: str
    config: PretrainedConfig
    path: Path | None  # None: random weights
    tokenizer_path: Path


def resolve(model: str | os.PathLike[str]) -> ModelSource:
    """Find the model with this name, and reject models that these engines do not support.

    Raises:
        ModelError: there is no such model, or it has unsupported features.
    """
    name = names.check_model_name(model)
    if name.startswith("random:"):
        return ModelSource(name, preset_config(name.removeprefix("random:")), None, TUTOR_PATH)
    path = TUTOR_PATH if name == "tutor" else _local_or_downloaded(name)
    return ModelSource(name, read_config(path), path, path)


def _local_or_downloaded(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    try:
        files = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.*", "tokenizer.model"]
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # the hub has many errors: no network, no such repository, no access
        raise ModelError(f"no directory {name!r} here, and the hub does not give it: {_why_not(error)}") from error


def _why_not(error: Exception) -> str:
    """Say why the hub does not give a model, and what to do."""
    if isinstance(error, GatedRepoError):
        return "access is restricted; accept its licence on its page, then `hf auth login` or set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "it has no such model, or your token may not see it; check the name, and HF_TOKEN if it is private"
    if isinstance(error, LocalEntryNotFoundError):
        return "it cannot be reached, and the model is not in the cache; download it elsewhere and pass its directory"
    return f"{one_line(error)[:200]}; try again, or download it elsewhere and pass its directory"


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerFast:
    """Read the model's `tokenizer.json`; set a padding token if there is none, because batching needs one.

    The class is named here and not chosen by `AutoTokenizer`, whose import also imports every model class of
    transformers and PyTorch's compiler (1.5 s at every start). The class that it would choose reads the same file.
    """
    folder = source.tokenizer_path
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder} has no tokenizer.json; only tokenizers in that format are supported")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # what transformers raises for a broken file is not documented
        for file in filter(Path.is_file, (folder / "tokenizer.json", folder / "tokenizer_config.json")):
            read_json_object(file)  # if a file is the reason, this names it
        why = f"{type(error).__name__}: {one_line(error)}"
        raise ModelError(f"the tokenizer in {folder} does not load ({why}); download it again") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def eos_token_ids(source: ModelSource, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Return every id that ends a generation: a model may list several in `generation_config.json`."""
    declared = source.config.eos_token_id
    file = source.tokenizer_path / "generation_config.json"  # optional
    if file.is_file():
        declared = read_json_object(file).get("eos_token_id", declared)
    ids = declared if isinstance(declared, list) else [declared]
    if not all(i is None or as_integer(i) is not None for i in ids):
        raise ModelError(f"{file}: eos_token_id must be a token id or a list of them, got {shown(declared)}")
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)


def pick_seed(seed: int) -> int:
    """Return a seed as a Python integer; `ValueError` if it is no integer or negative."""
    value = as_integer(seed)
    if value is None or value < 0:
        raise ValueError(f"seed must be an integer, 0 or more, got {shown(seed)}")
    return value


def pick_device(device: str) -> torch.device:
    """Return the device: for `auto` a GPU if there is one; `ValueError` if the named device does not exist."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names.check_device_name(device)
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but PyTorch sees no GPU; use device='cpu' or run `make doctor`")
    if chosen.type == "cuda" and chosen.index is not None and chosen.index >= torch.cuda.device_count():
        raise ValueError(f"device {device!r} was asked for, but there are only {torch.cuda.device_count()} GPUs")
    if chosen.type == "cuda" and chosen.index is not None and chosen.index != torch.cuda.current_device():
        # Triton launches on the current GPU. Setting it here would change it for this thread only.
        raise ValueError(
            f"device {device!r} was asked for, but kernels run on the first GPU that a process sees; "
            "let CUDA_VISIBLE_DEVICES name that GPU alone, and use device='cuda'"
        )
    return chosen


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype: for `auto` bfloat16 on a GPU and float32 on a CPU (which computes bfloat16 slowly)."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    return DTYPES[names.check_dtype_name(dtype)]


def load_hf_model(
    source: ModelSource, device: torch.device, dtype: torch.dtype, seed: int = 0, **model_options: Any
) -> PreTrainedModel:
    """Build the model with transformers, in inference mode on `device`.

    Args:
        seed: for the weights of a `random:` preset.
        model_options: passed to transformers, e.g. `attn_implementation`.

    Raises:
        ModelError: a weight is missing, extra, of the wrong shape, or unreadable.
        MemoryError: the device does not have enough memory for the weights.
    """
    from transformers import AutoModelForCausalLM  # here, because stages D to F have their own model and do not need it

    described = _describe(source, dtype, model_options)
    check_room(described, device)
    if source.path is None:
        return _random_hf_model(source, device, dtype, seed, **model_options)
    _check_weights(source, described)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # what it warns about was checked already
    try:
        model = AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype, use_safetensors=True, **model_options)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ModelError(f"the weights in {source.path} do not load: {one_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    for name, weight in model.named_parameters():
        check_finite(weight, name)
    return model.eval().to(device)  # pyright: ignore[reportArgumentType] (transformers' decorator hides `self`)


def _describe(source: ModelSource, dtype: torch.dtype, model_options: dict[str, Any]) -> PreTrainedModel:
    """Build the model that the config describes with shapes and dtypes only, without memory."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(source.config, dtype=dtype, **model_options)
    except Exception as error:  # what transformers raises for a config that it cannot build is not documented
        where = source.path / "config.json" if source.path else source.name
        raise ModelError(f"{where} describes no model: {one_line(error)}") from error


def _check_weights(source: ModelSource, described: PreTrainedModel) -> None:
    """Compare the headers of the weight files with the model that the config describes."""
    assert source.path is not None
    tensors = SafetensorsDirectory(source.path)
    weights = WeightLoader(ExpertTensors(tensors, getattr(source.config, "num_experts", 0)))
    shapes = [names_of_experts(name, tuple(weight.shape)) for name, weight in described.named_parameters()]
    for name, shape in chain.from_iterable(map(dict.items, shapes)):  # tied weights once
        stored = weights.lazy(name, shape)
        if source.config.tie_word_embeddings and name == "model.embed_tokens.weight" and weights.has("lm_head.weight"):
            weights.check_equal(stored[:], "lm_head.weight")
    weights.finish()


def _random_hf_model(
    source: ModelSource, device: torch.device, dtype: torch.dtype, seed: int, **model_options: Any
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(source.config, dtype=dtype, **model_options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random_tensor(name, parameter.shape, seed, device, dtype))
    return model.eval()


def random_tensor(name: str, shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Make a weight of a `random:` preset for the parameter with this Hugging Face name.

    It depends only on the name and the seed (and on the kind of device, because generators differ), so every stage
    builds the same model in any order. Matrices have standard deviation 1/sqrt(fan-in), which keeps activations near 1;
    norm weights are close to 1.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
    noise = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    if name.endswith("norm.weight"):
        return (1 + 0.1 * noise).to(dtype)
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
    return (noise * scale).to(dtype)
