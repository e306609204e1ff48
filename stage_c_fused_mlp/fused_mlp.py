"""The MLP block: the formula in PyTorch, and a custom operator that computes the same.

Between two attention layers, a transformer processes every token separately: it normalises, multiplies by a tall
matrix, applies a nonlinearity, and multiplies by a wide matrix. `swiglu_mlp_reference` does this in a few lines of
PyTorch, with at least one kernel per line. For one token the kernels are short, and much of the time goes into
launching them and into waiting for memory in between. The operator `torch.ops.six_engines.fused_swiglu_mlp` is one
call:

    naive    the formula as it reads, one thread per neuron
    warp     one warp per weight row, so that neighbouring lanes read neighbouring addresses
    fused    one kernel for the whole block, weights always in flight; on a CPU, one loop over the weights in C++
    library  PyTorch's kernels, one after the other
    auto     the one that was measured to be the fastest for the number of rows
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from stage_c_fused_mlp.extension import Extension, load_extension, plan

KERNELS = ("auto", "naive", "warp", "fused", "library")
CPU_KERNELS = ("auto", "fused", "library")
FUSED_CAPABILITY = (9, 0)  # the fused kernel uses the copy engine that Hopper introduced

# "auto" calls our kernels for up to this many rows, and PyTorch's for more: the tables in the README cross here. The
# same numbers are in csrc/stage_c/operators.cpp.
MOST_ROWS = {"cuda": 16, "cpu": 2}


def swiglu_mlp_reference(
    x: Tensor, rms_weight: Tensor, w_gate_up: Tensor, w_down: Tensor, residual: Tensor, eps: float
) -> Tensor:
    """Compute RMSNorm (Zhang and Sennrich 2019), SwiGLU (Shazeer 2020), residual; shapes as in `fused_swiglu_mlp`."""
    normalised = F.rms_norm(x, x.shape[-1:], rms_weight, eps)  # [rows, hidden]
    gate, up = (normalised @ w_gate_up.T).chunk(2, dim=-1)  # [rows, intermediate] each
    return (F.silu(gate) * up) @ w_down.T + residual


def why_unsupported(kernel: str, device: torch.device, hidden: int, intermediate: int) -> str:
    """Return why `kernel` cannot run on `device` at these sizes and what to use instead; "" if it can run.

    Compiles and loads nothing.
    """
    if kernel not in KERNELS:
        return f"expected one of {', '.join(KERNELS)}"
    if device.type == "cpu" and kernel not in CPU_KERNELS:
        return f"it is a CUDA kernel; on the CPU use one of {', '.join(CPU_KERNELS)}"
    if hidden % 8 or intermediate % 8:
        return f"the sizes are {hidden} and {intermediate}, and it takes multiples of 8; stage B takes any size"
    if kernel == "fused" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FUSED_CAPABILITY:
            return f"it needs compute capability 9.0 and this GPU has {'.'.join(map(str, capability))}; use 'warp'"
    return ""


def most_rows(kernel: str, device: torch.device) -> int:
    """Return the most rows for which a model calls the operator; for more, PyTorch's products are always faster."""
    return MOST_ROWS[device.type] if kernel == "auto" else MOST_ROWS["cuda"]


def load_operators(device: torch.device | str = "cpu") -> Extension:
    """Load the extension, building it if needed, and register the operators' shapes for `torch.compile`.

    Args:
        device: where the operators will run. If they cannot run on this GPU, nothing is built.

    Raises:
        ExtensionError: the extension cannot be built here, or not with CUDA and `device` is a GPU.
    """
    if torch.device(device).type == "cuda":
        plan("fused_mlp").require_cuda()
    return _loaded()


@functools.cache
def _loaded() -> Extension:
    extension = load_extension("fused_mlp")

    @torch.library.register_fake("six_engines::fused_ln_mlp")
    def _(x: Tensor, gamma: Tensor, beta: Tensor, w1: Tensor, w2: Tensor, eps: float) -> Tensor:
        return torch.empty_like(x)

    @torch.library.register_fake("six_engines::fused_swiglu_mlp")
    def _(
        x: Tensor,
        rms_weight: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        residual: Tensor,
        eps: float,
        variant: str = "auto",
    ) -> Tensor:
        return torch.empty_like(x)

    return extension


def fused_swiglu_mlp(
    x: Tensor,
    rms_weight: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    residual: Tensor,
    eps: float = 1e-6,
    kernel: str = "auto",
) -> Tensor:
    """Compute RMSNorm -> gate and up -> SiLU(gate) * up -> down -> + residual: the MLP block of Qwen and Llama.

    Args:
        x: `[rows, hidden]`, float32, float16 or bfloat16; all others have its dtype and device and are contiguous.
        rms_weight: `[hidden]`.
        w_gate_up: `[2 * intermediate, hidden]`, the gate rows first; both sizes are multiples of 8.
        w_down: `[hidden, intermediate]`.
        residual: `[rows, hidden]`; in a pre-norm model x itself.
        eps: added to the mean square.
        kernel: one of `KERNELS`; on a CPU one of `CPU_KERNELS`.

    Returns:
        `[rows, hidden]` in the dtype of x. Sums are in float32. Inference only: it has no gradient.

    Raises:
        ValueError, TypeError: a shape, dtype, device or kernel does not fit.
        ExtensionError: the extension cannot be built here, or has no CUDA part and x is on a GPU.
    """
    if not torch.compiler.is_compiling():
        load_operators(x.device)
    return torch.ops.six_engines.fused_swiglu_mlp(x, rms_weight, w_gate_up, w_down, residual, eps, kernel)
