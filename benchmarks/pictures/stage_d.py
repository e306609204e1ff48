"""The figures of stage D's lessons: a decoder layer, each of its four ideas, an online softmax, and splits."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from benchmarks.pictures.picture import PALETTE, Picture, draw_bars, draw_box, finish, new_canvas, new_panels
from stage_a_naive.checkpoints.loading import resolve
from stage_d_paged import LLM
from stage_d_paged.attention.decode_plan import plan_decode
from stage_d_paged.config import ModelConfig
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.layers import RMSNorm, RotaryEmbedding, rotate

BLUE, ORANGE, GREEN, *_, GREY = PALETTE
MODEL = "random:qwen2.5-0.5b"
TILE = 4  # keys of a tile of the online softmax


def draw_layer() -> Picture:
    """One layer with the shape of every tensor, attention on the left and the MLP on the right."""
    config = ModelConfig.from_hf(resolve(MODEL).config)
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size
    figure, axes = new_canvas(11, 6.2, xlim=(-1.1, 11.4), ylim=(6.1, -1.1))
    attention = [
        ("RMSNorm", f"[T, {hidden}]", GREY),
        ("qkv_proj", f"[T, {heads + 2 * kv_heads}, {size}]", BLUE),
        ("RoPE on Q and K", f"Q [T, {heads}, {size}]\nK, V [T, {kv_heads}, {size}]", GREEN),
        ("store K and V in the pool", "slot_mapping [T]", ORANGE),
        ("attention through the block table", f"[T, {heads}, {size}]", ORANGE),
        ("o_proj, and add", f"[T, {hidden}]", BLUE),
    ]
    mlp = [
        ("RMSNorm", f"[T, {hidden}]", GREY),
        ("gate_up_proj", f"[T, 2 × {wide}]", BLUE),
        ("silu(gate) × up", f"[T, {wide}]", GREEN),
        ("down_proj, and add", f"[T, {hidden}]", BLUE),
    ]
    for x, boxes, title, after in ((0, attention, "attention", "the MLP"), (6.2, mlp, "MLP", "the next layer")):
        axes.text(x + 1.5, -0.75, title, fontsize=12, fontweight="bold", ha="center")
        for i, (name, shape, colour) in enumerate(boxes):
            y, above = 5 * i / (len(boxes) - 1), 5 * (i - 1) / (len(boxes) - 1)
            draw_box(axes, x, y - 0.3, 3, 0.6, name, 11, facecolor=colour, edgecolor="black", alpha=0.35)
            axes.text(x + 3.15, y, shape, fontsize=10.5, va="center", family="monospace")
            if i:
                arrow = {"arrowstyle": "->", "lw": 1.2}
                axes.annotate("", (x + 1.5, y - 0.3), (x + 1.5, above + 0.3), arrowprops=arrow)
        # The residual stream beside the boxes: around all of them, and into the last.
        axes.plot([x + 1.5, x - 0.45, x - 0.45, x - 0.05], [-0.48, -0.48, 5.0, 5.0], color="black", linewidth=2)
        axes.plot([x + 1.5, x + 1.5], [-0.6, -0.3], color="black", linewidth=2)
        axes.text(x - 0.62, 2.5, "residual stream", fontsize=10, rotation=90, ha="center", va="center")
        axes.text(x + 1.5, 5.72, f"x [T, {hidden}] → to {after}", fontsize=10.5, ha="center", va="center")
    figure.suptitle(f"One of the {config.num_layers} layers of Qwen2.5-0.5B, on a flat batch of T tokens", fontsize=13)
    return finish(figure, "the operations of a decoder layer with the shapes of their outputs")


def draw_norm() -> Picture:
    """RMS of a token's vector at the input of every layer of the tutor, before and after its norm."""
    llm, before, after = LLM("tutor", device="cpu"), [], []

    def note(_: RMSNorm, arguments: tuple, output: torch.Tensor) -> None:
        before.append(arguments[0].float().square().mean(-1).sqrt().mean().item())
        after.append(output.float().square().mean(-1).sqrt().mean().item())

    for layer in llm.runtime.model.layers:
        layer.input_layernorm.register_forward_hook(note)
    llm.generate([llm.tokenizer.encode("What is a KV cache?")], use_tqdm=False)
    count = len(llm.runtime.model.layers)
    title = "The residual stream grows from layer to layer; its norm does not"
    figure, [axes] = new_panels(8, 3, {"xlabel": "layer of the tutor", "ylabel": "root mean square", "title": title})
    axes.plot(before[:count], "o-", color=ORANGE, label="x, before the norm")
    axes.plot(after[:count], "s-", color=BLUE, label="RMSNorm(x)")
    axes.set(xticks=range(count), ylim=0)
    axes.legend(frameon=False)
    return finish(figure, "root mean square of the residual stream before and after the norm of every layer")


