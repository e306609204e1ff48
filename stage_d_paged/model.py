"""The decoder: Qwen2, Qwen3, Llama, Mistral and Gemma 3, written out, on flat batches and a paged KV cache.

A batch is the tokens of all its sequences, one after another: `input_ids [tokens]`, no batch dimension, no padding. The
linears process every token separately; only attention depends on the sequence of a token, which the `AttentionMetadata`
describes. One layer changes the residual stream `x` as follows:

    x = x + o_proj(attention(rotary(qkv_proj(norm(x)))))
    x = x + down_proj(silu(gate) * up),   gate, up = gate_up_proj(norm(x))

Layers may differ in how far back they see and in how they rotate their heads; see the rows of `ModelConfig.layers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stage_a_naive.contract.errors import ModelError
from stage_d_paged.attention import AttentionBackend, AttentionMetadata
from stage_d_paged.config import LayerKind, ModelConfig
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.layers import (
    ACTIVATIONS,
    Embedding,
    Linear,
    OffsetQKNorm,
    OffsetRMSNorm,
    QKNorm,
    RMSNorm,
    RotaryEmbedding,
    rotate,
)
from stage_d_paged.weights import WeightLoader

MakeLinear = Callable[[int, dict[str, int], bool, torch.dtype, torch.device], Any]  # makes a module like `Linear`
MakeEmbedding = Callable[[int, int, torch.dtype, torch.device], Any]  # makes a module like `Embedding`
MakeMLP = Callable[[ModelConfig, LayerKind, torch.dtype, torch.device, MakeLinear], Any]  # makes a module like `MLP`


class Attention(nn.Module):
    """Grouped-query self-attention with its keys and values in the pool's blocks."""

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        linear: MakeLinear,
        kind: LayerKind,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.window = kind.window
        self.backend = backend
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.qkv_proj = linear(config.hidden_size, parts, config.qkv_bias, dtype, device)
        self.qk_norm = None
        if config.qk_norm:
            make, eps = OffsetQKNorm if config.is_gemma else QKNorm, config.rms_norm_eps
            self.qk_norm = make(self.num_heads, self.num_kv_heads, self.head_dim, eps, dtype, device)
        self.o_proj = linear(query, {"o_proj": config.hidden_size}, config.output_bias, dtype, device)

    def load(self, weights: WeightLoader, prefix: str) -> None:
        self.qkv_proj.load(weights, prefix)
        if self.qk_norm is not None:
            self.qk_norm.load(weights, prefix)
        self.o_proj.load(weights, prefix)

    def forward(
        self,
        x: Tensor,  # [tokens, hidden], normalised
        residual: Tensor | None,  # [tokens, hidden], overwritten by the sum; None: return only the addend
        rotation: tuple[Tensor, Tensor],
        layer_cache: tuple[Tensor, Tensor],  # each [blocks, block_size, kv_heads, head_dim]
        metadata: AttentionMetadata,
    ) -> Tensor:
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)  # [tokens, heads + 2 kv_heads, head_dim]
        qk, value = qkv.split_with_sizes((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        query, key = rotate(qk, *rotation).split_with_sizes((self.num_heads, self.num_kv_heads), dim=1)
        self.backend.store(key, value, *layer_cache, metadata.slot_mapping)
        attended = self.backend.attend(query, *layer_cache, metadata, self.scale, self.window)
        return self.o_proj(attended.flatten(1), residual)


class MLP(nn.Module):
    """`down(act(gate(x)) * up(x))`: with SiLU the SwiGLU of Shazeer, "GLU Variants Improve Transformer" (2020)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, linear: MakeLinear) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        parts = {"gate_proj": intermediate, "up_proj": intermediate}
        self.gate_up_proj = linear(hidden, parts, config.mlp_bias, dtype, device)
        self.down_proj = linear(intermediate, {"down_proj": hidden}, config.mlp_bias, dtype, device)
        self.activation = ACTIVATIONS[config.activation]

    def load(self, weights: WeightLoader, prefix: str) -> None:
        self.gate_up_proj.load(weights, prefix)
        self.down_proj.load(weights, prefix)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # each [tokens, intermediate]
        return self.down_proj(self.activation(gate).mul_(up), residual)


def make_mlp(config: ModelConfig, kind: LayerKind, dtype: torch.dtype, device: torch.device, linear: MakeLinear) -> MLP:
    """Make the MLP of a layer; `ModelError` for a layer with experts, which this model lacks."""
    if kind.experts is not None:
        raise ModelError(
            "layers with experts run in stages A to C, by transformers, and in beyond.experts; use its LLM"
        )
    return MLP(config, dtype, device, linear)


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    norms = "input_layernorm", "post_attention_layernorm"
    make_norm: type[RMSNorm] = RMSNorm
    rotary = 0  # index of the model's rotary table for this layer
    input_layernorm: Any
    post_attention_layernorm: Any

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        linear: MakeLinear,
        mlp: MakeMLP,
        kind: LayerKind,
    ) -> None:
        super().__init__()
        self.self_attn = Attention(config, backend, dtype, device, linear, kind)
        self.mlp = mlp(config, kind, dtype, device, linear)
        for name in self.norms:
            setattr(self, name, self.make_norm(config.hidden_size, config.rms_norm_eps, dtype, device))
        self.most_fused_rows = 0  # for up to this many tokens, stage C's operator computes the norm and the MLP

    def load(self, weights: WeightLoader, prefix: str) -> None:
        for name in (*self.norms, "self_attn", "mlp"):
            getattr(self, name).load(weights, f"{prefix}.{name}")

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        layer_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        x = self.self_attn(self.input_layernorm(x), x, rotation, layer_cache, metadata)
        norm, mlp = self.post_attention_layernorm, self.mlp
        if x.shape[0] <= self.most_fused_rows:
            return torch.ops.six_engines.fused_swiglu_mlp(
                x, norm.weight, mlp.gate_up_proj.weight, mlp.down_proj.weight, x, norm.eps, "auto"
            )
        return mlp(norm(x), x)


class GemmaLayer(DecoderLayer):
    """A layer of Gemma 3, which also normalises the outputs of attention and MLP."""

    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    make_norm = OffsetRMSNorm
    pre_feedforward_layernorm: OffsetRMSNorm
    post_feedforward_layernorm: OffsetRMSNorm

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        layer_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), None, rotation, layer_cache, metadata)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x), None))


class DecoderModel(nn.Module):
    """A whole decoder. Its weights are uninitialised until `load`.

    Args:
        config: the shape of the model.
        backend: how attention reads the KV cache's blocks.
        max_model_len: positions that the rotary tables cover.
        dtype, device: of its weights.
        linear, lm_head, mlp: make its matrices and MLPs; called like the defaults.
    """

    # Modules with the same interface but maybe of another class: later stages replace them.
    embed_tokens: Any
    rotaries: Any
    layers: Any
    norm: Any
    lm_head: Any

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        linear: MakeLinear = Linear,
        lm_head: MakeEmbedding = Embedding,
        mlp: MakeMLP = make_mlp,
    ) -> None:
        super().__init__()
        self.config = config
        tied = config.tie_word_embeddings  # the table of tokens is the LM head
        self.embed_tokens = (lm_head if tied else Embedding)(config.vocab_size, config.hidden_size, dtype, device)
        # `embed_tokens` returns rows in `dtype`, so the factor is rounded to it too.
        self.embedding_scale = torch.tensor(config.embedding_scale).to(dtype).item()
        ropes = list(dict.fromkeys(kind.rope for kind in config.layers))  # most models have one
        tables = (RotaryEmbedding(rope, config.head_dim, max_model_len, dtype, device) for rope in ropes)
        self.rotaries = nn.ModuleList(tables)
        make_layer = GemmaLayer if config.is_gemma else DecoderLayer
        layers = (make_layer(config, backend, dtype, device, linear, mlp, kind) for kind in config.layers)
        self.layers = nn.ModuleList(layers)
        for layer, kind in zip(self.layers, config.layers, strict=True):
            layer.rotary = ropes.index(kind.rope)
        self.norm = make_layer.make_norm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.lm_head = self.embed_tokens if tied else lm_head(config.vocab_size, config.hidden_size, dtype, device)

    def load(self, weights: WeightLoader) -> None:
        """Fill all weights; `ModelError` names a weight that is missing, left over, or of the wrong shape."""
        self.embed_tokens.load(weights, "model.embed_tokens")
        for i, layer in enumerate(self.layers):
            layer.load(weights, f"model.layers.{i}")
        self.norm.load(weights, "model.norm")
        if self.lm_head is not self.embed_tokens:
            self.lm_head.load(weights, "lm_head")
        elif weights.has("lm_head.weight"):
            self.lm_head.check_copy(weights, "lm_head")
        weights.finish()

    def forward(
        self,
        input_ids: Tensor,  # [tokens]
        positions: Tensor,  # [tokens]
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Run all layers, write the tokens' K and V into the pool, and return the final states `[tokens, hidden]`."""
        x = self.embed_tokens(input_ids)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        rotations = [rotary(positions) for rotary in self.rotaries]
        for layer, layer_cache in zip(self.layers, kv_cache.layers, strict=True):
            x = layer(x, rotations[layer.rotary], layer_cache, metadata)
        return self.norm(x)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the next token's logits: `[rows, hidden]` -> `[rows, vocab]`, in the model's dtype, or into `out`."""
        return self.lm_head.logits(hidden, out)
