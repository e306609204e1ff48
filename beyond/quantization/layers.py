"""8-bit versions of the linears and the LM head of stage D's model.

The model makes its linears and its LM head with the functions in `Formats`. The functions here make them in 8 bits.
Each matrix is quantised while it is loaded, straight from the checkpoint's values, so the 16-bit model never exists in
memory. On a CPU the product dequantises the matrix first (`dequantized_product`): correct, smaller, and slower than no
quantisation at all. On a GPU Triton's product reads 8 bits (`fused_layers.py`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beyond.quantization.formats import Quantized, dequantize_matrix, quantize_matrix
from beyond.quantization.options import GROUP_SIZE
from stage_a_naive.checkpoints.checkpoint import check_finite
from stage_a_naive.contract.errors import ModelError
from stage_d_paged.layers import parameter
from stage_d_paged.weights import WeightLoader


class Product(Protocol):
    """A way to compute `x Wᵀ (+ b)`, or `residual + x Wᵀ` written over `residual`."""

    def __call__(
        self, x: Tensor, weight: Quantized, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor: ...


def dequantized_product(
    x: Tensor, weight: Quantized, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Multiply by the dequantised matrix: a `Product` for any device."""
    group_size = GROUP_SIZE if weight.scales.shape[1] > 1 else None
    product = F.linear(x, dequantize_matrix(weight, x.dtype, group_size), bias)
    return product if residual is None else residual.add_(product)


class Scheme(NamedTuple):
    """How matrices are quantised, and multiplied by."""

    dtype: torch.dtype  # int8 or float8_e4m3fn
    group_size: int | None = None  # columns that share a scale; None: all of a row
    product: Product = dequantized_product


class QuantizedMatrix(nn.Module):
    """A matrix in 8 bits, `[rows, columns]`, uninitialised."""

    def __init__(self, scheme: Scheme, rows: int, columns: int, device: torch.device) -> None:
        super().__init__()
        groups = 1 if scheme.group_size is None else -(-columns // scheme.group_size)
        self.values = parameter(rows, columns, dtype=scheme.dtype, device=device)
        self.scales = parameter(rows, groups, dtype=torch.float32, device=device)
        self.group_size = scheme.group_size

    @property
    def weight(self) -> Quantized:
        return Quantized(self.values, self.scales)

    def load_rows(self, rows: slice, weights: WeightLoader, name: str) -> None:
        """Read a matrix of the checkpoint into some of the rows; quantise it unless it is stored in 8 bits."""
        values, scales = self.values[rows], self.scales[rows]
        weight = weights.read(name, tuple(values.shape)).to(values.device)
        if weights.has(f"{name}_scale"):
            values.copy_(weight)
            weights.fill(scales, f"{name}_scale")
            return
        check_finite(weight, name)
        quantized = quantize_matrix(weight, values.dtype, self.group_size)
        values.copy_(quantized.values)
        scales.copy_(quantized.scales)


class QuantizedLinear(nn.Module):
    """Stage D's `Linear` with the matrix in 8 bits. Arguments except `scheme` as in `Linear`."""

    def __init__(
        self,
        scheme: Scheme,
        in_features: int,
        parts: dict[str, int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        rows = sum(parts.values())
        self.parts, self.product = parts, scheme.product
        self.matrix = QuantizedMatrix(scheme, rows, in_features, device)
        self.bias = parameter(rows, dtype=dtype, device=device) if bias else None

    @property
    def weight(self) -> Quantized:
        return self.matrix.weight

    def load(self, weights: WeightLoader, prefix: str) -> None:
        start = 0
        for part, rows in self.parts.items():
            own = slice(start, start + rows)
            self.matrix.load_rows(own, weights, f"{prefix}.{part}.weight")
            if self.bias is not None:
                weights.fill(self.bias[own], f"{prefix}.{part}.bias")
            start += rows

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.product(x, self.weight, self.bias, residual)


class QuantizedEmbedding(nn.Module):
    """Stage D's `Embedding` in 8 bits: the LM head, and with tied embeddings also the table."""

    def __init__(
        self, scheme: Scheme, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.matrix = QuantizedMatrix(scheme, vocab_size, hidden_size, device)
        self.product, self.dtype = scheme.product, dtype

    def load(self, weights: WeightLoader, prefix: str) -> None:
        self.matrix.load_rows(slice(None), weights, f"{prefix}.weight")

    def check_copy(self, weights: WeightLoader, prefix: str) -> None:
        """Check that a second copy of a tied table, stored as the LM head, has the same values."""
        name, values = f"{prefix}.weight", self.matrix.values
        copy = weights.read(name, tuple(values.shape)).to(values.device)
        same = quantize_matrix(copy, values.dtype, self.matrix.group_size).values
        if not torch.equal(same.view(torch.int8), values.view(torch.int8)):
            raise ModelError(f"{name} differs from the weight that the config ties it to")

    def forward(self, input_ids: Tensor) -> Tensor:
        values, scales = self.matrix.weight
        # As bytes: on a CPU, PyTorch cannot look up rows of float8 by index.
        rows = values.view(torch.int8)[input_ids].view(values.dtype)
        return dequantize_matrix(Quantized(rows, scales[input_ids]), self.dtype, self.matrix.group_size)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits = self.product(hidden, self.matrix.weight)
        return logits if out is None else out.copy_(logits)
