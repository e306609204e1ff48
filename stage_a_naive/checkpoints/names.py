"""Check the names of a model, a device and a dtype before PyTorch is imported."""

from __future__ import annotations

import os
from pathlib import Path

from stage_a_naive.checkpoints.presets import PRESETS
from stage_a_naive.checkpoints.tutor import require_tutor
from stage_a_naive.contract.errors import ModelError, shown

MODELS = "a model is 'tutor', 'random:<preset>', a directory, or a hub id 'owner/name'"
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "float16", "bfloat16")


def check_names(model: object, device: object, dtype: object) -> None:
    """Raise early the errors that `LLM` would raise later for these names.

    Raises:
        ValueError: the model (a `ModelError`), the device or the dtype is invalid.
    """
    check_model_name(model)
    check_device_name(device)
    check_dtype_name(dtype)


def check_model_name(model: object) -> str:
    """Return the name of a model, which may be given as a path.

    Raises:
        ModelError: there is no such preset or directory, and it is no hub id.
    """
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(name, str) or not name:
        raise ModelError(f"{MODELS}, got {shown(model)}")
    if name == "tutor" or name.startswith("random:"):
        require_tutor()  # random models borrow its tokenizer
    if name == "tutor":
        return name
    if name.startswith("random:"):
        preset = name.removeprefix("random:")
        if preset not in PRESETS:
            raise ModelError(f"no preset {preset!r}; there are: {', '.join('random:' + p for p in PRESETS)}")
        return name
    path = Path(name).expanduser()
    looks_like_hub_id = name.count("/") == 1 and not name.startswith(("/", ".", "~"))
    if path.exists() and not path.is_dir():
        raise ModelError(f"{path} is a file; give the directory that holds config.json")
    if not path.exists() and not looks_like_hub_id:
        raise ModelError(f"no such directory: {name!r} ({MODELS})")
    return name


def check_device_name(device: object) -> None:
    """Raise `ValueError` for a name that is no device of an engine; `cuda:1` is valid even without such a GPU."""
    if str(device).partition(":")[0] not in DEVICES:
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {str(device)!r}")


def check_dtype_name(dtype: object) -> str:
    """Return the name of a dtype; raise `ValueError` if no engine computes in it."""
    if not isinstance(dtype, str) or dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype must be 'auto' or one of {', '.join(DTYPES)}, got {dtype!r}")
    return dtype
