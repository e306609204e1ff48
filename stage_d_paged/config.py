"""The numbers that define a decoder, read from a Hugging Face `config.json`.

Qwen2, Qwen3, Llama, Mistral and Gemma 3 are one architecture with a few switches: Qwen2 adds a bias to the Q, K and V
projections, Qwen3 normalises every query and key head, Gemma 3 also normalises what a layer adds. Three things may
differ from layer to layer: how far back a layer sees, how it rotates its heads, and whether it has experts. Each layer
has a row in a table (`layers`).
Stage A has already rejected other architectures and impossible sizes. Features that only this model lacks are rejected
here by name, because ignoring them would give fluent nonsense.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from stage_a_naive.checkpoints.experts import Experts, experts_of_layers
from stage_a_naive.checkpoints.model_config import check_config, check_rope_type, layer_kinds, rope_of_kind
from stage_a_naive.contract.errors import ModelError
from stage_d_paged.layers import ACTIVATIONS
from stage_d_paged.rope import SCALINGS, Rope

# Options of a config, with the architectures whose transformers models use them.
HAS_ATTENTION_BIAS, HAS_MLP_BIAS = ("llama", "qwen3", "qwen3_moe", "gemma3_text"), ("llama",)


@dataclass(frozen=True)
class LayerKind:
    """The properties in which the layers of one model may differ."""

    window: int = 0  # tokens that a query sees, itself included; 0: all before it
    rope: Rope = Rope()
    experts: Experts | None = None  # None: an ordinary MLP


@dataclass(frozen=True)
class ModelConfig:
    """Shape and variant of a decoder; everything `DecoderModel` needs to be built."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerKind, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    qkv_bias: bool  # Qwen2, Qwen2-MoE
    qk_norm: bool  # Qwen3, Qwen3-MoE, Gemma 3
    tie_word_embeddings: bool
    output_bias: bool = False  # of the attention: `attention_bias`, which also applies to Q, K and V
    mlp_bias: bool = False
    activation: str = "silu"
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    embedding_scale: float = 1.0
    is_gemma: bool = False  # norms of weight 1 + w, four per layer

    @property
    def has_experts(self) -> bool:
        return any(kind.experts for kind in self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def from_hf(cls, config: PretrainedConfig) -> ModelConfig:
        """Convert a Hugging Face config; `ModelError` names an unsupported feature."""
        check_config(config)
        heads, is_gemma = config.num_attention_heads, config.model_type == "gemma3_text"
        attention_bias = config.model_type in HAS_ATTENTION_BIAS and bool(config.attention_bias)
        activation = config.hidden_activation if is_gemma else config.hidden_act
        if activation not in ACTIVATIONS:
            raise ModelError(f"the activation {activation!r} is not supported; these are: {', '.join(ACTIVATIONS)}")
        windows = {"full_attention": 0, "sliding_attention": getattr(config, "sliding_window", None) or 0}
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=tuple(
                LayerKind(windows[kind], _rope(rope_of_kind(config, kind)), experts)
                for kind, experts in zip(layer_kinds(config), experts_of_layers(config), strict=True)
            ),
            num_heads=heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            qkv_bias=attention_bias or config.model_type == "qwen2" or bool(getattr(config, "qkv_bias", False)),
            qk_norm=config.model_type in ("qwen3", "qwen3_moe") or is_gemma,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            output_bias=attention_bias,
            mlp_bias=config.model_type in HAS_MLP_BIAS and bool(config.mlp_bias),
            activation="silu" if activation == "swish" else activation,  # two names of one function
            attention_scale=config.query_pre_attn_scalar**-0.5 if is_gemma else None,
            embedding_scale=config.hidden_size**0.5 if is_gemma else 1.0,
            is_gemma=is_gemma,
        )

    @property
    def beyond_kernels(self) -> str:
        """Features of this model that kernels for a whole layer or MLP do not compute; "" if there are none."""
        found = {
            "experts": self.has_experts,
            "four norms per layer": self.is_gemma,
            "a bias behind attention": self.output_bias,
            "biases in the MLP": self.mlp_bias,
            f"the activation {self.activation}": self.activation != "silu",
        }
        return ", ".join(name for name, is_there in found.items() if is_there)


def _rope(rope: dict) -> Rope:
    """Read the base and the scaling of the rotary embedding. transformers 5 keeps both in `rope_parameters`."""
    rope_type = rope.get("rope_type", "default")
    check_rope_type(rope_type, SCALINGS)  # stages A to C know one more
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("partial_rotary_factor is not supported; only models that rotate whole heads are")
    return Rope(float(rope["rope_theta"]), SCALINGS[rope_type](rope))