def draw_rope() -> Picture:
    """Left: three pairs of a head turn with the position. Right: q·k depends on the distance alone."""
    config = ModelConfig.from_hf(resolve(MODEL).config)
    rotary = RotaryEmbedding(config, 64, torch.float32, torch.device("cpu"))
    half = config.head_dim // 2
    ones = torch.cat([torch.ones(half), torch.zeros(half)]).expand(64, 1, -1)
    turned = rotate(ones, *rotary(torch.arange(64)))[:, 0]  # [positions, head_dim]
    figure, (pairs, scores) = new_panels(
        11,
        4,
        {
            "xlim": (-0.6, 8.6),
            "ylim": (-0.6, 2.6),
            "aspect": "equal",
            "xlabel": "position",
            "xticks": range(9),
            "title": "each pair turns by its own angle per position",
        },
        {"xlabel": "position of the key", "ylabel": "position of the query", "title": "equal q·k along every diagonal"},
        title="RoPE: turned by its position, a query sees how far away a key is",
        grid="",
        width_ratios=[1.7, 1],
    )
    for i, (pair, colour) in enumerate(((0, BLUE), (4, ORANGE), (8, GREEN))):
        for position in range(9):
            tip = turned[position, pair].item(), turned[position, pair + half].item()
            pairs.annotate(
                "",
                (position + 0.42 * tip[0], 2 - i + 0.42 * tip[1]),
                (position, 2 - i),
                arrowprops={"arrowstyle": "->", "color": colour, "lw": 2},
            )
    pairs.set_yticks([2, 1, 0], ["pair 0\n(fastest)", "pair 4", "pair 8"])
    pairs.spines[:].set_visible(False)
    vector = torch.randn(config.head_dim, generator=torch.Generator().manual_seed(0))
    both = rotate(vector.expand(64, 1, -1).contiguous(), *rotary(torch.arange(64)))[:24, 0]
    scores.imshow((both @ both.T).numpy(), cmap="cividis")
    return finish(figure, "rotary embedding: pairs turn with the position; scores depend on the distance alone")


def draw_gqa() -> Picture:
    """KV cache per token with a KV head per query head, and with the model's groups."""
    config = ModelConfig.from_hf(resolve(MODEL).config)
    heads, kv_heads = config.num_heads, config.num_kv_heads
    figure, (groups, sizes) = new_panels(
        11,
        3.2,
        {"title": f"{heads} query heads share {kv_heads} key/value heads", "ylim": (-0.45, 1.3)},
        {"xlabel": "KV cache per token, bfloat16"},
        grid="x",
        width_ratios=[1.6, 1],
        title=f"GQA makes the KV cache of Qwen2.5-0.5B {heads // kv_heads} times smaller",
    )
    for head in range(heads):
        kv = head // (heads // kv_heads)
        colour, x = (BLUE, ORANGE)[kv], (kv + 0.5) * heads / kv_heads - 0.5
        groups.plot([head, x], [1, 0], color=colour, linewidth=1)
        groups.text(head, 1.08, f"q{head}", ha="center", fontsize=9)
        groups.plot(head, 1, "o", color=colour, markersize=9)
        groups.plot(x, 0, "s", color=colour, markersize=14)
    for kv in range(kv_heads):
        groups.text((kv + 0.5) * heads / kv_heads - 0.5, -0.3, f"k{kv}, v{kv}", ha="center", fontsize=10)
    groups.axis("off")
    per_head = KVCache.bytes_per_token(config.num_layers, 1, config.head_dim, torch.bfloat16) / 1024
    values = [heads * per_head, kv_heads * per_head]
    names = ["a KV head for\neach query head", f"GQA, {kv_heads} KV heads"]
    draw_bars(sizes, names, [(None, values, [GREY, BLUE])], [f"{value:.0f} KiB" for value in values], room=1.25)
    return finish(figure, "query heads share key and value heads; bytes of KV cache per token with and without")


