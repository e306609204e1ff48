"""Stage D's layers with few launches.

`fuse_layers(model)` exchanges the layers of a built model for ones that hold the same weights and call other kernels:

    any number of tokens   norm · QKV · rotate + store · attention · output + residual
                           norm · gate-up · silu × up · down + residual                        nine launches
    a few                  norm + QKV + rotate + store · attention · output + residual
                           norm + gate-up + silu × up · down + residual                        five
                           (or stage C's operator for the whole MLP, up to its number of rows)

It works on whole models and on one rank's share alike.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.layers import ResidualLinear, RMSNorm, RotaryEmbedding
from stage_d_paged.model import DecoderLayer, DecoderModel
from stage_f_graph_tp.few_rows import FEW_ROWS, norm_gate_up_silu, norm_qkv_rotate, product_add
from stage_f_graph_tp.fused_kernels import rms_norm, rotate_and_store, silu_and_multiply

Rotation = tuple[Tensor, Tensor, Tensor]
_MOST_TILES = 4096  # of a product of a few rows that is split: counters made in advance


class RotaryTables(nn.Module):
    """Hands the tables and the positions on; the fused kernels look their rows up by themselves."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, positions: Tensor) -> Rotation:
        return self.rotary.cos, self.rotary.sin, positions


class FusedNorm(nn.Module):
    """RMSNorm as one small kernel."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class FusedLayer(nn.Module):
    """A decoder layer in five or nine launches.

    Args:
        layer: whose weights it works with.
        arrivals: int32 zeros for `product_add`, shared by all layers.
    """

    def __init__(self, layer: DecoderLayer, arrivals: Tensor) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp
        self.most_fused_rows = layer.most_fused_rows
        self._arrivals = arrivals

    def forward(
        self,
        x: Tensor,  # [tokens, hidden], overwritten
        rotation: Rotation,
        layer_cache: tuple[Tensor, Tensor],  # each [blocks, block_size, kv_heads, head_dim]
        metadata: AttentionMetadata,
    ) -> Tensor:
        attention = self.self_attn
        query = self._queries(x, rotation, layer_cache, metadata.slot_mapping)
        attended = attention.backend.attend(query, *layer_cache, metadata, attention.scale)  # [tokens, heads, head_dim]
        return self._mlp(self._add_product(attended.flatten(1), attention.o_proj, x))

    def _queries(self, x: Tensor, rotation: Rotation, layer_cache: tuple[Tensor, Tensor], slots: Tensor) -> Tensor:
        """Rotated queries, `[tokens, heads, head_dim]`; keys and values go into their pages."""
        attention, norm = self.self_attn, self.input_layernorm
        cos, sin, positions = rotation
        qkv, heads = attention.qkv_proj, attention.num_heads
        head_norm = None if attention.qk_norm is None else (attention.qk_norm.weight, attention.qk_norm.eps)
        if x.shape[0] <= FEW_ROWS:
            return norm_qkv_rotate(
                x, (norm.weight, norm.eps), qkv.weight, qkv.bias, heads, (cos, sin), positions, layer_cache, slots,
                head_norm,
            )  # fmt: skip
        packed = qkv(rms_norm(x, norm.weight, norm.eps)).view(x.shape[0], -1, attention.head_dim)
        return rotate_and_store(packed, heads, (cos, sin), positions, layer_cache, slots, head_norm)

    def _mlp(self, x: Tensor) -> Tensor:
        norm, mlp = self.post_attention_layernorm, self.mlp
        if x.shape[0] <= self.most_fused_rows:
            return torch.ops.six_engines.fused_swiglu_mlp(
                x, norm.weight, mlp.gate_up_proj.weight, mlp.down_proj.weight, x, norm.eps, "auto"
            )
        if x.shape[0] <= FEW_ROWS:
            activated = norm_gate_up_silu(x, (norm.weight, norm.eps), mlp.gate_up_proj.weight)
        else:
            activated = silu_and_multiply(mlp.gate_up_proj(rms_norm(x, norm.weight, norm.eps)))
        return self._add_product(activated, mlp.down_proj, x)

    def _add_product(self, x: Tensor, linear: ResidualLinear, residual: Tensor) -> Tensor:
        """`residual + linear(x)`. A rank's share of the product needs an exchange before the sum: its own class."""
        if x.shape[0] <= FEW_ROWS and type(linear) is ResidualLinear:
            return product_add(x, linear.weight, residual, self._arrivals)
        return linear(x, residual)


def fuse_layers(model: DecoderModel) -> None:
    """Exchange a model's layers for fused ones, in place; no weight is copied."""
    arrivals = torch.zeros(_MOST_TILES, dtype=torch.int32, device=model.norm.weight.device)
    model.rotary = RotaryTables(model.rotary)
    model.norm = FusedNorm(model.norm)
    model.layers = nn.ModuleList(FusedLayer(layer, arrivals) for layer in model.layers)
