"""The block table as a drawing, and blocks over the steps of a real run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.patches import Rectangle

from benchmarks.micro.block_waste import computed
from benchmarks.pictures.picture import BLUE, GREY, PALETTE, Picture, finish, new_figure, new_panel
from benchmarks.recording import watch_model
from stage_a_naive import SamplingParams
from stage_d_paged import LLM
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.block_manager import BlockManager
from stage_d_paged.sequence import Sequence as PagedSequence

COLOURS = PALETTE[:-1]  # grey is for what nobody holds
BLOCKS_PER_ROW = 8


def draw_pool(sequences: Mapping[str, PagedSequence], manager: BlockManager, title: str = "") -> Picture:
    """All blocks of a small pool and the sequences that hold them. A block with two colours is shared.

    Args:
        sequences: name (a letter) -> sequence; computed tokens are drawn full, allocated slots without a token empty.
        manager: of the pool; blocks that no sequence holds and the prefix cache still knows are drawn grey.
    """
    num_blocks, block_size = manager.num_blocks, manager.block_size
    rows = -(-num_blocks // BLOCKS_PER_ROW)
    columns = min(num_blocks, BLOCKS_PER_ROW)
    figure = new_figure(1.35 * columns, 0.8 * rows + 0.25 * len(sequences) + 0.4)
    axes = figure.subplots()
    users: dict[int, list[tuple[str, int]]] = {}
    for name, sequence in sequences.items():
        for i, block in enumerate(sequence.block_table):
            count = min(block_size, max(0, sequence.num_computed_tokens - i * block_size))
            users.setdefault(block, []).append((name, count))
    colour = dict(zip(sequences, COLOURS, strict=False))
    first = {(name, block): i * block_size for name, s in sequences.items() for i, block in enumerate(s.block_table)}
    for block in range(num_blocks):
        x, y = (block % BLOCKS_PER_ROW) * (block_size + 0.6), (block // BLOCKS_PER_ROW) * 1.7
        owners = users.get(block, [])
        for slot in range(block_size):
            filled = [name for name, count in owners if slot < count]
            for k, name in enumerate(filled):
                height = 1 / len(filled)
                axes.add_patch(Rectangle((x + slot, y + k * height), 1, height, facecolor=colour[name], linewidth=0))
            text = "·" if owners and not filled else ""
            if filled:
                text = f"{''.join(filled).lower()}{first[filled[0], block] + slot}"
            on_blue = bool(filled) and colour[filled[0]] == BLUE
            look = {"color": "white" if on_blue else "black", "fontsize": 9}
            axes.text(x + slot + 0.5, y + 0.5, text, ha="center", va="center", **look)
        if not owners and manager.is_cached(block):
            axes.add_patch(Rectangle((x, y), block_size, 1, facecolor=GREY, alpha=0.45, linewidth=0))
            axes.text(x + block_size / 2, y + 0.5, "free, cached", ha="center", va="center", fontsize=9)
        line = {"edgecolor": "black", "linewidth": 1.4} if owners else {"edgecolor": GREY, "linewidth": 0.8}
        axes.add_patch(Rectangle((x, y), block_size, 1, fill=False, **line))
        axes.text(x, y - 0.08, f"block {block}", fontsize=9, va="bottom")
    below = rows * 1.7
    for i, (name, sequence) in enumerate(sequences.items()):
        text = f"{name}: {sequence.num_computed_tokens} tokens, block table {sequence.block_table}"
        axes.text(0, below + 0.55 * i, text, fontsize=9, va="center", color=colour[name], fontweight="bold")
    axes.set(xlim=(-0.2, columns * (block_size + 0.6)), ylim=(below + 0.55 * len(sequences), -0.6))
    axes.axis("off")
    if title:
        axes.set_title(title, fontsize=12, loc="left")
    return finish(figure, f"{num_blocks} blocks of {block_size} slots and the sequences that hold them")


def draw_cached_blocks() -> Picture:
    """A pool after one of two sequences has ended: its full blocks are free, and can be found."""
    manager = BlockManager(num_blocks=8, block_size=4)
    ended, running = computed(manager, range(14)), computed(manager, range(50, 57))
    table, tokens = list(ended.block_table), ended.num_computed_tokens
    manager.free(ended)
    title = f"A ({tokens} tokens in blocks {table}) has ended: all four are free, and the full ones are still found"
    return draw_pool({"B": running}, manager, title)


def draw_fragmentation() -> Picture:
    """Three of six reservations end; where a new one fits, in one piece and in blocks."""
    block_size, sizes, ended, new = 4, (16, 12, 20, 8, 12, 12), (1, 3, 5), 24
    total = sum(sizes)
    figure = new_figure(11, 3.4)
    axes = figure.subplots()

    def box(x: int, y: float, width: int, colour: str, text: str = "", edge: str = "black") -> None:
        axes.add_patch(Rectangle((x, y), width, 0.8, facecolor=colour, edgecolor=edge))
        axes.text(x + width / 2, y + 0.4, text, ha="center", va="center")

    for i, size in enumerate(sizes):
        look = ("white", f"hole: {size}") if i in ended else (COLOURS[i], "ABCDEF"[i])
        box(sum(sizes[:i]), 0, size, *look)
    manager = BlockManager(total // block_size, block_size)
    sequences = [computed(manager, range(100 * i, 100 * i + size)) for i, size in enumerate(sizes)]
    for i in ended:
        manager.free(sequences[i])
    held = {"ABCDEF"[i]: (sequences[i], COLOURS[i]) for i in range(len(sizes)) if i not in ended}
    held["G"] = (computed(manager, range(900, 900 + new)), COLOURS[-1])
    for block in range(manager.num_blocks):
        box(block * block_size, 1.6, block_size, "white", edge=GREY)
    for name, (sequence, colour) in held.items():
        for block in sequence.block_table:
            box(block * block_size, 1.6, block_size, colour, name)
    free, largest = sum(sizes[i] for i in ended), max(sizes[i] for i in ended)
    text = f"in one piece: {free} tokens are free, the largest hole has {largest}; G needs {new} and waits"
    axes.text(0, -0.12, text, fontsize=11, va="bottom")
    text = f"in blocks of {block_size}: G takes {new // block_size} free blocks, wherever they are"
    axes.text(0, 1.48, text, fontsize=11, va="bottom")
    axes.set(xlim=(-0.2, total + 0.2), ylim=(2.5, -0.5))
    axes.axis("off")
    axes.set_title("B, D and F have ended: the same free memory serves G only in blocks", fontsize=13)
    return finish(figure, "reservations in one piece leave holes that a new request does not fit into; blocks do not")


class Held(NamedTuple):
    """Blocks held by each sequence of a batch in one step, and how many of its tokens they hold."""

    tables: list[list[int]]
    context: list[int]  # 0: the sequence has finished; it keeps its batch slot and its blocks until the batch ends


def watch_pages(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Held]:
    """Generate, and note the block tables that the model is given in every step."""
    found: list[Held] = []

    def note(arguments: tuple, _: object) -> None:
        metadata: AttentionMetadata = arguments[3]
        tables = [[block for block in row if block >= 0] for row in metadata.block_tables.tolist()]
        context = metadata.context_lens.tolist()
        for i, length in enumerate(context):
            if length == 0:  # a padding row shows the model no blocks
                tables[i] = found[-1].tables[i]
        found.append(Held(tables, context))

    with watch_model(llm.runtime.model, note):
        llm.generate(list(prompts), list(params), use_tqdm=False)
    return found


def draw_pages_over_time(steps: Sequence[Held], block_size: int) -> Picture:
    """Which sequence holds which block in which step; a block is taken when its first token comes."""
    blocks = sorted({block for step in steps for table in step.tables for block in table})
    x_label, y_label = "step of the model (the first one is the prefill)", f"block of {block_size} tokens"
    figure, axes = new_panel(9, 0.17 * len(blocks) + 1.2, x_label, y_label, grid="x")
    spans: dict[tuple[int, int, bool], list[tuple[float, float]]] = {}  # (request, block, finished) -> steps
    shared: list[tuple[int, int]] = []
    for x, step in enumerate(steps):
        seen: set[int] = set()
        for i, (table, length) in enumerate(zip(step.tables, step.context, strict=True)):
            for block in table:
                if block in seen:
                    shared.append((x, block))
                    continue
                seen.add(block)
                spans.setdefault((i, block, length == 0), []).append((x, 1))
    for (i, block, finished), places in spans.items():
        colour, alpha = COLOURS[i % len(COLOURS)], 0.3 if finished else 1
        axes.broken_barh(places, (blocks.index(block) - 0.45, 0.9), facecolor=colour, alpha=alpha, linewidth=0)
    for i in range(len(steps[0].tables)):
        axes.bar(0, 0, color=COLOURS[i % len(COLOURS)], label=f"request {i}")
    axes.bar(0, 0, color=GREY, alpha=0.3, label="finished, still held")
    if shared:
        places = [x + 0.5 for x, _ in shared], [blocks.index(block) for _, block in shared]
        axes.scatter(*places, s=1.5, color="black", label="shared")
    axes.set_ylim(-0.6, len(blocks) - 0.4)
    axes.set_xlim(0, len(steps))
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    return finish(figure, "blocks are handed out one by one as the sequences grow")
