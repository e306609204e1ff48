"""Stage D's layers in fewer launches.

`fuse_layers(model)` replaces the layers of a built model by layers with the same weights and other kernels:

    element-wise fusion   QKV · norm + rotate + store · attention · output + residual
                          gate-up · norm + silu × up · down + residual                     seven launches, any tokens
    skinny GEMM           QKV + norm + rotate + store · attention · output + residual
                          gate-up + norm + silu × up · down + residual                     five, for few tokens

It works on a whole model and on one rank's share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stage_d_paged.attention import AttentionBackend, AttentionMetadata
from stage_d_paged.attention.triton_paged import TritonAttention
from stage_d_paged.layers import Linear, RMSNorm, RotaryEmbedding
from stage_d_paged.model import MLP, DecoderLayer, DecoderModel
from stage_f_graph_tp.kernels.decode_attention import DEPENDENT
from stage_f_graph_tp.kernels.elementwise import Rows, rms_norm, rotate_and_store, silu_and_multiply
from stage_f_graph_tp.kernels.pdl import pdl_settings
from stage_f_graph_tp.kernels.skinny_gemm import (
    Stream,
    gate_up_silu,
    product_add,
    qkv_rotate,
    sum_squares,
)

Rotation = tuple[Tensor, Tensor, Tensor]
MAX_TILES = 4096  # arrival counters allocated in advance for products with split-K


class RotaryTables(nn.Module):
    """Return the whole tables and the positions: the fused kernels look up their rows themselves."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.cos, self.sin = rotary.cos, rotary.sin

    def forward(self, positions: Tensor) -> Rotation:
        return self.cos, self.sin, positions


class FusedNorm(nn.Module):
    """RMSNorm as one small kernel."""

    def __init__(self, norm: RMSNorm, pdl: bool) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.eps
        self._pdl = pdl

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self._pdl)


class LayerProducts(Protocol):
    """A layer's matrix products and the work fused with them, for one way to store matrices.

    `SkinnyGemms` is for matrices in the model's dtype. A `stream` is the type that `begin` and `add` return: the
    residual stream `x` with a part of its next norm.
    """

    max_tokens: int  # `begin`, `add` and `gate_up_silu` are used for up to this many tokens

    def begin(self, x: Tensor, norm: RMSNorm) -> Any:
        """Make a stream from the first layer's input."""

    def project(self, x: Any, norm: RMSNorm, linear: Any) -> tuple[Tensor, Rows | None, Tensor | None]:
        """Multiply the norm of `x`, rows or a stream; also returns the parts of norm and bias still to be applied."""
        ...

    def gate_up_silu(self, stream: Any, norm: RMSNorm, linear: Any) -> Tensor:
        """Compute `silu(gate) * up` of the norm of a stream."""
        ...

    def add(self, x: Tensor, linear: Any, residual: Tensor, gain: Tensor | None) -> Any:
        """Compute `residual + linear(x)`: a stream for a norm with weight `gain`, or the plain sum without `gain`."""


class SkinnyGemms:
    """Products with matrices in the model's dtype, into which the norms' weights were moved (`move_norm_weights`).

    Args:
        device: holds the arrival counters, which all layers share.
        max_tokens: use the skinny GEMMs for up to this many tokens.
        pdl: launch by PDL, if the GPU can.
    """

    def __init__(self, device: torch.device, max_tokens: int, pdl: bool = True) -> None:
        self.max_tokens, self._pdl = max_tokens, pdl
        self._arrival_counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)

    def begin(self, x: Tensor, norm: RMSNorm) -> Stream:
        return sum_squares(x, self._pdl)

    def project(self, x: Tensor | Stream, norm: RMSNorm, linear: Linear) -> tuple[Tensor, Rows | None, Tensor | None]:
        x = x.x if isinstance(x, Stream) else x
        # A product of rows without their norm can exceed float16's 65,504, so float16 rows are normalised first.
        first = x.dtype == torch.float16
        given, rows = (rms_norm(x, norm.weight, norm.eps, self._pdl), None) if first else (x, Rows(x, norm.eps))
        return F.linear(given, linear.weight), rows, linear.bias

    def gate_up_silu(self, stream: Stream, norm: RMSNorm, linear: Linear) -> Tensor:
        return gate_up_silu(stream, norm.eps, linear.weight, pdl=self._pdl)

    def add(self, x: Tensor, linear: Any, residual: Tensor, gain: Tensor | None) -> Tensor | Stream:
        """As `LayerProducts.add`. On a shard, the kernel also sums the ranks' products, if it can."""
        peers = getattr(linear, "peers", None)
        if isinstance(linear, Linear) or peers is not None:
            stream = product_add(x, linear.weight, residual, self._arrival_counters, peers=peers, pdl=self._pdl)
            return stream.x if gain is None else stream
        total = linear(x, residual)
        return total if gain is None else sum_squares(total, self._pdl)


