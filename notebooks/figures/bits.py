"""Answers at fewer bits per weight."""

from __future__ import annotations

from benchmarks.micro.quantized import load, logits_of, read_texts
from benchmarks.pictures.picture import BLUE, ORANGE, Picture, new_panel
from stage_d_paged.runtime import Runtime


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
    return Picture(figure, "the share of the tutor's answers that stay exact, by bits per weight")
