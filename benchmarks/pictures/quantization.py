"""What 8 bits do to numbers: errors and their bound, and answers at fewer bits."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.micro.quantized import load, logits_of, read_texts
from benchmarks.pictures.picture import BLUE, GREY, ORANGE, Picture, finish, new_panel, new_panels
from beyond.quantization.formats import dequantize_matrix, error_bound, quantize_matrix
from stage_d_paged.runtime import Runtime


def row_with_outlier() -> Tensor:
    """Normally distributed numbers, and one that is not: `[1, 1024]`."""
    row = torch.randn(1, 1024, generator=torch.Generator().manual_seed(0))
    row[0, 300] = 50.0
    return row


def draw_errors(row: Tensor) -> Picture:
    """The error of each number of `row [1, length]` in int8, with one scale and with a scale per 128 columns."""
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
    return finish(figure, "the error of every number of a row in int8, below its bound")


def make_coarse(runtime: Runtime, largest: int, group_size: int | None) -> None:
    """Round the layers' matrices as if they were stored in integers from -largest to largest."""
    for layer in runtime.model.layers:
        for weight in (p for p in layer.parameters() if p.dim() == 2):
            runs = weight.data.view(-1, group_size or weight.shape[1])
            scales = runs.abs().amax(1, keepdim=True) / largest
            weight.data.copy_(((runs / scales).round() * scales).view_as(weight))


def exact_by_bits() -> dict[str, dict[int, float]]:
    """The share of 16 answers that stay exact, by bits per weight, with two ways to share scales."""
    shares, texts = {}, read_texts()[:16]
    for way, group_size in {"a scale per row": None, "a scale per 64 columns": 64}.items():
        shares[way] = {}
        for bits in (8, 4, 3):
            runtime = load("tutor", "cpu", "float32", {})
            make_coarse(runtime, 2 ** (bits - 1) - 1, group_size)
            exact = [logits_of(runtime, text).argmax(-1).tolist() == text.ids[text.first :] for text in texts]
            shares[way][bits] = sum(exact) / len(exact)
    return shares


def draw_bits(shares: dict[str, dict[int, float]]) -> Picture:
    """Exact answers by bits per weight."""
    bits = list(next(iter(shares.values())))
    enough = min(b for b in bits if all(by_bits[b] == 1 for by_bits in shares.values()))
    figure, axes = new_panel(8, 2.8, "", "answers word for word", f"Every answer is exact down to {enough} bits")
    width = 0.8 / len(shares)
    for i, ((way, by_bits), colour) in enumerate(zip(shares.items(), (BLUE, ORANGE), strict=True)):
        positions = [place + i * width for place in range(len(bits))]
        bars = axes.bar(positions, by_bits.values(), width, color=colour, label=way)
        axes.bar_label(bars, [f"{share:.0%}" for share in by_bits.values()], fontsize=9)
    axes.set_xticks([place + width / 2 for place in range(len(bits))], [f"{b} bits" for b in bits])
    axes.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"])
    axes.set_ylim(0, 1.4)
    axes.legend(frameon=False, ncols=2, fontsize=9, loc="upper right")
    return finish(figure, "the share of the tutor's answers that stay exact, by bits per weight")
