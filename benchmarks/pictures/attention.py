"""Attention kernels in pictures: an online softmax after each tile, and the tiles of each program, with splits."""

from __future__ import annotations

import torch

from benchmarks.pictures.picture import PALETTE as COLOURS
from benchmarks.pictures.picture import Picture, finish, new_panels
from stage_d_paged.attention.decode_plan import plan_decode

TILE = 4


def draw_online_softmax() -> Picture:
    """Sixteen scores in tiles of four: the running maximum, and the weights as they are known after each tile."""
    scores = 2 * torch.randn(16, generator=torch.Generator().manual_seed(5))
    scores[9] = 4.5  # the largest comes late: everything before it is scaled down
    figure, (raw, weights) = new_panels(
        11, 3.8,
        {"ylim": (-5.2, 5.8), "xlabel": "key", "ylabel": "score", "title": "black: the running maximum"},
        {"ylim": (0, 1.1), "ylabel": "share of each tile in the output",
         "title": "above: the factor on what was added up before"},
        title="Online softmax: after every tile the output is right for the keys read so far",
    )  # fmt: skip
    highest, total, known = -torch.inf, 0.0, torch.zeros(16)
    for i, start in enumerate(range(0, 16, TILE)):
        tile = slice(start, start + TILE)
        new_highest = max(highest, scores[tile].max().item())
        shrink = torch.exp(torch.tensor(highest - new_highest)).item()
        known = known * shrink
        known[tile] = torch.exp(scores[tile] - new_highest)
        total = total * shrink + known[tile].sum().item()
        highest = new_highest
        raw.bar(range(start, start + TILE), scores[tile].tolist(), color=COLOURS[i], label=f"tile {i}")
        raw.plot([start - 0.5, start + TILE - 0.5], [highest, highest], color="black", linewidth=2)
        raw.annotate(f"{highest:.1f}", (start + 1.5, highest), xytext=(0, 3), textcoords="offset points", ha="center")
        bottom = 0.0
        for j in range(i + 1):
            share = known[j * TILE : (j + 1) * TILE].sum().item() / total
            weights.bar(f"after tile {i}", share, bottom=bottom, color=COLOURS[j])
            bottom += share
        weights.annotate(f"× {shrink:.2f}" if i else "", (i, 1), xytext=(0, 3), textcoords="offset points", ha="center")
    raw.legend(frameon=False, ncols=4, fontsize=9, loc="lower center")
    return finish(figure, "an online softmax over four tiles of scores: running maximum and shares of the tiles")


def draw_splits() -> Picture:
    """Which program reads which keys of one sequence, by `plan_decode`, on eight multiprocessors."""
    sms, context, tile = 8, 2048, 64
    plan = plan_decode(1, context, 2, 64, 1, 64, torch.bfloat16, sms)
    tiles = context // tile
    title = f"Split-KV: {sms} programs read {context:,} keys in an eighth of the tiles' time"
    both = {"xlim": (0, tiles), "ylim": (sms - 0.4, -0.6), "xlabel": f"time, in tiles of {tile} keys"}
    figure, panels = new_panels(11, 3.6, both, both, title=title, grid="x", sharey=True)
    for axes, splits in zip(panels, (1, min(plan.num_splits, sms)), strict=True):
        for index in range(tiles):
            axes.broken_barh([(index // splits, 0.94)], (index % splits - 0.4, 0.8), color=COLOURS[index % splits])
        longest = -(-tiles // splits)
        if splits > 1:
            axes.broken_barh([(longest, 0.3)], (splits - 1.4, 0.8), color="black")
            axes.annotate("the last one combines (not to scale)", (longest + 0.7, splits - 1), va="center")
        axes.set_title(f"{splits} program{'s' * (splits > 1)}: {longest} tiles one after another", fontsize=11)
    panels[0].set(yticks=range(sms), ylabel="multiprocessor")
    return finish(figure, "the tiles of one sequence read by one program, and by one program per multiprocessor")
