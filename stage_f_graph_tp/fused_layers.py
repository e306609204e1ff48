"""Stage D's layers with the work between the matrix products fused.

`fuse_layers(model)` exchanges the parts of a built model for ones that hold the same weights and call the kernels of
`fused_kernels.py`. A layer of Qwen2 is then nine launches: norm, QKV, rotate and store, attention, output with
residual; norm, gate and up, activation, down with residual. It works on whole models and on one rank's share alike.
"""

from __future__ import annotations

from torch import Tensor, nn

from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.layers import RMSNorm, RotaryEmbedding
from stage_d_paged.model import MLP, Attention, DecoderModel
from stage_f_graph_tp.fused_kernels import rms_norm, rotate_and_store, silu_and_multiply

Rotation = tuple[Tensor, Tensor, Tensor]


class RotaryTables(nn.Module):
    """Hands the tables and the positions on; the fused kernel looks its rows up by itself."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, positions: Tensor) -> Rotation:
        return self.rotary.cos, self.rotary.sin, positions


class FusedAttention(nn.Module):
    """Grouped-query attention with one kernel between the QKV product and attention."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.num_heads = attention.num_heads
        self.head_dim = attention.head_dim
        self.scale = attention.scale
        self.backend = attention.backend
        self.qkv_proj = attention.qkv_proj
        self.qk_norm = attention.qk_norm
        self.o_proj = attention.o_proj

    def forward(
        self,
        x: Tensor,  # [tokens, hidden], normalised
        residual: Tensor,  # [tokens, hidden], overwritten by the sum
        rotation: Rotation,
        layer_cache: tuple[Tensor, Tensor],  # each [blocks, block_size, kv_heads, head_dim]
        metadata: AttentionMetadata,
    ) -> Tensor:
        cos, sin, positions = rotation
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)  # [tokens, heads + 2 kv_heads, head_dim]
        norm = None if self.qk_norm is None else (self.qk_norm.weight, self.qk_norm.eps)
        slots = metadata.slot_mapping
        query = rotate_and_store(qkv, self.num_heads, (cos, sin), positions, layer_cache, slots, norm)
        attended = self.backend.attend(query, *layer_cache, metadata, self.scale)  # [tokens, heads, head_dim]
        return self.o_proj(attended.flatten(1), residual)


class FusedNorm(nn.Module):
    """RMSNorm as one small kernel."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class FusedMLP(nn.Module):
    """SwiGLU with its activation in one kernel."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.gate_up_proj = mlp.gate_up_proj
        self.down_proj = mlp.down_proj

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.down_proj(silu_and_multiply(self.gate_up_proj(x)), residual)


def fuse_layers(model: DecoderModel) -> None:
    """Exchange a model's parts for fused ones, in place; no weight is copied."""
    model.rotary = RotaryTables(model.rotary)
    model.norm = FusedNorm(model.norm)
    for layer in model.layers:
        layer.input_layernorm = FusedNorm(layer.input_layernorm)
        layer.post_attention_layernorm = FusedNorm(layer.post_attention_layernorm)
        layer.self_attn = FusedAttention(layer.self_attn)
        layer.mlp = FusedMLP(layer.mlp)