class FusedLayer(nn.Module):
    """A decoder layer in seven launches, or in five with skinny GEMMs.

    Args:
        layer: has the weights.
        backend: attention.
        products: multiply by the layer's matrices.
        store: rotates queries and keys, and stores keys and values; called like `rotate_and_store`.
        qkv_rotate: does the product and `store` in one launch from a stream, if there is such a kernel.
        next_norm: the norm that reads the layer's output. None for the last layer, which returns hidden states; other
            layers may return a stream for the next layer.
        pdl: launch by PDL, where the GPU can.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        backend: AttentionBackend,
        products: LayerProducts,
        store: Callable[..., Tensor],
        qkv_rotate: Callable[..., Tensor] | None,
        next_norm: RMSNorm | None,
        pdl: bool,
    ) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp, self.rotary = layer.mlp, layer.rotary
        self.backend = backend
        self._products = products
        self._store, self._qkv_rotate, self._pdl = store, qkv_rotate, pdl
        self._next_gain = None if next_norm is None else next_norm.weight.detach()  # not a second parameter

    def forward(
        self,
        x: Any,  # [tokens, hidden], overwritten; or a stream
        rotation: Rotation,
        layer_cache: tuple[Any, Any],  # keys and values, each [blocks, block_size, kv_heads, head_dim]
        metadata: AttentionMetadata,
    ) -> Any:
        attention, mlp, products = self.self_attn, self.mlp, self._products
        norm, slots = self.post_attention_layernorm, metadata.slot_mapping
        if slots.shape[0] > products.max_tokens:  # the layer before had as many, so x is a tensor
            query = self._queries(x, rotation, layer_cache, slots)
            attended = self.backend.attend(query, *layer_cache, metadata, attention.scale, attention.window)
            x = attention.o_proj(attended.flatten(1), x)
            gate_up, rows, _ = products.project(x, norm, mlp.gate_up_proj)
            return mlp.down_proj(silu_and_multiply(gate_up, rows, self._pdl), x)
        stream = products.begin(x, self.input_layernorm) if isinstance(x, Tensor) else x
        query = self._queries(stream, rotation, layer_cache, slots)
        attended = self.backend.attend(query, *layer_cache, metadata, attention.scale, attention.window)
        stream = products.add(attended.flatten(1), attention.o_proj, stream.x, norm.weight)
        activated = products.gate_up_silu(stream, norm, mlp.gate_up_proj)
        return products.add(activated, mlp.down_proj, stream.x, self._next_gain)

    def _queries(self, x: Any, rotation: Rotation, layer_cache: Any, slots: Tensor) -> Tensor:
        """Compute rotated queries, `[tokens, heads, head_dim]`, and store keys and values in their blocks."""
        attention, norm = self.self_attn, self.input_layernorm
        qkv, heads, head_norm = attention.qkv_proj, attention.num_heads, attention.qk_norm
        head_norm = None if head_norm is None else (head_norm.weight, head_norm.eps)
        *tables, positions = rotation
        if self._qkv_rotate is not None and not isinstance(x, Tensor):
            return self._qkv_rotate(
                x,
                norm.eps,
                qkv.weight,
                qkv.bias,
                heads,
                tables,
                positions,
                layer_cache,
                slots,
                head_norm,
                pdl=self._pdl,
            )
        packed, rows, bias = self._products.project(x, norm, qkv)
        packed = packed.view(packed.shape[0], -1, attention.head_dim)
        return self._store(packed, heads, tables, positions, layer_cache, slots, head_norm, rows, bias, pdl=self._pdl)


MakeLayer = Callable[..., FusedLayer]


class FewTokens(nn.Module):
    """Run a fused layer in steps of few tokens, and stage D's layer with the same weights in others.

    Args:
        plain, fused: the two layers.
        most: use the fused layer for up to this many tokens.
    """

    def __init__(self, plain: DecoderLayer, fused: FusedLayer, most: int) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = plain.input_layernorm, plain.self_attn
        self.post_attention_layernorm, self.mlp = plain.post_attention_layernorm, plain.mlp
        self._plain, self._fused, self._most, self.rotary = plain, fused, most, plain.rotary

    def forward(self, x: Any, rotation: Any, layer_cache: Any, metadata: AttentionMetadata) -> Any:
        layer = self._fused if metadata.slot_mapping.shape[0] <= self._most else self._plain
        return layer(x, rotation, layer_cache, metadata)


class FewTokensRotary(nn.Module):
    """Pass tables and positions if `FewTokens` runs the fused layers in this step, else the rows of the tables."""

    def __init__(self, rotary: RotaryEmbedding, most: int) -> None:
        super().__init__()
        self._rotary, self._tables, self._most = rotary, RotaryTables(rotary), most
        self.cos, self.sin = rotary.cos, rotary.sin

    def forward(self, positions: Tensor) -> tuple[Tensor, ...]:
        return (self._tables if positions.shape[0] <= self._most else self._rotary)(positions)


def fuse_layers(
    model: DecoderModel,
    skinny_max_tokens: int,
    elementwise: bool = True,
    pdl: bool = True,
    make_layer: MakeLayer = FusedLayer,
) -> None:
    """Replace a model's layers by fused ones, in place; no weight is copied, but norms' weights move into the products.

    Args:
        skinny_max_tokens: tokens up to which a layer uses the skinny GEMMs.
        elementwise: whether steps with more tokens use the element-wise kernels; otherwise they use stage D's layers.
        pdl: launch by PDL, where the GPU can.
        make_layer: makes the fused layer of a layer; called like `FusedLayer`.
    """
    device = model.norm.weight.device
    backend = _dependent(model.layers[0].self_attn.backend, model, device, pdl)
    move_norm_weights(model)
    products = SkinnyGemms(device, skinny_max_tokens, pdl)
    replace_layers(model, backend, products, rotate_and_store, qkv_rotate, elementwise, pdl, make_layer)


def replace_layers(
    model: DecoderModel,
    backend: AttentionBackend,
    products: LayerProducts,
    store: Callable[..., Tensor],
    qkv_rotate: Callable[..., Tensor] | None = None,
    elementwise: bool = True,
    pdl: bool = True,
    make_layer: MakeLayer = FusedLayer,
) -> None:
    """Replace a model's layers by fused ones, in place; arguments as of `FusedLayer` and `fuse_layers`."""
    next_norms = [layer.input_layernorm for layer in model.layers[1:]] + [None]
    layers = [
        make_layer(layer, backend, products, store, qkv_rotate, next_norm, pdl)
        for layer, next_norm in zip(model.layers, next_norms, strict=True)
    ]
    if elementwise:
        model.rotaries = nn.ModuleList(RotaryTables(rotary) for rotary in model.rotaries)
        model.norm = FusedNorm(model.norm, pdl)
        model.layers = nn.ModuleList(layers)
    else:
        most = products.max_tokens
        pairs = zip(model.layers, layers, strict=True)
        model.layers = nn.ModuleList(FewTokens(plain, fused, most) for plain, fused in pairs)
        model.rotaries = nn.ModuleList(FewTokensRotary(rotary, most) for rotary in model.rotaries)


@torch.no_grad()
def move_norm_weights(model: DecoderModel) -> None:
    """Multiply each norm's weight into the columns of the next matrix, and set the norm's weight to 1.

    `rms_norm(x, g) Wᵀ = rms_norm(x, 1) (W diag(g))ᵀ`. In 16 bits, this rounds each weight of the matrix once more, and
    saves the rounding of `x * g`.
    """
    for layer in model.layers:
        pairs = [(layer.input_layernorm, layer.self_attn.qkv_proj)]
        if isinstance(layer.mlp, MLP):  # with experts, more than one matrix reads the norm
            pairs.append((layer.post_attention_layernorm, layer.mlp.gate_up_proj))
        for norm, linear in pairs:
            linear.weight.mul_(norm.weight)
            norm.weight.fill_(1)


def _dependent(backend: AttentionBackend, model: DecoderModel, device: torch.device, pdl: bool) -> AttentionBackend:
    """Return the backend with its decode kernel launched by PDL, if it is our Triton backend and the GPU can."""
    if not (isinstance(backend, TritonAttention) and pdl_settings(device, pdl)["PDL"]):
        return backend
    return TritonAttention(device, model.norm.weight.dtype, model.config.head_dim, DEPENDENT)
