"""A model's `config.json`, checked before anything is built from it.

transformers checks that each field has the right type. This file rejects the other wrong or unsupported values and
names the field. Otherwise a wrong shape would show much later, as an obscure error or as fluent nonsense.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from stage_a_naive.checkpoints.config_classes import CONFIG_CLASSES
from stage_a_naive.checkpoints.experts import check_experts
from stage_a_naive.contract.errors import ModelError, one_line, shown
from stage_a_naive.contract.params import as_number

# The kinds of rotary scaling that transformers has for these architectures, and the numbers that each needs. The model
# of stages D to F supports all but the last but one: see `stage_d_paged/rope.py`.
ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def read_config(path: Path) -> PretrainedConfig:
    """Read the configuration in the directory `path`.

    Raises:
        ModelError: it is missing, not a JSON object, invalid, or asks for an unsupported feature.
    """
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ModelError(f"{path} has no config.json; it is not a model directory in the Hugging Face layout")
    raw = read_json_object(config_file)
    model_type = raw.get("model_type")
    if model_type not in list(CONFIG_CLASSES):  # it may be anything, a list too
        supported = ", ".join(CONFIG_CLASSES)
        raise ModelError(f"architecture {shown(model_type)} is not supported; these are: {supported}")
    if raw.get("quantization_config"):
        raise ModelError(f"{path} is a quantised checkpoint, which is not supported; use the unquantised one")
    try:
        config = CONFIG_CLASSES[model_type].from_pretrained(path)
    except Exception as error:  # transformers validates with several exception types
        raise ModelError(f"{config_file}: {one_line(error)}") from error
    try:
        check_config(config)
    except ModelError as error:
        raise ModelError(f"{config_file}: {error}") from None
    return config


def read_json_object(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file; `ModelError` if the file holds something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a JSON {type(content).__name__}; an object is expected: {{…}}")
    return content


def check_config(config: PretrainedConfig) -> None:
    """Reject impossible sizes and features that no stage supports.

    Raises:
        ModelError: the message names the field.
    """
    for field in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ):
        value = getattr(config, field)
        if value is None or value < 1:
            raise ModelError(f"{field} must be 1 or more, got {shown(value)}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and config.hidden_size % heads:
        raise ModelError(f"hidden_size ({config.hidden_size}) is not a multiple of num_attention_heads ({heads})")
    head_dim = config.hidden_size // heads if head_dim is None else head_dim
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"head_dim is {head_dim}; rotary embeddings turn pairs of dimensions, so it must be even")
    if not config.rms_norm_eps > 0:
        raise ModelError(f"rms_norm_eps must be above 0, got {shown(config.rms_norm_eps)}")
    if config.pad_token_id not in (None, -1) and not 0 <= config.pad_token_id < config.vocab_size:  # -1: there is none
        raise ModelError(f"pad_token_id ({config.pad_token_id}) is outside the vocabulary of {config.vocab_size}")
    if config.model_type == "gemma3_text" and not config.query_pre_attn_scalar > 0:
        raise ModelError(f"query_pre_attn_scalar must be above 0, got {shown(config.query_pre_attn_scalar)}")
    for field in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, field, None):
            raise ModelError(f"{field}={shown(getattr(config, field))} is not supported; only models without it are")
    check_experts(config)
    _check_layer_kinds(config)
    for kind in dict.fromkeys(layer_kinds(config)):
        _check_rope(rope_of_kind(config, kind), head_dim)


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """Return the kind of each layer, `full_attention` or `sliding_attention`, as in transformers' models.

    Llama has no windows; in Mistral, Mixtral and Qwen3-MoE all layers have a window or none has; for other models
    `layer_types` decides.
    """
    if config.model_type == "llama":
        return ["full_attention"] * config.num_hidden_layers
    if config.model_type in ("mistral", "mixtral", "qwen3_moe"):
        return ["full_attention" if config.sliding_window is None else "sliding_attention"] * config.num_hidden_layers
    return list(config.layer_types)


def rope_of_kind(config: PretrainedConfig, kind: str) -> dict[str, Any]:
    """Return the rotary parameters for layers of this kind; in most models they are the same for all layers."""
    rope = config.rope_parameters or {}
    return rope.get(kind) or {} if config.model_type == "gemma3_text" else rope


def _check_layer_kinds(config: PretrainedConfig) -> None:
    kinds, window = layer_kinds(config), getattr(config, "sliding_window", None)
    given = getattr(config, "layer_types", None) or kinds
    if len(given) != config.num_hidden_layers:
        raise ModelError(
            f"layer_types has {len(given)} entries for {config.num_hidden_layers} layers; give one for each"
        )
    for kind, own in zip(given, kinds, strict=True):
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"layer_types has {shown(kind)}; supported are full_attention and sliding_attention")
        if kind != own:
            raise ModelError(f"layer_types has {shown(kind)}, but every layer of {config.model_type} here has {own}")
        if kind == "sliding_attention" and (window is None or window < 1):
            raise ModelError(
                f"layer_types has 'sliding_attention', and the window is {shown(window)}; set sliding_window to 1 or "
                "more (Qwen needs use_sliding_window=true too), or layer_types to full_attention"
            )


def _check_rope(rope: dict[str, Any], head_dim: int) -> None:
    rope_type = rope.get("rope_type", "default")
    check_rope_type(rope_type, ROPE_NUMBERS)
    for field in ("rope_theta", *ROPE_NUMBERS[rope_type]):
        if not _is_above_0(rope.get(field)):
            raise ModelError(f"{field} of rope_parameters must be a number above 0, got {shown(rope.get(field))}")
    for field in ("short_factor", "long_factor") if rope_type == "longrope" else ():
        factors = rope.get(field)
        if not isinstance(factors, list) or len(factors) != head_dim // 2 or not all(map(_is_above_0, factors)):
            raise ModelError(
                f"{field} of rope_parameters must be a list of {head_dim // 2} numbers above 0, half as many as "
                f"head_dim, got {shown(factors)}"
            )
    if rope_type != "default" and rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("partial_rotary_factor is not supported; only models that rotate whole heads are")


def check_rope_type(rope_type: object, supported: Iterable[str]) -> None:
    """Raise `ModelError` for a kind of rotary scaling that is not in `supported`."""
    if rope_type not in list(supported):  # it may be anything, a list too
        raise ModelError(f"rope scaling type {shown(rope_type)} is not supported; these are: {', '.join(supported)}")


def _is_above_0(value: object) -> bool:
    number = as_number(value)
    return number is not None and number > 0
