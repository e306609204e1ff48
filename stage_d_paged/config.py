"""The numbers that define a decoder, read from a Hugging Face `config.json`.

Qwen2, Qwen3 and Llama are one architecture with three switches: Qwen2 adds a bias to the Q, K and V projections, Qwen3
normalises every query and key head, Llama 3 stretches the rotary frequencies. Stage A has refused other architectures
and impossible sizes; what only a model of one's own can lack is refused here by name: computing something else in
silence would give fluent nonsense.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from stage_a_naive.checkpoints.model_config import check_config, check_rope_type
from stage_a_naive.contract.errors import ModelError


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rotary frequency scaling: low frequencies divided by `factor`, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelConfig:
    """Shape and variant of a decoder; everything `DecoderModel` needs to be built."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    qkv_bias: bool  # Qwen2
    qk_norm: bool  # Qwen3
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, config: PretrainedConfig) -> ModelConfig:
        """Translate a Hugging Face config; `ModelError` names what is not supported."""
        check_config(config)
        _refuse_unsupported(config)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        theta, scaling = _rope(config)
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=config.model_type == "qwen2",
            qk_norm=config.model_type == "qwen3",
            tie_word_embeddings=bool(config.tie_word_embeddings),
        )


def _refuse_unsupported(config: PretrainedConfig) -> None:
    check_rope_type(
        config.rope_parameters.get("rope_type", "default"), ("default", "llama3")
    )  # stages A to C know more
    if config.hidden_act not in ("silu", "swish"):  # two names of one function
        raise ModelError(f"the activation {config.hidden_act!r} is not supported; only 'silu' is")
    for flag in ("attention_bias", "mlp_bias"):
        if getattr(config, flag, False):
            raise ModelError(f"{flag}=true is not supported; only Qwen2's biases of Q, K and V are")
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("partial_rotary_factor is not supported; only models that rotate whole heads are")


def _rope(config: PretrainedConfig) -> tuple[float, Llama3Scaling | None]:
    """Read base and scaling of the rotary embedding. transformers 5 keeps both in `rope_parameters`."""
    rope = config.rope_parameters
    theta = float(rope["rope_theta"])
    if rope.get("rope_type", "default") == "default":
        return theta, None
    return theta, Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(rope["original_max_position_embeddings"]),
    )