def draw_swiglu() -> Picture:
    """silu next to relu, and the gate's effect on three values of `up`."""
    gate = torch.linspace(-6, 6, 241)
    figure, (curve, product) = new_panels(
        11,
        3.4,
        {"xlabel": "g, an element of gate", "title": "silu is a smooth switch"},
        {"xlabel": "g, an element of gate", "title": "silu(g) · up: the gate decides how much of up passes"},
        title="SwiGLU: a negative gate shuts, a positive one lets its element of up through",
    )
    curve.plot(gate, F.silu(gate), color=BLUE, linewidth=2, label="silu(g) = g · sigmoid(g)")
    curve.plot(gate, F.relu(gate), color=GREY, linestyle="--", label="relu(g)")
    curve.legend(frameon=False)
    for up, colour in ((2.0, BLUE), (0.5, GREEN), (-1.0, ORANGE)):
        product.plot(gate, F.silu(gate) * up, color=colour, linewidth=2, label=f"up = {up:g}")
    product.legend(frameon=False)
    return finish(figure, "silu beside relu, and silu(gate) times up for three values of up")


def draw_online_softmax() -> Picture:
    """Sixteen scores in tiles of four: the running maximum, and the weights as they are known after each tile."""
    scores = 2 * torch.randn(16, generator=torch.Generator().manual_seed(5))
    scores[9] = 4.5  # the largest comes late: everything before it is scaled down
    figure, (raw, weights) = new_panels(
        11,
        3.8,
        {"ylim": (-5.2, 5.8), "xlabel": "key", "ylabel": "score", "title": "black: the running maximum"},
        {
            "ylim": (0, 1.1),
            "ylabel": "share of each tile in the output",
            "title": "above: the factor on what was added up before",
        },
        title="Online softmax: after every tile the output is right for the keys read so far",
    )
    highest = -torch.inf
    for i, start in enumerate(range(0, 16, TILE)):
        before, highest = highest, scores[: start + TILE].max().item()
        totals = torch.exp(scores[: start + TILE] - highest).view(-1, TILE).sum(1)  # of every tile so far
        raw.bar(range(start, start + TILE), scores[start : start + TILE].tolist(), color=PALETTE[i], label=f"tile {i}")
        raw.plot([start - 0.5, start + TILE - 0.5], [highest, highest], color="black", linewidth=2)
        above = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center"}
        raw.annotate(f"{highest:.1f}", (start + 1.5, highest), **above)
        bottom = 0.0
        for j, share in enumerate((totals / totals.sum()).tolist()):
            weights.bar(f"after tile {i}", share, bottom=bottom, color=PALETTE[j])
            bottom += share
        weights.annotate(f"× {math.exp(before - highest):.2f}" if i else "", (i, 1), **above)
    raw.legend(frameon=False, ncols=4, fontsize=9, loc="lower center")
    return finish(figure, "an online softmax over four tiles of scores: running maximum and shares of the tiles")


def draw_splits() -> Picture:
    """Which program reads which keys of one sequence, by `plan_decode`, on eight multiprocessors."""
    sms, context, tile = 8, 2048, 64
    plan = plan_decode(1, context, 2, 64, 1, 64, torch.bfloat16, sms)
    tiles = context // tile
    title = f"Split-KV: {sms} programs read the tiles of {context:,} keys in an eighth of the time"
    both = {"xlim": (0, tiles), "ylim": (sms - 0.4, -0.6), "xlabel": f"time, in tiles of {tile} keys"}
    figure, panels = new_panels(11, 3.6, both, both, title=title, grid="x", sharey=True)
    for axes, splits in zip(panels, (1, min(plan.num_splits, sms)), strict=True):
        for index in range(tiles):
            axes.broken_barh([(index // splits, 0.94)], (index % splits - 0.4, 0.8), color=PALETTE[index % splits])
        longest = -(-tiles // splits)
        if splits > 1:
            axes.broken_barh([(longest, 0.3)], (splits - 1.4, 0.8), color="black")
            axes.annotate("the last one combines (not to scale)", (longest + 0.7, splits - 1), va="center")
        axes.set_title(f"{splits} program{'s' * (splits > 1)}: {longest} tiles one after another", fontsize=11)
    panels[0].set(yticks=range(sms), ylabel="multiprocessor")
    return finish(figure, "the tiles of one sequence read by one program, and by one program per multiprocessor")
