"""Stage D's layers with 8-bit weights, and a model built of them.

A matrix is quantised while it is loaded, one at a time, straight from the checkpoint's values: the model in 16 bits
never exists in memory. On a CPU the product dequantises the matrix first (`reference_product`): correct, smaller, and
slower than no quantisation at all. On a GPU `use_kernels` (`fused_layers.py`) sets Triton's product in its place.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beyond.quantization.formats import FORMATS, Quantized, dequantize_matrix, quantize_matrix
from beyond.quantization.options import QuantizationOptions
from stage_a_naive.checkpoints.checkpoint import check_finite
from stage_a_naive.checkpoints.memory import check_room
from stage_a_naive.contract.errors import ModelError
from stage_d_paged.attention import AttentionBackend
from stage_d_paged.config import ModelConfig
from stage_d_paged.layers import Embedding, PackedLinear, ResidualLinear, RotaryEmbedding
from stage_d_paged.model import DecoderModel
from stage_d_paged.weights import TensorSource, WeightLoader


class Product(Protocol):
    """A way to compute `x Wᵀ (+ b)`."""

    def __call__(self, x: Tensor, weight: Quantized, bias: Tensor | None = None, /) -> Tensor: ...


META = torch.device("meta")  # shapes without memory


class QuantizedMatrix(nn.Module):
    """A matrix in 8 bits, `[rows, columns]`.

    Attributes:
        product: `x Wᵀ (+ b)` with it: `reference_product`, or a GPU's kernel.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, group_size: int | None) -> None:
        super().__init__()
        groups = 1 if group_size is None else -(-columns // group_size)
        values = torch.empty(rows, columns, dtype=dtype, device=META)
        self.values = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(torch.empty(rows, groups, device=META), requires_grad=False)
        self.group_size = group_size
        self.product: Product = self.reference_product

    @property
    def weight(self) -> Quantized:
        return Quantized(self.values, self.scales)

    def load_rows(self, rows: slice, weights: WeightLoader, name: str) -> None:
        """Read a matrix of the checkpoint into some of the rows; quantise it, unless it is stored in 8 bits there."""
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

    def reference_product(self, x: Tensor, weight: Quantized, bias: Tensor | None = None) -> Tensor:
        """Compute `x Wᵀ (+ b)` by dequantising the whole matrix."""
        return F.linear(x, dequantize_matrix(weight, x.dtype, self.group_size), bias)


class QuantizedPackedLinear(QuantizedMatrix):
    """Stage D's `PackedLinear`: `x Wᵀ (+ b)`, the rows of W being those of several checkpoint matrices."""

    def __init__(self, linear: PackedLinear, dtype: torch.dtype, group_size: int | None) -> None:
        rows, columns = linear.weight.shape
        super().__init__(rows, columns, dtype, group_size)
        self.parts = linear.parts
        self.bias = linear.bias

    def load(self, weights: WeightLoader, prefix: str) -> None:
        start = 0
        for part, rows in self.parts.items():
            own = slice(start, start + rows)
            self.load_rows(own, weights, f"{prefix}.{part}.weight")
            if self.bias is not None:
                weights.fill(self.bias[own], f"{prefix}.{part}.bias")
            start += rows

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class QuantizedResidualLinear(QuantizedMatrix):
    """Stage D's `ResidualLinear`: `residual + x Wᵀ`, written over `residual`."""

    def __init__(self, linear: ResidualLinear, dtype: torch.dtype, group_size: int | None) -> None:
        rows, columns = linear.weight.shape
        super().__init__(rows, columns, dtype, group_size)

    def load(self, weights: WeightLoader, prefix: str) -> None:
        self.load_rows(slice(None), weights, f"{prefix}.weight")

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(self.product(x, self.weight))


class QuantizedEmbedding(QuantizedMatrix):
    """Stage D's `Embedding`, whose rows are token ids: the LM head, and with tied embeddings the table too."""

    def __init__(self, embedding: Embedding, dtype: torch.dtype, group_size: int | None) -> None:
        rows, columns = embedding.weight.shape
        super().__init__(rows, columns, dtype, group_size)
        self.dtype = embedding.weight.dtype

    def load(self, weights: WeightLoader, prefix: str) -> None:
        self.load_rows(slice(None), weights, f"{prefix}.weight")

    def check_copy(self, weights: WeightLoader, prefix: str) -> None:
        """Check that a second copy of a tied table, stored as the LM head, has the same values."""
        name = f"{prefix}.weight"
        copy = weights.read(name, tuple(self.values.shape)).to(self.values.device)
        same = quantize_matrix(copy, self.values.dtype, self.group_size).values
        if not torch.equal(same.view(torch.int8), self.values.view(torch.int8)):
            raise ModelError(f"{name} differs from the weight that the config ties it to")

    def forward(self, input_ids: Tensor) -> Tensor:
        # As bytes: on a CPU, PyTorch cannot look up rows of float8 by index.
        values = self.values.view(torch.int8)[input_ids].view(self.values.dtype)
        return dequantize_matrix(Quantized(values, self.scales[input_ids]), self.dtype, self.group_size)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits = self.product(hidden, self.weight)
        return logits if out is None else out.copy_(logits)


def empty_model(
    config: ModelConfig,
    backend: AttentionBackend,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    options: QuantizationOptions,
) -> DecoderModel:
    """Stage D's model with the matrices that the options ask for in 8 bits. Its weights are uninitialised."""
    if options.quantization is None:
        return DecoderModel(config, backend, max_model_len, dtype, device)
    model = DecoderModel(config, backend, max_model_len, dtype, META)  # matrices in 16 bits take no memory
    scheme = FORMATS[options.quantization], options.quantization_group_size
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.qkv_proj = QuantizedPackedLinear(attention.qkv_proj, *scheme)
        attention.o_proj = QuantizedResidualLinear(attention.o_proj, *scheme)
        mlp.gate_up_proj = QuantizedPackedLinear(mlp.gate_up_proj, *scheme)
        mlp.down_proj = QuantizedResidualLinear(mlp.down_proj, *scheme)
    if options.quantize_lm_head:
        tied = model.lm_head is model.embed_tokens
        model.lm_head = QuantizedEmbedding(model.lm_head, *scheme)
        model.embed_tokens = model.lm_head if tied else model.embed_tokens
    check_room(model, device)
    model.to_empty(device=device)
    model.rotary = RotaryEmbedding(config, max_model_len, dtype, device)  # computed, not loaded: made once more
    return model


def build_quantized_model(
    config: ModelConfig,
    backend: AttentionBackend,
    max_model_len: int,
    tensors: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    options: QuantizationOptions,
) -> DecoderModel:
    """Build the model with its weights, quantised as they are loaded."""
    model = empty_model(config, backend, max_model_len, dtype, device, options)
    model.load(WeightLoader(tensors))
    return model
