"""The block table as a drawing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from benchmarks.pictures.picture import BLUE, GREY, PALETTE, Picture
from figures.canvas import draw_box, new_canvas
from stage_a_naive import SamplingParams
from stage_a_naive.contract.outputs import Completion, Request
from stage_d_paged.block_manager import BlockManager
from stage_d_paged.sequence import Sequence

COLOURS = PALETTE[:-1]  # grey is for what nobody holds
BLOCKS_PER_ROW = 8


def computed(manager: BlockManager, token_ids: Iterable[int]) -> Sequence:
    """A sequence with blocks for these tokens, as if a step had computed all of them."""
    request = Request(0, list(token_ids), SamplingParams(), seed=0)
    sequence = Sequence(Completion(request, None, frozenset(), 4096, text_at_end=True))
    if not manager.allocate(sequence, len(sequence)):
        raise ValueError(f"{len(sequence)} tokens do not fit: {manager.num_free} blocks are free")
    sequence.num_computed_tokens = len(sequence)
    manager.index_computed(sequence)
    return sequence


def draw_pool(sequences: Mapping[str, Sequence], manager: BlockManager, title: str = "") -> Picture:
    """All blocks of a small pool and the sequences that hold them. A block with two colours is shared.

    Args:
        sequences: name (a letter) -> sequence; computed tokens are drawn full, allocated slots without a token empty.
        manager: of the pool; blocks that no sequence holds and the prefix cache still knows are drawn grey.
    """
    size = manager.block_size
    colour = {name: COLOURS[ord(name) - ord("A")] for name in sequences}  # the same in one picture as in the next
    columns, below = min(manager.num_blocks, BLOCKS_PER_ROW), -(-manager.num_blocks // BLOCKS_PER_ROW) * 1.7
    figure, axes = new_canvas(
        1.35 * columns,
        below * 0.8 / 1.7 + 0.25 * len(sequences) + 0.4,
        xlim=(-0.2, columns * (size + 0.6)),
        ylim=(below + 0.55 * len(sequences), -0.6),
    )
    for block in range(manager.num_blocks):
        x, y = block % BLOCKS_PER_ROW * (size + 0.6), block // BLOCKS_PER_ROW * 1.7
        owners = {name: s.block_table.index(block) * size for name, s in sequences.items() if block in s.block_table}
        for slot in range(size):
            filled = [name for name, first in owners.items() if first + slot < sequences[name].num_computed_tokens]
            for k, name in enumerate(filled):
                draw_box(axes, x + slot, y + k / len(filled), 1, 1 / len(filled), facecolor=colour[name], linewidth=0)
            text = f"{''.join(filled).lower()}{owners[filled[0]] + slot}" if filled else "·" * bool(owners)
            ink = "white" if filled and colour[filled[0]] == BLUE else "black"
            axes.text(x + slot + 0.5, y + 0.5, text, ha="center", va="center", color=ink, fontsize=9)
        if not owners and manager.is_cached(block):
            draw_box(axes, x, y, size, 1, "free, cached", 9, facecolor=GREY, alpha=0.45, linewidth=0)
        line = {"edgecolor": "black", "linewidth": 1.4} if owners else {"edgecolor": GREY, "linewidth": 0.8}
        draw_box(axes, x, y, size, 1, fill=False, **line)
        axes.text(x, y - 0.08, f"block {block}", fontsize=9, va="bottom")
    for i, (name, s) in enumerate(sequences.items()):
        text = f"{name}: {s.num_computed_tokens} tokens, block table {s.block_table}"
        axes.text(0, below + 0.55 * i, text, fontsize=9, va="center", color=colour[name], fontweight="bold")
    axes.set_title(title, fontsize=12, loc="left")
    return Picture(figure, f"{manager.num_blocks} blocks of {size} slots and the sequences that hold them")
