"""Adapt stage F's fused layers to 8-bit weights, an 8-bit KV cache, or both (GPU).

With an 8-bit KV cache, rotate and store are a separate launch. In stage F the QKV product also rotates and stores. But
an 8-bit store needs the largest number of a whole head, and a program of the product has only a part of a head.

With 8-bit weights, every product changes (`QuantizedProducts`):

    skinny GEMM     norm + QKV · rotate + store · attention · output + residual + norm
                    gate-up + silu × up · down + residual                               six launches
    more tokens     norm · QKV · rotate + store · attention · output + residual
                    norm · gate-up · silu × up · down + residual                        nine or more
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from beyond.options import Options
from beyond.quantization import products
from beyond.quantization.attention import triton_store
from beyond.quantization.formats import Quantized
from beyond.quantization.layers import QuantizedLinear
from stage_d_paged.layers import RMSNorm
from stage_d_paged.model import DecoderModel
from stage_f_graph_tp.kernels.elementwise import rms_norm, rotate_and_store
from stage_f_graph_tp.kernels.fused_layers import (
    MAX_TILES,
    FusedLayer,
    MakeLayer,
    SkinnyGemms,
    move_norm_weights,
    replace_layers,
)
from stage_f_graph_tp.kernels.skinny_gemm import skinny_limit

SKINNY_MAX_TOKENS = 64  # for 8-bit matrices; stage F's limit is for 16-bit matrices


class QuantizedProducts:
    """Products with 8-bit matrices in Triton: stage F's `LayerProducts`, and a `Product` for any layer.

    Args:
        device: of the arrival counters, which all layers share.
        max_tokens: use the skinny GEMMs for up to this many tokens.
        pdl: launch by PDL, where the GPU can.
    """

    def __init__(self, device: torch.device, max_tokens: int = SKINNY_MAX_TOKENS, pdl: bool = True) -> None:
        self.max_tokens, self._pdl = max_tokens, pdl
        self._arrival_counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)

    def __call__(
        self, x: Tensor, weight: Quantized, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        if residual is None:
            return products.product(x, weight, bias, pdl=self._pdl)
        if bias is not None:
            return residual.add_(products.product(x, weight, bias, pdl=self._pdl))
        total = products.product_add(x, weight, residual, None, self._arrival_counters, pdl=self._pdl)
        assert isinstance(total, Tensor)  # without a `gain` it is not a stream
        return total

    def begin(self, x: Tensor, norm: RMSNorm) -> products.Stream:
        return products.scale_rows(x, norm.weight, self._pdl)

    def project(self, x: Any, norm: RMSNorm, linear: QuantizedLinear) -> tuple[Tensor, None, None]:
        if isinstance(x, products.Stream):
            return products.normed_product(x, norm.eps, linear.weight, linear.bias, pdl=self._pdl), None, None
        return linear(rms_norm(x, norm.weight, norm.eps, self._pdl)), None, None

    def gate_up_silu(self, stream: products.Stream, norm: RMSNorm, linear: QuantizedLinear) -> Tensor:
        return products.gate_up_silu(stream, norm.eps, linear.weight, pdl=self._pdl)

    def add(self, x: Tensor, linear: Any, residual: Tensor, gain: Tensor | None) -> Any:
        if isinstance(linear, QuantizedLinear):
            return products.product_add(x, linear.weight, residual, gain, self._arrival_counters, pdl=self._pdl)
        total = linear(x, residual)  # on a shard, an all-reduce comes before the sum
        return total if gain is None else products.scale_rows(total, gain, self._pdl)


def fuse_layers(model: DecoderModel, options: Options, make_layer: MakeLayer = FusedLayer) -> None:
    """Replace a model's layers by stage F's fused ones, in place; no weight is copied. `make_layer` as in stage F."""
    backend, device = model.layers[0].self_attn.backend, model.norm.weight.device
    store = rotate_and_store if options.kv_cache_dtype == "auto" else triton_store.rotate_and_store
    elementwise, pdl = options.uses("fused_layers"), options.uses("pdl")
    hidden, ranks = model.config.hidden_size, options.tensor_parallel_size
    most = skinny_limit(hidden, ranks) if options.quantization is None else SKINNY_MAX_TOKENS
    most = most if options.uses("skinny_gemm") else 0
    if options.quantization is None:
        move_norm_weights(model)
        products = SkinnyGemms(device, most, pdl)
    else:
        products = QuantizedProducts(device, most, pdl)
    replace_layers(model, backend, products, store, elementwise=elementwise, pdl=pdl, make_layer=make_layer)
