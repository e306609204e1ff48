"""Which layers a model gets: fused ones, or stage D's."""

from __future__ import annotations

import torch

from stage_d_paged.fused_mlp import use_fused_mlp
from stage_d_paged.model import DecoderModel
from stage_f_graph_tp.options import GraphOptions


def choose_layers(model: DecoderModel, options: GraphOptions, device: torch.device) -> str:
    """Exchange the layers for fused ones, on a GPU and unless switched off. Returns a line that says what was done.

    Raises:
        ValueError: `fused_mlp="on"`, which needs stage D's layers, whole.
        ExtensionError: as stage D's `use_fused_mlp`.
    """
    if options.fused and device.type == "cuda":
        if options.fused_mlp == "on":
            raise ValueError("fused_mlp='on' needs fused=False: the fused layers have MLP kernels of their own")
        from stage_f_graph_tp.few_rows import FEW_ROWS  # here: Triton is needed on a GPU alone
        from stage_f_graph_tp.fused_layers import fuse_layers

        fuse_layers(model)
        return f"layers: our Triton kernels around and, for up to {FEW_ROWS} tokens a step, in the matrix products"
    if options.tensor_parallel_size == 1:
        return use_fused_mlp(model, options, device)
    if options.fused_mlp == "on":  # the operator adds the residual, which shards may do only once all are summed
        raise ValueError("fused_mlp='on' needs whole layers; these are sharded over several ranks")
    return "MLP: PyTorch's kernels (the layers are sharded)"
