"""The classical block, LayerNorm and two matrices, as one small CUDA kernel (`csrc/stage_c/layernorm_mlp.cu`).

It is the usual first fused kernel, and the one in the article that this course grew from. Today's models have RMSNorm
and a gate instead; `fused_mlp.py` has the fast kernels for them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stage_c_fused_mlp.fused_mlp import load_operators


def ln_mlp_reference(x: Tensor, gamma: Tensor, beta: Tensor, w1: Tensor, w2: Tensor, eps: float) -> Tensor:
    """Compute LayerNorm (Ba et al. 2016) and the two-matrix block with SiLU; shapes as in `fused_ln_mlp`."""
    normalised = F.layer_norm(x, x.shape[-1:], gamma, beta, eps)  # [rows, hidden]
    return F.silu(normalised @ w1.T) @ w2.T


def fused_ln_mlp(x: Tensor, gamma: Tensor, beta: Tensor, w1: Tensor, w2: Tensor, eps: float = 1e-5) -> Tensor:
    """Compute LayerNorm -> w1 -> SiLU -> w2, in one kernel on a GPU.

    Args:
        x: `[rows, hidden]`, float32, float16 or bfloat16; all others have its dtype and device and are contiguous.
        gamma, beta: `[hidden]`.
        w1: `[intermediate, hidden]`.
        w2: `[hidden, intermediate]`.
        eps: added to the variance.

    Returns:
        `[rows, hidden]` in the dtype of x. On a GPU sums are in float32. Inference only: it has no gradient.

    Raises:
        ValueError, TypeError: a shape, dtype or device that does not fit.
        ExtensionError: the extension cannot be built here, or has no CUDA part and x is on a GPU.
    """
    if not torch.compiler.is_compiling():
        load_operators(x.device)
    return torch.ops.six_engines.fused_ln_mlp(x, gamma, beta, w1, w2, eps)


class FusedLayerNormMLP(nn.Module):
    """The classical block as a module with its parameters: LayerNorm -> up -> SiLU -> down. Inference only."""

    def __init__(self, hidden: int, intermediate: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(hidden))
        self.beta = nn.Parameter(torch.zeros(hidden))
        self.w1 = nn.Parameter(torch.randn(intermediate, hidden) * hidden**-0.5)
        self.w2 = nn.Parameter(torch.randn(hidden, intermediate) * intermediate**-0.5)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` -> the same shape."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return fused_ln_mlp(rows, self.gamma, self.beta, self.w1, self.w2, self.eps).view_as(x)
