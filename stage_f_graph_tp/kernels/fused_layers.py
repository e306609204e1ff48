"""Stage D's layers in fewer launches.

`fuse_layers(model)` replaces the layers of a built model by layers that hold the same weights and call other kernels:

    element-wise fusion   QKV · norm + rotate + store · attention · output + residual
                          gate-up · norm + silu × up · down + residual                     seven launches, any tokens
    skinny GEMM           QKV + norm + rotate + store · attention · output + residual
                          gate-up + norm + silu × up · down + residual                     five, for few tokens

It works on whole models and on one rank's share alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stage_d_paged.attention import AttentionBackend, AttentionMetadata
from stage_d_paged.attention.triton_paged import TritonAttention
from stage_d_paged.layers import ResidualLinear, RMSNorm, RotaryEmbedding
from stage_d_paged.model import DecoderLayer, DecoderModel
from stage_f_graph_tp.kernels.decode_attention import DependentAttention
from stage_f_graph_tp.kernels.elementwise import Rows, rms_norm, rotate_and_store, silu_and_multiply
from stage_f_graph_tp.kernels.pdl import pdl_settings
from stage_f_graph_tp.kernels.skinny_gemm import (
    SKINNY_GEMM_MAX_TOKENS,
    Stream,
    gate_up_silu,
    product_add,
    qkv_rotate,
    sum_squares,
)

Rotation = tuple[Tensor, Tensor, Tensor]
_MAX_TILES = 4096  # of a product with split-K: arrival counters allocated in advance


class RotaryTables(nn.Module):
    """Pass the tables and the positions on: the fused kernels look their rows up themselves."""

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
    """A decoder layer in seven launches, or in five with skinny GEMMs.

    Args:
        layer: the layer whose weights it uses; the norms' weights are in the matrices (`move_norm_weights`).
        backend: attention.
        arrival_counters: int32 zeros for `product_add`, shared by all layers.
        skinny_max_tokens: tokens up to which it uses the skinny GEMMs.
        is_last: it returns hidden states; other layers may return a `Stream`, which the next one takes.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        backend: AttentionBackend,
        arrival_counters: Tensor,
        skinny_max_tokens: int,
        is_last: bool,
    ) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp
        self.backend = backend
        self._arrival_counters = arrival_counters
        self._skinny_max_tokens = skinny_max_tokens
        self._is_last = is_last

    def forward(
        self,
        x: Tensor | Stream,  # [tokens, hidden], overwritten
        rotation: Rotation,
        layer_cache: tuple[Tensor, Tensor],  # each [blocks, block_size, kv_heads, head_dim]
        metadata: AttentionMetadata,
    ) -> Tensor | Stream:
        attention = self.self_attn
        if metadata.slot_mapping.shape[0] > self._skinny_max_tokens:
            assert isinstance(x, Tensor)  # the layer before had as many tokens
            query = self._queries(x, rotation, layer_cache, metadata.slot_mapping)
            attended = self.backend.attend(query, *layer_cache, metadata, attention.scale)
            return self._mlp(attention.o_proj(attended.flatten(1), x))
        stream = _as_stream(x)
        query = self._skinny_queries(stream, rotation, layer_cache, metadata.slot_mapping)
        attended = self.backend.attend(query, *layer_cache, metadata, attention.scale)  # [tokens, heads, head_dim]
        stream = _as_stream(self._add_product(attended.flatten(1), attention.o_proj, stream.x))
        activated = gate_up_silu(stream, self.post_attention_layernorm.eps, self.mlp.gate_up_proj.weight)
        total = self._add_product(activated, self.mlp.down_proj, stream.x)
        return total.x if self._is_last and isinstance(total, Stream) else total

    def _queries(self, x: Tensor, rotation: Rotation, layer_cache: tuple[Tensor, Tensor], slots: Tensor) -> Tensor:
        """Compute rotated queries, `[tokens, heads, head_dim]`, and store keys and values in their blocks."""
        attention, (x, rows) = self.self_attn, _before_norm(x, self.input_layernorm)
        cos, sin, positions = rotation
        packed = F.linear(x, attention.qkv_proj.weight).view(x.shape[0], -1, attention.head_dim)
        return rotate_and_store(
            packed,
            attention.num_heads,
            (cos, sin),
            positions,
            layer_cache,
            slots,
            self._head_norm,
            rows,
            attention.qkv_proj.bias,
        )

    def _skinny_queries(
        self, stream: Stream, rotation: Rotation, layer_cache: tuple[Tensor, Tensor], slots: Tensor
    ) -> Tensor:
        """As `_queries`, in one launch."""
        attention, qkv = self.self_attn, self.self_attn.qkv_proj
        cos, sin, positions = rotation
        return qkv_rotate(
            stream,
            self.input_layernorm.eps,
            qkv.weight,
            qkv.bias,
            attention.num_heads,
            (cos, sin),
            positions,
            layer_cache,
            slots,
            self._head_norm,
        )

    @property
    def _head_norm(self) -> tuple[Tensor, float] | None:
        norm = self.self_attn.qk_norm
        return None if norm is None else (norm.weight, norm.eps)

    def _mlp(self, x: Tensor) -> Tensor:
        mlp, (given, rows) = self.mlp, _before_norm(x, self.post_attention_layernorm)
        return mlp.down_proj(silu_and_multiply(mlp.gate_up_proj(given), rows), x)

    def _add_product(self, x: Tensor, linear: Any, residual: Tensor) -> Tensor | Stream:
        """Compute `residual + linear(x)`. Of a shard, the kernel adds up the ranks' products too, if it can."""
        peers = getattr(linear, "peers", None)
        if type(linear) is not ResidualLinear and peers is None:
            return linear(x, residual)
        return product_add(x, linear.weight, residual, self._arrival_counters, peers=peers)


