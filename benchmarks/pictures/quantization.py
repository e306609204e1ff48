"""The errors of numbers in 8 bits, and their bound."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.pictures.picture import BLUE, GREY, Picture, new_panels
from beyond.quantization.formats import dequantize_matrix, error_bound, quantize_matrix


def row_with_outlier() -> Tensor:
    """Make normally distributed numbers and one outlier: `[1, 1024]`."""
    row = torch.randn(1, 1024, generator=torch.Generator().manual_seed(0))
    row[0, 300] = 50.0
    return row


def draw_errors(row: Tensor) -> Picture:
    """Draw the error of each number of `row [1, length]` in int8, with one scale and with a scale per 128 columns."""
    figure, panels = new_panels(8.4, 3, {"xlabel": "column"}, {"xlabel": "column"}, sharey=True)
    for axes, group in zip(panels, (None, 128), strict=True):
        quantized = quantize_matrix(row, torch.int8, group)
        error = (dequantize_matrix(quantized, torch.float32, group) - row).abs()[0]
        bound = error_bound(quantized).repeat_interleave(group or row.shape[1], 1)[0, : row.shape[1]]
        axes.plot(error, ".", color=GREY, markersize=3)
        axes.step(range(len(bound)), bound, color=BLUE, where="mid", linewidth=1.5, label="bound: half a step")
        per = f"a scale per {group} columns" if group else "one scale"
        axes.set_title(f"{per}: mean error {error.mean():.3f}", fontsize=11)
    figure.suptitle("With a scale per 128 columns an outlier spoils one group, and not the whole row", fontsize=12)
    panels[0].set_ylabel("error")
    panels[0].set_ylim(0, 1.35 * max(line.get_ydata().max() for axes in panels for line in axes.lines))
    panels[0].legend(frameon=False, fontsize=9, loc="upper right")
    return Picture(figure, "the error of every number of a row in int8, below its bound")
