"""Matrix products with 8-bit weights on a GPU, in Triton.

    few tokens    product · gate_up_silu · product_add: stage F's skinny GEMMs, reading half the bytes
    more tokens   product with larger tiles
    many tokens   dequantise the matrix into scratch memory, then the library's product

A decode step's large products take as long as reading the weights, so half the bytes take nearly half the time. Small
products are bound by latency: they have too few programs to keep the memory busy. With many tokens the arithmetic
dominates, and it stays the same, because the weights are multiplied in the model's dtype. There the library's product
is the fastest, and dequantising the matrix first is a small part of the time.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from beyond.quantization.conversion import dequantize_kernel
from beyond.quantization.formats import Quantized
from beyond.quantization.options import GROUP_SIZE
from beyond.quantization.product_kernels import (
    gate_up_silu_kernel,
    product_add_kernel,
    product_kernel,
    scale_kernel,
)
from beyond.quantization.tiles import Tiles, choose_tiles, token_block
from stage_f_graph_tp.kernels.pdl import pdl_settings
from stage_f_graph_tp.kernels.skinny_gemm import ceil_div

PRODUCT_MAX_TOKENS = 128  # above, dequantise and let the library multiply


class Stream(NamedTuple):
    """The residual stream and the first half of its next norm.

    Stage F moves the norm's weight into the columns of the next matrix. Matrices from an 8-bit checkpoint are already
    quantised with a scale per row, so here the weight multiplies the matrix's input instead.
    """

    x: Tensor  # [tokens, hidden]
    scaled: Tensor  # [tokens, hidden]: x * the norm's weight
    squares: Tensor  # float32 [parts, tokens]: sums of x², over parts of the row


def scale_rows(x: Tensor, gain: Tensor, pdl: bool = True) -> Stream:
    """Compute the first half of a norm of `x [tokens, hidden]` with the weight `gain`."""
    tokens, hidden = x.shape
    scaled = torch.empty_like(x, memory_format=torch.contiguous_format)
    squares = torch.empty(1, tokens, dtype=torch.float32, device=x.device)
    pad = triton.next_power_of_2(hidden)
    scale_kernel[(tokens,)](
        x,
        x.stride(0),
        gain,
        scaled,
        squares,
        SIZE=hidden,
        SIZE_PAD=pad,
        num_warps=min(8, max(1, pad // 512)),
        **pdl_settings(x.device, pdl),
    )
    return Stream(x, scaled, squares)


def product(
    x: Tensor, weight: Quantized, bias: Tensor | None = None, tiles: Tiles | None = None, pdl: bool = True
) -> Tensor:
    """Compute `x Wᵀ (+ b)`: `[tokens, in_features]` -> `[tokens, out_features]`."""
    if x.shape[0] > PRODUCT_MAX_TOKENS:
        return F.linear(x, dequantize(weight, x.dtype), bias)
    return _product(x, None, 0.0, weight, bias, tiles, pdl)


def normed_product(
    stream: Stream,
    eps: float,
    weight: Quantized,
    bias: Tensor | None,
    tiles: Tiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """Compute the product of the normalised rows, given the first half of their norm."""
    return _product(stream.scaled, stream.squares, eps, weight, bias, tiles, pdl)


def _product(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Quantized,
    bias: Tensor | None,
    tiles: Tiles | None,
    pdl: bool,
) -> Tensor:
    tokens = x.shape[0]
    rows, columns = weight.values.shape
    tiles = tiles or choose_tiles(rows, columns, tokens, x.element_size(), _group(weight), x.device)
    block_m = token_block(tokens)
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    parts = 1 if squares is None else len(squares)
    product_kernel[ceil_div(tokens, block_m), ceil_div(rows, tiles.rows)](
        x,
        x.stride(0),
        out if squares is None else squares,
        parts,
        tokens,
        eps,
        *weight,
        out if bias is None else bias,
        out,
        SIZE=columns,
        OUT_SIZE=rows,
        GROUP=_group(weight),
        PARTS=triton.next_power_of_2(parts),
        HAS_NORM=squares is not None,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        **_settings(tiles, x, pdl),
    )
    return out


def gate_up_silu(stream: Stream, eps: float, weight: Quantized, tiles: Tiles | None = None, pdl: bool = True) -> Tensor:
    """Compute `silu(gate) * up` of the normalised rows; `weight` is `[2 * intermediate, hidden]`, gate rows first."""
    x, tokens = stream.scaled, stream.x.shape[0]
    intermediate, hidden = weight.values.shape[0] // 2, weight.values.shape[1]
    tiles = tiles or choose_tiles(intermediate, hidden, tokens, x.element_size(), _group(weight), x.device, 2)
    block_m, parts = token_block(tokens), len(stream.squares)
    out = torch.empty(tokens, intermediate, dtype=x.dtype, device=x.device)
    gate_up_silu_kernel[ceil_div(intermediate, tiles.rows), ceil_div(tokens, block_m)](
        x,
        x.stride(0),
        stream.squares,
        parts,
        tokens,
        eps,
        *weight,
        out,
        SIZE=hidden,
        GROUP=_group(weight),
        PARTS=triton.next_power_of_2(parts),
        INTERMEDIATE=intermediate,
        BLOCK_M=block_m,
        **_settings(tiles, x, pdl),
    )
    return out


def product_add(
    x: Tensor,
    weight: Quantized,
    residual: Tensor,
    gain: Tensor | None,
    arrival_counters: Tensor,
    tiles: Tiles | None = None,
    pdl: bool = True,
) -> Stream | Tensor:
    """Compute `residual + x Wᵀ`, written over `residual`, and the first half of its norm.

    Arguments and errors as of stage F's `product_add`; `weight` is `Quantized`, and `gain` the weight `[out_features]`
    of the sum's next norm, or None. With a `gain`, the result is a `Stream`.
    """
    tokens = x.shape[0]
    rows, columns = weight.values.shape
    if tokens > PRODUCT_MAX_TOKENS and gain is None:
        return residual.addmm_(x, dequantize(weight, x.dtype).t())
    tiles = tiles or choose_tiles(rows, columns, tokens, x.element_size(), _group(weight), x.device, splits=True)
    block_m = token_block(tokens)
    blocks = ceil_div(rows, tiles.rows), ceil_div(tokens, block_m)
    num_tiles = blocks[0] * blocks[1]
    if tiles.splits > 1 and num_tiles > len(arrival_counters):
        raise ValueError(f"{num_tiles} tiles need as many arrival counters, got {len(arrival_counters)}; pass more")
    num_squares, num_partial = blocks[0] * tokens, num_tiles * tiles.splits * tiles.rows * block_m
    length = num_squares + (num_partial if tiles.splits > 1 else 0)
    space = torch.empty(length, dtype=torch.float32, device=x.device)  # one allocation for both
    squares, partial = space[:num_squares].view(blocks[0], tokens), space[num_squares:]
    scaled = residual if gain is None else torch.empty_like(residual)
    product_add_kernel[*blocks, tiles.splits](
        x,
        x.stride(0),
        tokens,
        *weight,
        residual,
        residual.stride(0),
        residual if gain is None else gain,
        scaled,
        squares,
        partial,
        arrival_counters,
        SIZE=columns,
        OUT_SIZE=rows,
        GROUP=_group(weight),
        SPLITS=tiles.splits,
        HAS_GAIN=gain is not None,
        BLOCK_M=block_m,
        **_settings(tiles, x, pdl),
    )
    return residual if gain is None else Stream(residual, scaled, squares)


def dequantize(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """Compute `value * scale` in float32, rounded to `dtype`: `[rows, columns]`."""
    rows, columns = weight.values.shape
    out = torch.empty(rows, columns, dtype=dtype, device=weight.values.device)
    block = min(2048, triton.next_power_of_2(columns))
    dequantize_kernel[rows, ceil_div(columns, block)](
        *weight, out, SIZE=columns, GROUP=_group(weight), BLOCK=block, num_warps=4
    )
    return out


def _group(weight: Quantized) -> int:
    """Return the number of columns that share a scale; 0 means the whole row."""
    return GROUP_SIZE if weight.scales.shape[1] > 1 else 0


def _settings(tiles: Tiles, x: Tensor, pdl: bool) -> dict[str, Any]:
    """Return the launch settings of all kernels."""
    return {
        "BLOCK_N": tiles.rows,
        "BLOCK_K": tiles.columns,
        "SLICES": tiles.slices,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    } | pdl_settings(x.device, pdl)
