"""Stage D's layers with few launches.

`fuse_layers(model)` exchanges the layers of a built model for ones that hold the same weights and call other kernels:

    any number of tokens   norm · QKV · rotate + store · attention · output + residual
                           norm · gate-up · silu × up · down + residual                        nine launches
    a few                  norm + QKV + rotate + store · attention · output + residual + norm
                           gate-up + silu × up · down + residual                               five

It works on whole models and on one rank's share alike.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.layers import ResidualLinear, RMSNorm, RotaryEmbedding
from stage_d_paged.model import DecoderLayer, DecoderModel
from stage_f_graph_tp.few_rows import FEW_ROWS, Stream, gate_up_silu, product_add, qkv_rotate, scale_rows
from stage_f_graph_tp.fused_kernels import rms_norm, rotate_and_store, silu_and_multiply

Rotation = tuple[Tensor, Tensor, Tensor]
_MOST_TILES = 4096  # of a product of a few rows that is split: counters made in advance


class RotaryTables(nn.Module):
    """Hands the tables and the positions on; the fused kernels look their rows up by themselves."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.cos, self.sin = rotary.cos, rotary.sin

    def forward(self, positions: Tensor) -> Rotation:
        return self.cos, self.sin, positions


class FusedNorm(nn.Module):
    """RMSNorm as one small kernel."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class FusedLayer(nn.Module):
    """A decoder layer in nine launches, or, for a few tokens, five.

    Args:
        layer: whose weights it works with.
        next_norm: the norm that reads the layer's output; None after the last layer.
        arrivals: int32 zeros for `product_add`, shared by all layers.
        few_rows: tokens up to which it takes five.
    """

    def __init__(self, layer: DecoderLayer, next_norm: RMSNorm | None, arrivals: Tensor, few_rows: int) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp
        self._next_gain = None if next_norm is None else next_norm.weight.detach()  # not a second parameter
        self._arrivals = arrivals
        self._few_rows = few_rows

    def forward(
        self,
        x: Tensor | Stream,  # [tokens, hidden], overwritten
        rotation: Rotation,
        layer_cache: tuple[Tensor, Tensor],  # each [blocks, block_size, kv_heads, head_dim]
        metadata: AttentionMetadata,
    ) -> Tensor | Stream:
        attention = self.self_attn
        if metadata.slot_mapping.shape[0] > self._few_rows:
            query = self._queries(x, rotation, layer_cache, metadata.slot_mapping)
            attended = attention.backend.attend(query, *layer_cache, metadata, attention.scale)
            return self._mlp(attention.o_proj(attended.flatten(1), x))
        stream = x if isinstance(x, Stream) else scale_rows(x, self.input_layernorm.weight)
        query = self._few_queries(stream, rotation, layer_cache, metadata.slot_mapping)
        attended = attention.backend.attend(query, *layer_cache, metadata, attention.scale)  # [tokens, heads, head_dim]
        norm, mlp = self.post_attention_layernorm, self.mlp
        stream = self._add_product(attended.flatten(1), attention.o_proj, stream.x, norm.weight)
        activated = gate_up_silu(stream, norm.eps, mlp.gate_up_proj.weight)
        return self._add_product(activated, mlp.down_proj, stream.x, self._next_gain)

    def _queries(self, x: Tensor, rotation: Rotation, layer_cache: tuple[Tensor, Tensor], slots: Tensor) -> Tensor:
        """Rotated queries, `[tokens, heads, head_dim]`; keys and values go into their pages."""
        attention, norm = self.self_attn, self.input_layernorm
        cos, sin, positions = rotation
        packed = attention.qkv_proj(rms_norm(x, norm.weight, norm.eps)).view(x.shape[0], -1, attention.head_dim)
        return rotate_and_store(packed, attention.num_heads, (cos, sin), positions, layer_cache, slots, self._head_norm)

    def _few_queries(
        self, stream: Stream, rotation: Rotation, layer_cache: tuple[Tensor, Tensor], slots: Tensor
    ) -> Tensor:
        attention, qkv = self.self_attn, self.self_attn.qkv_proj
        cos, sin, positions = rotation
        return qkv_rotate(
            stream, self.input_layernorm.eps, qkv.weight, qkv.bias, attention.num_heads, (cos, sin), positions,
            layer_cache, slots, self._head_norm,
        )  # fmt: skip

    @property
    def _head_norm(self) -> tuple[Tensor, float] | None:
        norm = self.self_attn.qk_norm
        return None if norm is None else (norm.weight, norm.eps)

    def _mlp(self, x: Tensor) -> Tensor:
        norm, mlp = self.post_attention_layernorm, self.mlp
        return mlp.down_proj(silu_and_multiply(mlp.gate_up_proj(rms_norm(x, norm.weight, norm.eps))), x)

    def _add_product(self, x: Tensor, linear: ResidualLinear, residual: Tensor, gain: Tensor | None) -> Tensor | Stream:
        """`residual + linear(x)`. A rank's share of the product needs an exchange before the sum: its own class."""
        if type(linear) is ResidualLinear:
            return product_add(x, linear.weight, residual, gain, self._arrivals)
        total = linear(x, residual)
        return total if gain is None else scale_rows(total, gain)


def fuse_layers(model: DecoderModel, few_rows: int = FEW_ROWS) -> None:
    """Exchange a model's layers for fused ones, in place; no weight is copied.

    `few_rows`: tokens up to which a layer takes five launches.
    """
    arrivals = torch.zeros(_MOST_TILES, dtype=torch.int32, device=model.norm.weight.device)
    next_norms = [layer.input_layernorm for layer in model.layers[1:]] + [None]
    layers = [FusedLayer(*each, arrivals, few_rows) for each in zip(model.layers, next_norms, strict=True)]
    model.rotary = RotaryTables(model.rotary)
    model.norm = FusedNorm(model.norm)
    model.layers = nn.ModuleList(layers)
