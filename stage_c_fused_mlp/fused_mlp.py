"""The two MLP blocks: the formula in PyTorch, and the operators of our own that compute the same.

Between two attention layers a transformer does the same thing to every token on its own: normalise, multiply by a tall
matrix, apply a nonlinearity, multiply by a wide matrix. `*_reference` says it in a few lines of PyTorch, at least
one kernel a line; with one token the kernels are short, and much of the time goes into starting them and into waiting
for memory in between. The operators `torch.ops.six_engines.*` do it in one kernel.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stage_c_fused_mlp.extension import Extension, load_extension

# auto: by the number of rows, what the table in the README measured. library: PyTorch's own kernels, as one operator.
GENERATIONS = ("auto", "naive", "warp", "fused", "library")

# Beyond this many rows "auto" is "library": the switch point of the table in the README, as in csrc/fused_mlp.cpp.
MOST_ROWS_FUSED = 16


def ln_mlp_reference(x: Tensor, gamma: Tensor, beta: Tensor, w1: Tensor, w2: Tensor, eps: float) -> Tensor:
    """LayerNorm (Ba et al. 2016), then the two-matrix block with SiLU; shapes as in `fused_ln_mlp`."""
    normalised = F.layer_norm(x, x.shape[-1:], gamma, beta, eps)  # [rows, hidden]
    return F.silu(normalised @ w1.T) @ w2.T


def swiglu_mlp_reference(
    x: Tensor, rms_weight: Tensor, w_gate_up: Tensor, w_down: Tensor, residual: Tensor, eps: float
) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019), SwiGLU (Shazeer 2020) and the residual; shapes as in `fused_swiglu_mlp`."""
    normalised = F.rms_norm(x, x.shape[-1:], rms_weight, eps)  # [rows, hidden]
    gate, up = (normalised @ w_gate_up.T).chunk(2, dim=-1)  # [rows, intermediate] each
    return (F.silu(gate) * up) @ w_down.T + residual


@functools.cache
def load_operators() -> Extension:
    """Load the extension and tell PyTorch the shapes of its operators, which `torch.compile` needs to trace them.

    Raises:
        ExtensionError: the extension cannot be built here.
    """
    extension = load_extension("fused_mlp")

    @torch.library.register_fake("six_engines::fused_ln_mlp")
    def _(
        x: Tensor, gamma: Tensor, beta: Tensor, w1: Tensor, w2: Tensor, eps: float, generation: str = "auto"
    ) -> Tensor:
        return torch.empty_like(x)

    @torch.library.register_fake("six_engines::fused_swiglu_mlp")
    def _(
        x: Tensor, rms_weight: Tensor, w_gate_up: Tensor, w_down: Tensor, residual: Tensor, eps: float,
        generation: str = "auto",
    ) -> Tensor:  # fmt: skip
        return torch.empty_like(x)

    return extension


def _ready_for(x: Tensor) -> None:
    """Load the extension before the first call, and see that it has a CUDA part if x is on a GPU."""
    if torch.compiler.is_compiling():
        return
    extension = load_operators()
    if x.is_cuda:
        extension.require_cuda()


def fused_ln_mlp(
    x: Tensor, gamma: Tensor, beta: Tensor, w1: Tensor, w2: Tensor, eps: float = 1e-5, generation: str = "auto"
) -> Tensor:
    """LayerNorm -> w1 -> SiLU -> w2.

    Args:
        x: `[rows, hidden]`, float32, float16 or bfloat16; all others have its dtype and device and are contiguous.
        gamma, beta: `[hidden]`.
        w1: `[intermediate, hidden]`; both sizes are multiples of 8.
        w2: `[hidden, intermediate]`.
        eps: added to the variance.
        generation: one of `GENERATIONS`; on the CPU `auto` or `library`.

    Returns:
        `[rows, hidden]` in the dtype of x. Sums are in float32. Inference only: it has no gradient.

    Raises:
        ValueError, TypeError: a shape, dtype, device or generation that does not fit.
        ExtensionError: the extension cannot be built here, or has no CUDA part and x is on a GPU.
    """
    _ready_for(x)
    return torch.ops.six_engines.fused_ln_mlp(x, gamma, beta, w1, w2, eps, generation)


def fused_swiglu_mlp(
    x: Tensor,
    rms_weight: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    residual: Tensor,
    eps: float = 1e-6,
    generation: str = "auto",
) -> Tensor:
    """RMSNorm -> gate and up -> SiLU(gate) * up -> down -> + residual: the block of Qwen and Llama.

    Args:
        x: `[rows, hidden]`; dtypes, devices and sizes as in `fused_ln_mlp`.
        rms_weight: `[hidden]`.
        w_gate_up: `[2 * intermediate, hidden]`, the gate rows first.
        w_down: `[hidden, intermediate]`.
        residual: `[rows, hidden]`; in a pre-norm model x itself.
        eps: added to the mean square.
        generation: as in `fused_ln_mlp`.

    Returns:
        `[rows, hidden]`.

    Raises:
        as `fused_ln_mlp`.
    """
    _ready_for(x)
    return torch.ops.six_engines.fused_swiglu_mlp(x, rms_weight, w_gate_up, w_down, residual, eps, generation)


class FusedLayerNormMLP(nn.Module):
    """The classical block as a module, with parameters of its own: LayerNorm -> up -> SiLU -> down. Inference only."""

    def __init__(self, hidden: int, intermediate: int, eps: float = 1e-5, generation: str = "auto") -> None:
        super().__init__()
        self.eps, self.generation = eps, generation
        self.gamma = nn.Parameter(torch.ones(hidden))
        self.beta = nn.Parameter(torch.zeros(hidden))
        self.w1 = nn.Parameter(torch.randn(intermediate, hidden) * hidden**-0.5)
        self.w2 = nn.Parameter(torch.randn(hidden, intermediate) * intermediate**-0.5)
        self.requires_grad_(False)
        load_operators()

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` -> the same shape."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return fused_ln_mlp(rows, self.gamma, self.beta, self.w1, self.w2, self.eps, self.generation).view_as(x)
