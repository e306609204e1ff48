"""Kernel fusion in Triton: fewer, larger kernels per layer. `choose_layers` is the way in for the rest of stage F."""

from __future__ import annotations

import torch

from stage_d_paged.fused_mlp import use_fused_mlp
from stage_d_paged.model import DecoderModel
from stage_d_paged.options import EngineOptions


def choose_layers(model: DecoderModel, options: EngineOptions, device: torch.device, fused: bool) -> str:
    """Replace a model's layers by fused ones if `fused` is True on a GPU; return a line that says what is used.

    Raises:
        ValueError: `fused_mlp="on"`, which needs stage D's layers, whole.
        ExtensionError: as stage D's `use_fused_mlp`.
    """
    if fused and device.type == "cuda":
        if options.fused_mlp == "on":
            raise ValueError("fused_mlp='on' needs fused=False: the fused layers have MLP kernels of their own")
        from stage_f_graph_tp.kernels.fused_layers import fuse_layers  # here: only a GPU needs Triton
        from stage_f_graph_tp.kernels.skinny_gemm import SKINNY_GEMM_MAX_TOKENS

        fuse_layers(model)
        return (
            "layers: our Triton kernels between the matrix products and, "
            f"for up to {SKINNY_GEMM_MAX_TOKENS} tokens per step, in them"
        )
    if options.tensor_parallel_size == 1:
        return use_fused_mlp(model, options, device)
    if options.fused_mlp == "on":  # the operator adds the residual, which shards may do only once all are summed
        raise ValueError("fused_mlp='on' needs whole layers; these are sharded over several ranks")
    return "MLP: PyTorch's kernels (the layers are sharded)"
