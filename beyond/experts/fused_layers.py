"""Stage F's fused layers with experts (GPU): the attention of `FusedLayer`, then the kernels of `products.py`.

The weight of the norm before the experts stays where it is: the router reads the same rows, and is not changed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beyond.experts.layers import SparseMLP
from beyond.experts.products import Choice, choose, norm_route, run_experts
from beyond.options import Options
from beyond.quantization import fused_layers as eight_bits
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.model import DecoderLayer, DecoderModel
from stage_f_graph_tp.kernels import fused_layers as stage_f
from stage_f_graph_tp.kernels.elementwise import rms_norm
from stage_f_graph_tp.kernels.fused_layers import FusedLayer, Rotation, SkinnyGemms
from stage_f_graph_tp.kernels.skinny_gemm import Stream, skinny_limit

ROUTED_TOGETHER = 128  # tokens up to which norm, router and choice are one launch


def triton_experts(
    mlp: SparseMLP, x: Tensor, weights: Tensor, chosen: Tensor, residual: Tensor, *, pdl: bool = True
) -> Tensor:
    """Run the chosen experts in Triton: a `Compute` for a GPU."""
    choice = Choice(weights.float(), chosen.int())
    matrices = mlp.gate_up_proj.weight, mlp.down_proj.weight
    return run_experts(x, choice, *matrices, mlp.experts, residual, pdl=pdl).x


class Router(nn.Module):
    """Norm, router and choice of a layer's experts. A forward hook sees what every token chooses.

    Args:
        layer: has the norm and the experts.
        pdl: launch by PDL, where the GPU can.
    """

    def __init__(self, layer: DecoderLayer, pdl: bool) -> None:
        super().__init__()
        self._norm, self._mlp, self._pdl = layer.post_attention_layernorm, layer.mlp, pdl
        device = self._mlp.gate.weight.device
        self._arrival_counters = torch.zeros(ROUTED_TOGETHER // 16, dtype=torch.int32, device=device)

    def forward(self, x: Tensor, slots: Tensor) -> tuple[Tensor, Choice]:
        """Normalise rows `[tokens, hidden]` and choose their experts; `slots` as in `norm_route`."""
        norm, router, experts, pdl = self._norm, self._mlp.gate.weight, self._mlp.experts, self._pdl
        if len(slots) <= ROUTED_TOGETHER:
            return norm_route(x, norm.weight, norm.eps, router, experts, slots, self._arrival_counters, pdl)
        x = rms_norm(x, norm.weight, norm.eps, pdl)
        return x, choose(F.linear(x, router), experts, slots, pdl)


class ExpertLayer(FusedLayer):
    """A fused layer whose MLP has experts. Arguments as of `FusedLayer`."""

    def __init__(self, layer: DecoderLayer, *others: Any) -> None:
        super().__init__(layer, *others)
        self.router = Router(layer, self._pdl)

    def forward(
        self, x: Any, rotation: Rotation, layer_cache: tuple[Any, Any], metadata: AttentionMetadata
    ) -> Tensor | Stream:
        attention, products, slots = self.self_attn, self._products, metadata.slot_mapping
        few = slots.shape[0] <= products.max_tokens
        if few and isinstance(x, Tensor):
            x = products.begin(x, self.input_layernorm)
        query = self._queries(x, rotation, layer_cache, slots)
        attended = self.backend.attend(query, *layer_cache, metadata, attention.scale, attention.window).flatten(1)
        residual = products.add(attended, attention.o_proj, x.x, None) if few else attention.o_proj(attended, x)
        mlp = self.mlp
        rows, choice = self.router(residual, slots)
        if mlp.group is not None:
            total = mlp.add_shared(rows, torch.zeros_like(residual))
            return mlp.group.all_reduce(mlp.compute(mlp, rows, *choice, total), residual)
        matrices = mlp.gate_up_proj.weight, mlp.down_proj.weight
        stream = run_experts(rows, choice, *matrices, mlp.experts, mlp.add_shared(rows, residual), pdl=self._pdl)
        reads_stream = few and self._next_gain is not None and isinstance(products, SkinnyGemms)
        return stream if reads_stream else stream.x


def make_layer(layer: DecoderLayer, *others: Any) -> FusedLayer:
    """Make the fused layer of a layer with or without experts."""
    return (ExpertLayer if isinstance(layer.mlp, SparseMLP) else FusedLayer)(layer, *others)


def choose_layers(model: DecoderModel, options: Options) -> str:
    """Replace a model's layers by fused ones, if the options allow it; return a line about the layers in use.

    Raises:
        ValueError: `fused_mlp="on"`: stage C's operator does not compute experts.
    """
    if options.fused_mlp == "on":
        raise ValueError("fused_mlp='on' is not possible here: it does not compute experts; use fused_mlp='auto'")
    dense = tuple(replace(kind, experts=None) for kind in model.config.layers)
    lacking = replace(model.config, layers=dense).beyond_kernels
    elementwise, skinny = options.uses("fused_layers"), options.uses("skinny_gemm")
    if lacking or not (elementwise or skinny):
        why = f" (fused ones do not compute {lacking})" if lacking else ""
        return f"layers: stage D's, with our Triton kernels for experts{why}"
    if options.uses_eight_bits:
        eight_bits.fuse_layers(model, options, make_layer)
        return "layers: our Triton kernels, reading 8 bits, also for experts"
    most = skinny_limit(model.config.hidden_size, options.tensor_parallel_size) if skinny else 0
    stage_f.fuse_layers(model, most, elementwise, options.uses("pdl"), make_layer)
    return "layers: our Triton kernels, also for experts"