def _as_stream(x: Tensor | Stream) -> Stream:
    return x if isinstance(x, Stream) else sum_squares(x)


def _before_norm(x: Tensor, norm: RMSNorm) -> tuple[Tensor, Rows | None]:
    """Return what a product is given, and what is left of the norm for the kernel behind it.

    float16 ends at 65,504, which a product of rows not yet normalised can reach; they are normalised first.
    """
    if x.dtype == torch.float16:
        return rms_norm(x, norm.weight, norm.eps), None
    return x, Rows(x, norm.eps)


def fuse_layers(model: DecoderModel, skinny_max_tokens: int = SKINNY_GEMM_MAX_TOKENS) -> None:
    """Replace a model's layers by fused ones, in place; no weight is copied, but norms' weights move into the products.

    `skinny_max_tokens`: tokens up to which a layer uses the skinny GEMMs.
    """
    device = model.norm.weight.device
    backend = _dependent(model.layers[0].self_attn.backend, model, device)
    arrival_counters = torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)
    move_norm_weights(model)
    last = model.layers[-1]
    layers = [FusedLayer(layer, backend, arrival_counters, skinny_max_tokens, layer is last) for layer in model.layers]
    model.rotary = RotaryTables(model.rotary)
    model.norm = FusedNorm(model.norm)
    model.layers = nn.ModuleList(layers)


@torch.no_grad()
def move_norm_weights(model: DecoderModel) -> None:
    """Multiply the weights of each layer's norms into the columns of the matrices behind them, and set them to 1.

    `rms_norm(x, g) Wᵀ = rms_norm(x, 1) (W diag(g))ᵀ`. In 16 bits, this rounds each weight of the matrix once more, and
    saves the rounding of `x * g`.
    """
    for layer in model.layers:
        for norm, linear in (
            (layer.input_layernorm, layer.self_attn.qkv_proj),
            (layer.post_attention_layernorm, layer.mlp.gate_up_proj),
        ):
            linear.weight.mul_(norm.weight)
            norm.weight.fill_(1)


def _dependent(backend: AttentionBackend, model: DecoderModel, device: torch.device) -> AttentionBackend:
    """Return the backend with its decode kernel launched by PDL, if it is our Triton kernels and the GPU can."""
    if not (isinstance(backend, TritonAttention) and pdl_settings(device)["PDL"]):
        return backend
    return DependentAttention(device, model.norm.weight.dtype, model.config.head_dim)
