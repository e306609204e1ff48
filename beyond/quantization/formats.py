"""Two 8-bit formats: quantise numbers, and dequantise them.

Both are symmetric: a run of numbers shares one scale, and a number is stored as the 8-bit value nearest to
`number / scale`, with `scale = max |number| / largest value of the format`.

    int8   255 evenly spaced values -127 … 127. The error of a number is at most scale / 2, whatever its size, so one
           outlier makes its whole run coarse.
    fp8    e4m3: sign, 4 bits of exponent, 3 of mantissa, up to 448 (Micikevicius et al. 2022, arXiv:2209.05433). The
           error is at most 1/16 of the number itself (or scale / 1024, of the smallest ones), and so at most
           16 × scale, of those near the largest. Numbers below 1/14 of the largest are stored more finely than in
           int8, all others more coarsely.

A weight's run is a row of the matrix (an output feature), or 128 numbers of a row; a key's or value's is a head of one
token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class Quantized(NamedTuple):
    """Numbers in 8 bits with their scales.

    A weight: values `[rows, columns]`, scales `[rows, 1]` or `[rows, ceil(columns / group)]`. Keys or values of a
    layer: values `[blocks, block_size, kv_heads, head_dim]`, scales `[blocks, kv_heads, block_size]`.
    """

    values: Tensor  # int8 or float8_e4m3fn
    scales: Tensor  # float32

    @property
    def shape(self) -> torch.Size:
        """The shape of the dequantised numbers."""
        return self.values.shape


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise every row of `x [..., n]` with a separate scale.

    Returns:
        Values `[..., n]` in `dtype` and float32 scales `[...]`. A row of zeros has the scale 1.
    """
    x = x.float()
    scales = x.abs().amax(-1) / LARGEST[dtype]
    scales = torch.where(scales == 0, 1.0, scales)
    scaled = x / scales[..., None]
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def quantize_matrix(weight: Tensor, dtype: torch.dtype, group_size: int | None = None) -> Quantized:
    """Quantise `[rows, columns]` with a scale per row, or per row and `group_size` columns (the last may be fewer)."""
    if group_size is None:
        values, scales = quantize_rows(weight, dtype)
        return Quantized(values, scales[:, None])
    groups = [quantize_rows(part, dtype) for part in weight.split(group_size, dim=1)]
    values, scales = zip(*groups, strict=True)
    return Quantized(torch.cat(values, 1), torch.stack(scales, 1))


def dequantize_matrix(weight: Quantized, dtype: torch.dtype, group_size: int | None = None) -> Tensor:
    """Compute `value * scale` in float32, rounded to `dtype`: `[rows, columns]`."""
    values, scales = weight
    if group_size is not None:
        scales = scales.repeat_interleave(group_size, 1)[:, : values.shape[1]]
    return (values.float() * scales).to(dtype)


def error_bound(weight: Quantized) -> Tensor:
    """Return the largest possible difference from the original number, per scale: float32, the shape of `scales`.

    It is half the largest distance between two neighbouring values: 1 in int8, 32 in e4m3 (from 256 to 448).
    """
    values, scales = weight
    return scales * (0.5 if values.dtype == torch.int8 else 16.0)
