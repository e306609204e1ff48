"""Use stage C's operator in this model: small steps run each MLP block as one operator instead of five kernels."""

from __future__ import annotations

import torch

from stage_c_fused_mlp.extension import ExtensionError, plan
from stage_c_fused_mlp.fused_mlp import load_operators, most_rows, why_unsupported
from stage_d_paged.model import DecoderModel
from stage_d_paged.options import EngineOptions


def use_fused_mlp(model: DecoderModel, options: EngineOptions, device: torch.device) -> str:
    """Let `model` use the operator in steps of few tokens, if `options.fused_mlp` and the machine allow it.

    Returns one line that says what was chosen. `auto` uses the operator on a GPU if it has been built; `on` builds it
    if it has not; `off` does not use it.

    Raises:
        ExtensionError: `on`, and the operator cannot be built here.
        ValueError: `on`, and the operator does not support the model's sizes.
    """
    choice = options.fused_mlp
    reason = "switched off" if choice == "off" else _why_not(model, device) if choice == "auto" else ""
    if reason:
        return f"MLP: PyTorch's kernels ({reason})"
    why = _why_unsupported(model, device)
    if why:
        raise ValueError(f"fused_mlp='on' is not possible here: {why}; use fused_mlp='auto'")
    load_operators(device)
    most = most_rows("auto", device)
    for layer in model.layers:
        layer.most_fused_rows = most
    return f"MLP: stage C's fused operator for up to {most} tokens per step, PyTorch's kernels beyond"


def _why_unsupported(model: DecoderModel, device: torch.device) -> str:
    if model.config.beyond_kernels:
        return f"it does not compute {model.config.beyond_kernels}"
    return why_unsupported("auto", device, model.config.hidden_size, model.config.intermediate_size)


def _why_not(model: DecoderModel, device: torch.device) -> str:
    """Return why not to use the operator; empty if there is no reason."""
    if device.type != "cuda":
        return "the fused operator is used on GPUs only, unless fused_mlp='on'"
    why = _why_unsupported(model, device)
    if why:
        return why
    try:
        extension = plan("fused_mlp")
    except ExtensionError as error:
        return str(error)
    if not extension.cuda:
        return extension.why_no_cuda
    return "" if extension.library.exists() else "stage C's operator has not been built; `make ext` builds it"
