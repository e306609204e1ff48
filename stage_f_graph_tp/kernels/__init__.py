"""Kernel fusion in Triton: fewer, larger kernels per layer. The rest of stage F calls only `choose_layers`."""

from __future__ import annotations

import torch

from stage_d_paged.fused_mlp import use_fused_mlp
from stage_d_paged.model import DecoderModel
from stage_f_graph_tp.options import GraphOptions


def choose_layers(model: DecoderModel, options: GraphOptions, device: torch.device) -> str:
    """Replace a model's layers by fused ones, if GPU and options allow it; return a line about the layers in use.

    Raises:
        ValueError: `fused_mlp="on"`, which needs stage D's layers, whole.
        ExtensionError: as stage D's `use_fused_mlp`.
    """
    fused, skinny = options.uses("fused_layers"), options.uses("skinny_gemm")
    if (fused or skinny) and device.type == "cuda":
        if options.fused_mlp == "on":
            raise ValueError(
                "fused_mlp='on' needs without='fused_layers,skinny_gemm': fused layers use other MLP kernels"
            )
        if model.config.beyond_kernels:
            return f"layers: stage D's (our Triton kernels do not compute {model.config.beyond_kernels})"
        from stage_f_graph_tp.kernels.fused_layers import fuse_layers  # here: only a GPU needs Triton
        from stage_f_graph_tp.kernels.skinny_gemm import skinny_limit

        most = skinny_limit(model.config.hidden_size, options.tensor_parallel_size) if skinny else 0
        fuse_layers(model, most, elementwise=fused, pdl=options.uses("pdl"))
        between = ["between the matrix products"] * fused
        inside = [f"in the matrix products of up to {most} tokens per step"] * skinny
        return f"layers: our Triton kernels {' and '.join(between + inside)}"
    if options.tensor_parallel_size == 1:
        return use_fused_mlp(model, options, device)
    if options.fused_mlp == "on":  # the operator adds the residual, but shards must be summed first
        raise ValueError("fused_mlp='on' needs whole layers; these are sharded over several ranks")
    return "MLP: PyTorch's kernels (the layers are sharded)"
