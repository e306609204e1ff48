"""Checkpoints of tiny models with random weights, as transformers saves them."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from stage_a_naive.checkpoints.loading import ModelSource, load_hf_model
from stage_a_naive.checkpoints.presets import preset_config
from stage_a_naive.checkpoints.tutor import TUTOR_PATH


def save_tiny(path: Path, preset: str, without_head: bool = False, **changes: object) -> Path:
    """Save a preset, some fields of its configuration changed, with the tutor's tokenizer; returns `path`.

    Args:
        without_head: save the layers alone, whose tensors have no prefix then.
    """
    config = preset_config(preset)
    for field, value in changes.items():
        setattr(config, field, value)
    model = load_hf_model(ModelSource(preset, config, None, path), torch.device("cpu"), torch.float32, 3)
    (model.model if without_head else model).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TUTOR_PATH / file, path / file)
    return path
