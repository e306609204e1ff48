"""A layer's MLP with experts: route every token to a few of many small MLPs, and add their outputs.

For a token `x` with the router's scores `s = gate(x)`, its experts are those of the `per_token` largest probabilities:

    p = softmax(s);    y = x + sum over its experts e of  p[e] * down_e(silu(gate_e(x)) * up_e(x))

The matrices of all experts are one matrix each, `gate_up_proj` and `down_proj`: an expert is some of their rows. So
they are loaded, quantised and divided by the same code as all other matrices of stage D's model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from beyond.quantization.formats import Quantized, dequantize_matrix
from beyond.quantization.options import GROUP_SIZE
from stage_a_naive.checkpoints.experts import Experts
from stage_d_paged.config import LayerKind, ModelConfig
from stage_d_paged.layers import ACTIVATIONS, Linear
from stage_d_paged.model import MLP, MakeLinear, make_mlp
from stage_d_paged.weights import WeightLoader


class Compute(Protocol):
    """A way to run the experts of a layer."""

    def __call__(self, mlp: SparseMLP, x: Tensor, weights: Tensor, chosen: Tensor, residual: Tensor) -> Tensor:
        """Add the experts' outputs to `residual [tokens, hidden]`, in place, and return it.

        Args:
            mlp: has the matrices.
            x: `[tokens, hidden]`, normalised.
            weights, chosen: `[tokens, per_token]`, what `route` returns; experts are numbered as the matrices are, and
                -1 is none of them.
            residual: `[tokens, hidden]`.
        """
        ...


def route(scores: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token from the router's scores `[tokens, count]`.

    Returns:
        The weights of its experts `[tokens, per_token]`, largest first, and their numbers (int64). The softmax is
        float32. Qwen rounds the weights to the scores' dtype, Mixtral keeps float32.
    """
    weights, chosen = scores.softmax(-1, dtype=torch.float32).topk(experts.per_token)
    if experts.weights_sum_to_one:
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights.to(scores.dtype) if experts.rounds_weights else weights), chosen


def rows_of(linear: Any, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return rows of a linear's matrix, dequantised if need be."""
    weight, rows = linear.weight, slice(first, first + count)
    if isinstance(weight, Tensor):
        return weight[rows]
    part = Quantized(weight.values[rows], weight.scales[rows])
    return dequantize_matrix(part, dtype, GROUP_SIZE if part.scales.shape[1] > 1 else None)


def expert_by_expert(mlp: SparseMLP, x: Tensor, weights: Tensor, chosen: Tensor, residual: Tensor) -> Tensor:
    """Run one expert after another, each on its tokens: a `Compute` in plain PyTorch, which waits for the device."""
    hidden, size = x.shape[1], mlp.experts.size
    for expert in chosen[chosen >= 0].unique().tolist():
        token, which = torch.where(chosen == expert)
        gate, up = (x[token] @ rows_of(mlp.gate_up_proj, 2 * expert * size, 2 * size, x.dtype).T).chunk(2, dim=-1)
        output = (mlp.activation(gate) * up) @ rows_of(mlp.down_proj, expert * hidden, hidden, x.dtype).T
        residual.index_add_(0, token, (output * weights[token, which, None]).to(residual.dtype))
    return residual


class SparseMLP(nn.Module):
    """A router and its experts, with the interface of stage D's `MLP`.

    Args:
        config, dtype, device, linear: as of `MLP`.
        experts: their numbers and sizes.
        compute: runs the chosen experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        experts: Experts,
        dtype: torch.dtype,
        device: torch.device,
        linear: MakeLinear,
        compute: Compute = expert_by_expert,
    ) -> None:
        super().__init__()
        hidden, size, numbers = config.hidden_size, experts.size, experts.held
        self.experts, self.compute, self.activation = experts, compute, ACTIVATIONS[config.activation]
        self.gate = Linear(hidden, {"gate": experts.count}, False, dtype, device)  # the router, never in 8 bits
        pairs = {f"experts.{i}.{name}": size for i in numbers for name in ("gate_proj", "up_proj")}
        self.gate_up_proj = linear(hidden, pairs, False, dtype, device)
        self.down_proj = linear(size, {f"experts.{i}.down_proj": hidden for i in numbers}, False, dtype, device)
        self.shared_expert = self.shared_expert_gate = None
        if experts.shared_size:
            shared = replace(config, intermediate_size=experts.shared_size)
            self.shared_expert = MLP(shared, dtype, device, linear)
            self.shared_expert_gate = Linear(hidden, {"shared_expert_gate": 1}, False, dtype, device)

    def load(self, weights: WeightLoader, prefix: str) -> None:
        for matrix in (self.gate, self.gate_up_proj, self.down_proj, self.shared_expert_gate):
            if matrix is not None:
                matrix.load(weights, prefix)
        if self.shared_expert is not None:
            self.shared_expert.load(weights, f"{prefix}.shared_expert")

    def add_shared(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add the output of the expert that every token uses, if there is one, to `residual`, in place."""
        if self.shared_expert is None or self.shared_expert_gate is None:
            return residual
        return residual.add_(self.shared_expert_gate(x).sigmoid() * self.shared_expert(x, None))

    @property
    def group(self) -> Any:
        """The ranks that have the other experts, or the other parts of every expert; None if this one has all."""
        return getattr(self.down_proj, "group", None)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        total = torch.zeros_like(x) if residual is None or self.group is not None else residual
        total = self.compute(self, x, *route(self.gate(x), self.experts), self.add_shared(x, total))
        return total if self.group is None else self.group.all_reduce(total, residual)


def make_sparse_mlp(
    compute: Compute,
    config: ModelConfig,
    kind: LayerKind,
    dtype: torch.dtype,
    device: torch.device,
    linear: MakeLinear,
) -> MLP | SparseMLP:
    """Make the MLP of a layer, with experts if it has them."""
    if kind.experts is None:
        return make_mlp(config, kind, dtype, device, linear)
    return SparseMLP(config, kind.experts, dtype, device, linear, compute)
