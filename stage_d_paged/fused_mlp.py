"""Whether the MLP blocks of a few tokens run as stage C's one operator instead of five kernels."""

from __future__ import annotations

import torch

from stage_c_fused_mlp.extension import ExtensionError, plan
from stage_c_fused_mlp.fused_mlp import MOST_ROWS_FUSED, load_operators
from stage_d_paged.model import DecoderModel
from stage_d_paged.options import EngineOptions


def use_fused_mlp(model: DecoderModel, options: EngineOptions, device: torch.device) -> str:
    """Let `model` use the operator for up to `MOST_ROWS_FUSED` tokens, if `options.fused_mlp` and the machine allow.

    Beyond so many the operator itself turns to the library's matrix products. Returns one line that says what was done.
    `auto` uses the operator on a GPU if it has been built; `on` builds it if it has not; `off` does not use it.

    Raises:
        ExtensionError: `on`, and the operator cannot be built here.
    """
    choice = options.fused_mlp
    reason = "switched off" if choice == "off" else _why_not(model, device) if choice == "auto" else ""
    if reason:
        return f"MLP: PyTorch's kernels ({reason})"
    extension = load_operators()
    if device.type == "cuda":
        extension.require_cuda()
    for layer in model.layers:
        layer.most_fused_rows = MOST_ROWS_FUSED
    return f"MLP: stage C's fused operator for up to {MOST_ROWS_FUSED} tokens a step, PyTorch's kernels beyond"


def _why_not(model: DecoderModel, device: torch.device) -> str:
    """The reason to leave the operator alone; empty if there is none."""
    if device.type != "cuda":
        return "the fused operator is faster on GPUs only"
    if model.config.hidden_size % 8 or model.config.intermediate_size % 8:
        return "the fused operator takes sizes that are multiples of 8"
    try:
        extension = plan("fused_mlp")
    except ExtensionError as error:
        return str(error)
    if not extension.cuda:
        return extension.why_no_cuda
    return "" if extension.library.exists() else "stage C's operator has not been built; `make ext` builds it"
