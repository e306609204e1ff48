"""The configuration classes of the supported architectures, imported without everything else of transformers.

transformers writes the docstring of each such class while it is imported, and to name the class's model there it
imports every model, and with them PyTorch's compiler: 1.5 s of every start. So the docstrings are left out here. Stages
A to C import the models anyway when they build one; stages D to F never do.
"""

from __future__ import annotations

from unittest.mock import patch

from transformers import PretrainedConfig


def undocumented(cls: type | None = None, **_: object) -> object:
    """Stand in for transformers' class decorator `auto_docstring`: return the class as it is."""
    return cls if cls is not None else undocumented


with patch("transformers.utils.auto_docstring", undocumented):
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

CONFIG_CLASSES: dict[str, type[PretrainedConfig]] = {
    config.model_type: config for config in (LlamaConfig, Qwen2Config, Qwen3Config)
}
