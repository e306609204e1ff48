"""Stage F's fused decoder layer for 8-bit weights, for an 8-bit KV cache, or for both (GPU).

    skinny GEMM     norm + QKV · rotate + store · attention · output + residual + norm
                    gate-up + silu × up · down + residual                               six launches
    more tokens     norm · QKV · rotate + store · attention · output + residual
                    norm · gate-up · silu × up · down + residual                        nine or more

Stage F's QKV product also rotates and stores. Here that is a launch of its own: an 8-bit store needs the largest number
of a whole head, and a program of the product has a part of one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from beyond.quantization import products
from beyond.quantization.attention import triton_store
from beyond.quantization.formats import Quantized
from beyond.quantization.layers import QuantizedMatrix, QuantizedResidualLinear
from stage_d_paged.attention import AttentionBackend, AttentionMetadata
from stage_d_paged.layers import ResidualLinear
from stage_d_paged.model import DecoderModel
from stage_f_graph_tp.kernels import elementwise
from stage_f_graph_tp.kernels.elementwise import rms_norm
from stage_f_graph_tp.kernels.fused_layers import FusedLayer, FusedNorm, RotaryTables, Rotation
from stage_f_graph_tp.kernels.skinny_gemm import (
    SKINNY_GEMM_MAX_TOKENS,
    Stream,
    gate_up_silu,
    product_add,
    scale_rows,
)

MAX_TILES = 4096  # of a product with split-K: arrival counters allocated in advance
LayerCache = tuple[Quantized, Quantized] | tuple[Tensor, Tensor]


class QuantizedLayer(FusedLayer):
    """A decoder layer whose matrices, or whose keys and values, are in 8 bits. Arguments as `FusedLayer`."""

    def forward(
        self, x: Tensor | Stream, rotation: Rotation, layer_cache: LayerCache, metadata: AttentionMetadata
    ) -> Tensor | Stream:
        attention = self.self_attn
        if metadata.slot_mapping.shape[0] > self._skinny_max_tokens:
            norm = self.input_layernorm
            qkv = attention.qkv_proj(rms_norm(x, norm.weight, norm.eps))
            attended = self._attend(qkv, rotation, layer_cache, metadata)
            x = self._add_product(attended, attention.o_proj, x, None)
            norm, mlp = self.post_attention_layernorm, self.mlp
            gate_up = mlp.gate_up_proj(rms_norm(x, norm.weight, norm.eps))
            return self._add_product(elementwise.silu_and_multiply(gate_up), mlp.down_proj, x, None)
        stream = x if isinstance(x, Stream) else scale_rows(x, self.input_layernorm.weight)
        attended = self._attend(self._skinny_qkv(stream), rotation, layer_cache, metadata)
        norm, gate_up = self.post_attention_layernorm, self.mlp.gate_up_proj.weight
        stream = self._add_product(attended, attention.o_proj, stream.x, norm.weight)
        activate = products.gate_up_silu if isinstance(gate_up, Quantized) else gate_up_silu
        activated = activate(stream, norm.eps, gate_up)
        return self._add_product(activated, self.mlp.down_proj, stream.x, self._next_gain)

    def _skinny_qkv(self, stream: Stream) -> Tensor:
        norm, qkv = self.input_layernorm, self.self_attn.qkv_proj
        if isinstance(qkv.weight, Quantized):
            return products.normed_product(stream, norm.eps, qkv.weight, qkv.bias)
        return qkv(rms_norm(stream.x, norm.weight, norm.eps))

    def _attend(
        self, qkv: Tensor, rotation: Rotation, layer_cache: LayerCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Rotate, store and attend: `[tokens, (heads + 2 kv_heads) * head_dim]` -> `[tokens, heads * head_dim]`."""
        attention = self.self_attn
        cos, sin, positions = rotation
        eight_bits = isinstance(layer_cache[0], Quantized)
        rotate_and_store = triton_store.rotate_and_store if eight_bits else elementwise.rotate_and_store
        packed = qkv.view(qkv.shape[0], -1, attention.head_dim)
        query = rotate_and_store(
            packed, attention.num_heads, (cos, sin), positions, layer_cache, metadata.slot_mapping, self._head_norm
        )
        return self.backend.attend(query, *layer_cache, metadata, attention.scale).flatten(1)

    def _add_product(self, x: Tensor, linear: nn.Module, residual: Tensor, gain: Tensor | None) -> Tensor | Stream:
        if type(linear) is QuantizedResidualLinear:
            return products.product_add(x, linear.weight, residual, gain, self._arrival_counters)
        if type(linear) is ResidualLinear and x.shape[0] <= self._skinny_max_tokens:
            return product_add(x, linear.weight, residual, gain, self._arrival_counters)
        total = linear(x, residual)  # of a shard: an all-reduce comes before the sum
        return total if gain is None else scale_rows(total, gain)


def use_kernels(model: DecoderModel) -> None:
    """Let all 8-bit matrices of a model multiply by our Triton kernels."""
    for module in model.modules():
        if isinstance(module, QuantizedMatrix):
            module.product = products.product


def fuse_layers(model: DecoderModel, backend: AttentionBackend) -> None:
    """Replace a model's layers by fused ones, in place; no weight is copied."""
    counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=model.norm.weight.device)
    next_norms = [layer.input_layernorm for layer in model.layers[1:]] + [None]
    model.layers = nn.ModuleList(
        QuantizedLayer(layer, next_norm, backend, counters, SKINNY_GEMM_MAX_TOKENS)
        for layer, next_norm in zip(model.layers, next_norms, strict=True)
    )
    model.rotary = RotaryTables(model.rotary)
    model.norm = FusedNorm(model.norm)
