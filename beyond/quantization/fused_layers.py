"""Stage F's fused decoder layer for 8-bit weights, for an 8-bit KV cache, or for both (GPU).

With an 8-bit KV cache, only what computes queries, keys and values changes (`EightBitCacheLayer`): the store is a
launch of its own. Stage F's QKV product also rotates and stores; an 8-bit store needs the largest number of a whole
head, and a program of the product has a part of one.

With 8-bit weights, every product changes (`EightBitLayer`):

    skinny GEMM     norm + QKV · rotate + store · attention · output + residual + norm
                    gate-up + silu × up · down + residual                               six launches
    more tokens     norm · QKV · rotate + store · attention · output + residual
                    norm · gate-up · silu × up · down + residual                        nine or more
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from beyond.quantization import products
from beyond.quantization.attention import triton_store
from beyond.quantization.formats import Quantized
from beyond.quantization.layers import QuantizedMatrix, QuantizedResidualLinear
from stage_d_paged.attention import AttentionBackend, AttentionMetadata
from stage_d_paged.layers import RMSNorm
from stage_d_paged.model import DecoderLayer, DecoderModel
from stage_f_graph_tp.kernels import elementwise
from stage_f_graph_tp.kernels.elementwise import rms_norm
from stage_f_graph_tp.kernels.fused_layers import FusedLayer, FusedNorm, RotaryTables, Rotation, move_norm_weights
from stage_f_graph_tp.kernels.skinny_gemm import SKINNY_GEMM_MAX_TOKENS, Stream

SKINNY_MAX_TOKENS = 64  # for 8-bit matrices; stage F's limit is that of 16-bit ones
MAX_TILES = 4096  # of a product with split-K: arrival counters allocated in advance
LayerCache = tuple[Quantized, Quantized] | tuple[Tensor, Tensor]


class EightBitCacheLayer(FusedLayer):
    """Stage F's layer with keys and values in 8 bits. Arguments as `FusedLayer`."""

    self_attn: Any  # their matrices may be in 8 bits too
    mlp: Any

    def _queries(self, x: Tensor, rotation: Rotation, layer_cache: LayerCache, slots: Tensor) -> Tensor:
        norm = self.input_layernorm
        qkv = self.self_attn.qkv_proj(rms_norm(x, norm.weight, norm.eps))
        return self._rotate_and_store(qkv, rotation, layer_cache, slots)

    def _skinny_queries(self, stream: Stream, rotation: Rotation, layer_cache: LayerCache, slots: Tensor) -> Tensor:
        return self._queries(stream.x, rotation, layer_cache, slots)

    def _rotate_and_store(self, qkv: Tensor, rotation: Rotation, layer_cache: Any, slots: Tensor) -> Tensor:
        """Rotate and store `[tokens, (heads + 2 kv_heads) * head_dim]`; returns queries `[tokens, heads, head_dim]`."""
        attention = self.self_attn
        cos, sin, positions = rotation
        eight_bits = isinstance(layer_cache[0], Quantized)
        rotate_and_store = triton_store.rotate_and_store if eight_bits else elementwise.rotate_and_store
        packed = qkv.view(qkv.shape[0], -1, attention.head_dim)
        return rotate_and_store(packed, attention.num_heads, (cos, sin), positions, layer_cache, slots, self._head_norm)


class EightBitLayer(EightBitCacheLayer):
    """A decoder layer whose matrices are in 8 bits, and its keys and values if the cache is.

    Args:
        next_norm: the norm that reads the layer's output; None after the last layer.
        (others): as `FusedLayer`.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        backend: AttentionBackend,
        arrival_counters: Tensor,
        skinny_max_tokens: int,
        next_norm: RMSNorm | None,
    ) -> None:
        super().__init__(layer, backend, arrival_counters, skinny_max_tokens, next_norm is None)
        self._next_gain = None if next_norm is None else next_norm.weight.detach()  # not a second parameter

    def forward(
        self, x: Tensor | products.Stream, rotation: Rotation, layer_cache: LayerCache, metadata: AttentionMetadata
    ) -> Tensor | products.Stream:
        attention, mlp, slots = self.self_attn, self.mlp, metadata.slot_mapping
        norm, mlp_norm = self.input_layernorm, self.post_attention_layernorm
        if slots.shape[0] > self._skinny_max_tokens:
            assert isinstance(x, Tensor)  # so did the layer before
            query = self._queries(x, rotation, layer_cache, slots)
            attended = self.backend.attend(query, *layer_cache, metadata, attention.scale)
            added = self._normed_add(attended.flatten(1), attention.o_proj, x, None)
            gate_up = mlp.gate_up_proj(rms_norm(added, mlp_norm.weight, mlp_norm.eps))
            return self._normed_add(elementwise.silu_and_multiply(gate_up), mlp.down_proj, added, None)
        stream = x if isinstance(x, products.Stream) else products.scale_rows(x, norm.weight)
        qkv = products.normed_product(stream, norm.eps, attention.qkv_proj.weight, attention.qkv_proj.bias)
        query = self._rotate_and_store(qkv, rotation, layer_cache, slots)
        attended = self.backend.attend(query, *layer_cache, metadata, attention.scale)  # [tokens, heads, head_dim]
        stream = self._normed_add(attended.flatten(1), attention.o_proj, stream.x, mlp_norm.weight)
        activated = products.gate_up_silu(stream, mlp_norm.eps, mlp.gate_up_proj.weight)
        return self._normed_add(activated, mlp.down_proj, stream.x, self._next_gain)

    def _normed_add(self, x: Tensor, linear: QuantizedResidualLinear, residual: Tensor, gain: Tensor | None) -> Any:
        """Compute `residual + linear(x)`: a tensor, or with a norm behind it, of weight `gain`, a `Stream`."""
        if type(linear) is QuantizedResidualLinear:
            return products.product_add(x, linear.weight, residual, gain, self._arrival_counters)
        total = linear(x, residual)  # of a shard: an all-reduce comes before the sum
        return total if gain is None else products.scale_rows(total, gain)


def use_kernels(model: DecoderModel) -> None:
    """Let all 8-bit matrices of a model multiply by our Triton kernels."""
    for module in model.modules():
        if isinstance(module, QuantizedMatrix):
            module.product = products.product


def fuse_layers(model: DecoderModel, backend: AttentionBackend) -> None:
    """Replace a model's layers by fused ones, in place; no weight is copied."""
    counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=model.norm.weight.device)
    if isinstance(model.layers[0].mlp.gate_up_proj, QuantizedMatrix):  # `down_proj` may be a shard
        next_norms = [layer.input_layernorm for layer in model.layers[1:]] + [None]
        layers = [
            EightBitLayer(layer, backend, counters, SKINNY_MAX_TOKENS, next_norm)
            for layer, next_norm in zip(model.layers, next_norms, strict=True)
        ]
    else:
        move_norm_weights(model)
        last = model.layers[-1]
        layers = [
            EightBitCacheLayer(layer, backend, counters, SKINNY_GEMM_MAX_TOKENS, layer is last)
            for layer in model.layers
        ]
    model.layers = nn.ModuleList(layers)
    model.rotary = RotaryTables(model.rotary)
    model.norm = FusedNorm(model.norm)
