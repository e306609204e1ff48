"""The parts of a decoder, for flat batches: every tensor is `[tokens, …]`, with no batch dimension and no padding.

Matrices that read the same input are packed into one, because one large product is faster than several small ones: Q, K
and V become `qkv_proj`, gate and up become `gate_up_proj`. A linear records which rows belong to which matrix of the
checkpoint and fills them in `load`. If its output is added to the residual stream, the linear does the addition too, so
that product and sum are one kernel (`beta = 1` in the BLAS call `C = A B + beta C`).

Norms and rotary tables are computed in float32 and then rounded to the model's dtype, as in `transformers`. There is
one difference: `transformers` rounds a norm twice, before and after its weight, and `F.rms_norm` rounds once. In
bfloat16 this can change the last bit of an element.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stage_d_paged.rope import Rope
from stage_d_paged.weights import WeightLoader

_gelu_tanh = partial(F.gelu, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


# By their names in configs, several for one formula; each returns a new tensor.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("silu", "swish"), F.silu),
    **dict.fromkeys(("gelu", "gelu_python"), F.gelu),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), _gelu_tanh),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
}


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Make an uninitialised weight without gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype, device=device)
        self.eps = eps

    def load(self, weights: WeightLoader, prefix: str) -> None:
        weights.fill(self.weight, f"{prefix}.weight")

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """Gemma's RMSNorm: the weight is `1 + w` for a stored `w`, and only the final product is rounded."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, eps, torch.float32, device)

    def load(self, weights: WeightLoader, prefix: str) -> None:
        super().load(weights, prefix)
        self.weight += 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class QKNorm(nn.Module):
    """Qwen3's RMSNorm of every query and key head, over `head_dim`. One weight for queries, one for keys."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        # One row per head: queries and keys are adjacent in memory, so one product scales both.
        self.weight = parameter(num_heads + num_kv_heads, head_dim, dtype=dtype, device=device)
        self.num_heads = num_heads
        self.eps = eps

    def load(self, weights: WeightLoader, prefix: str) -> None:
        for name, heads in ("q_norm", self.weight[: self.num_heads]), ("k_norm", self.weight[self.num_heads :]):
            weights.fill(heads[0], f"{prefix}.{name}.weight")
            heads[1:] = heads[0]

    def forward(self, qk: Tensor) -> Tensor:  # [tokens, heads + kv_heads, head_dim]
        return F.rms_norm(qk, qk.shape[-1:], None, self.eps) * self.weight


class OffsetQKNorm(QKNorm):
    """Gemma 3's norm of heads, with weight `1 + w` as in `OffsetRMSNorm`."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(num_heads, num_kv_heads, head_dim, eps, torch.float32, device)

    def load(self, weights: WeightLoader, prefix: str) -> None:
        super().load(weights, prefix)
        self.weight += 1

    def forward(self, qk: Tensor) -> Tensor:
        return super().forward(qk.float()).to(qk.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al., 2021): dimension pair (i, i + head_dim/2) turns by `position * freq_i`.

    cos and sin of all positions up to `max_positions` are computed once; a step looks up its positions.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: Rope, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * rope.frequencies(head_dim)
        cos, sin = (
            angles.cos() * rope.attention_factor,
            angles.sin() * rope.attention_factor,
        )  # [positions, head_dim / 2]
        # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin): the halves swapped, times sin with the first half negated.
        self.register_buffer("cos", torch.stack((cos, cos), 1).to(device, dtype), persistent=False)
        self.register_buffer("sin", torch.stack((-sin, sin), 1).to(device, dtype), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Look up cos and signed sin of positions `[tokens]`, each `[tokens, 1, 2, head_dim / 2]`, for all layers."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `[tokens, heads, head_dim]` by the angles of their positions."""
    pairs = x.view(*x.shape[:-1], 2, -1)  # [tokens, heads, 2, head_dim / 2]
    return (pairs * cos).addcmul_(pairs.flip(-2), sin).view(x.shape)


class Linear(nn.Module):
    """`x Wᵀ (+ b)`, where W stacks the rows of the checkpoint's matrices in `parts`: name -> rows, in order."""

    def __init__(
        self, in_features: int, parts: dict[str, int], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.parts = parts
        self.weight = parameter(sum(parts.values()), in_features, dtype=dtype, device=device)
        self.bias = parameter(sum(parts.values()), dtype=dtype, device=device) if bias else None

    def load(self, weights: WeightLoader, prefix: str) -> None:
        start = 0
        for part, rows in self.parts.items():
            own = slice(start, start + rows)
            weights.fill(self.weight[own], f"{prefix}.{part}.weight")
            if self.bias is not None:
                weights.fill(self.bias[own], f"{prefix}.{part}.bias")
            start += rows

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the product; with a `residual`, add the product to it in place."""
        if residual is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is not None:
            return residual.add_(F.linear(x, self.weight, self.bias))
        return residual.addmm_(x, self.weight.t())


class Embedding(nn.Module):
    """Maps a token id to its row of the table; if tied, also the LM head (hidden -> a score for every token)."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size, dtype=dtype, device=device)

    def load(self, weights: WeightLoader, prefix: str) -> None:
        weights.fill(self.weight, f"{prefix}.weight")

    def check_copy(self, weights: WeightLoader, prefix: str) -> None:
        """Check that a table that is stored twice, e.g. as the tied LM head, has the same values in both places."""
        weights.check_equal(self.weight, f"{prefix}.weight")

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(hidden, self.weight.t(), out=out)
