"""The configuration classes of the supported architectures, imported without the rest of transformers.

Importing these classes normally does three further things, which are skipped here. Together they import every model,
PyTorch's compiler and its distributed tensors, which takes seconds at every start. Stages A to C import the models
anyway when they build one; stages D to F never do.

- where torchvision is installed, transformers imports it, to tell types of images and videos;
- transformers generates the docstring of each class at import, and imports the class's model to name it;
- it checks the name of an activation function against all that it has. An unknown name is found when the model is
  built.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from unittest.mock import patch

import torch
import transformers
from transformers import PretrainedConfig
from transformers.utils.import_utils import is_torch_available

# What uses torchvision, and is imported here without it: see the end of this file.
vision = {f"transformers.{name}" for name in ("image_utils", "image_transforms", "video_utils")} - set(sys.modules)

# The validators import these two modules. Import them now, because below PyTorch seems to be missing.
with patch("transformers.utils.is_torchvision_available", lambda: False):
    from transformers import tokenization_utils_base, video_utils  # noqa: F401

with suppress(ImportError), patch("transformers.utils.import_utils.is_torch_available", lambda: False):
    from transformers.utils import type_validators

    type_validators.torch, type_validators.is_torch_available = torch, is_torch_available


def undocumented(cls: type | None = None, **_: object) -> object:
    """Replace transformers' class decorator `auto_docstring`: return the class unchanged."""
    return cls if cls is not None else undocumented


with patch("transformers.utils.auto_docstring", undocumented):
    from transformers import (
        Gemma3TextConfig,
        LlamaConfig,
        MistralConfig,
        MixtralConfig,
        Qwen2Config,
        Qwen2MoeConfig,
        Qwen3Config,
        Qwen3MoeConfig,
    )

CONFIG_CLASSES: dict[str, type[PretrainedConfig]] = {
    config.model_type: config
    for config in (
        LlamaConfig,
        MistralConfig,
        Qwen2Config,
        Qwen3Config,
        Gemma3TextConfig,
        MixtralConfig,
        Qwen2MoeConfig,
        Qwen3MoeConfig,
    )
}

for name in vision:  # who needs them imports them again, with torchvision
    sys.modules.pop(name, None)
    transformers.__dict__.pop(name.removeprefix("transformers."), None)  # pyright: ignore[reportAttributeAccessIssue] (a dictionary)
