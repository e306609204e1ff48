"""The parts of stage D's decoder, drawn from its own code: a layer with its shapes, and each of its four ideas."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from benchmarks.pictures.picture import BLUE, GREEN, GREY, ORANGE, Picture, draw_bars, finish, new_figure, new_panels
from stage_a_naive.loading import resolve
from stage_d_paged import LLM
from stage_d_paged.config import ModelConfig
from stage_d_paged.kv_cache import kv_bytes_per_token
from stage_d_paged.layers import RMSNorm, RotaryEmbedding, rotate

MODEL = "random:qwen2.5-0.5b"


def draw_layer() -> Picture:
    """One layer with the shape of every tensor, attention on the left and the MLP on the right."""
    config = ModelConfig.from_hf(resolve(MODEL).config)
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size
    figure = new_figure(11, 6.2)
    axes = figure.subplots()
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
    for x, boxes, title in ((0, attention, "attention"), (6.2, mlp, "MLP")):
        heights = [5.0 * i / (len(boxes) - 1) for i in range(len(boxes))]
        axes.text(x + 1.5, -0.75, title, fontsize=12, fontweight="bold", ha="center")
        for y, (name, shape, colour) in zip(heights, boxes, strict=True):
            draw_box(axes, x, y, name, colour)
            axes.text(x + 3.15, y, shape, fontsize=10.5, va="center", family="monospace")
        for y, below in zip(heights, heights[1:], strict=False):
            axes.annotate("", (x + 1.5, below - 0.3), (x + 1.5, y + 0.3), arrowprops={"arrowstyle": "->", "lw": 1.2})
        draw_residual(axes, x)
    axes.text(1.5, 5.72, f"x [T, {hidden}] → to the MLP", fontsize=10.5, ha="center", va="center")
    axes.text(7.7, 5.72, f"x [T, {hidden}] → to the next layer", fontsize=10.5, ha="center", va="center")
    axes.set_xlim(-1.1, 11.4)
    axes.set_ylim(6.1, -1.1)
    axes.axis("off")
    figure.suptitle(f"One of the {config.num_layers} layers of Qwen2.5-0.5B, on a flat batch of T tokens", fontsize=13)
    return finish(figure, "the operations of a decoder layer with the shapes of their outputs")


def draw_box(axes: Axes, x: float, y: float, name: str, colour: str) -> None:
    axes.add_patch(FancyBboxPatch((x, y - 0.27), 3, 0.54, "round,pad=0.03", facecolor=colour, alpha=0.35, linewidth=1))
    axes.text(x + 1.5, y, name, fontsize=11, ha="center", va="center")


def draw_residual(axes: Axes, x: float) -> None:
    """The residual stream beside the boxes: around all of them, and into the last."""
    axes.plot([x + 1.5, x - 0.45, x - 0.45, x - 0.05], [-0.48, -0.48, 5.0, 5.0], color="black", linewidth=2)
    axes.plot([x + 1.5, x + 1.5], [-0.6, -0.3], color="black", linewidth=2)
    axes.text(x - 0.62, 2.5, "residual stream", fontsize=10, rotation=90, ha="center", va="center")


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
        11, 4,
        {"xlim": (-0.6, 8.6), "ylim": (-0.6, 2.6), "aspect": "equal", "xlabel": "position", "xticks": range(9),
         "title": "each pair turns by its own angle per position"},
        {"xlabel": "position of the key", "ylabel": "position of the query", "title": "equal q·k along every diagonal"},
        title="RoPE: turned by its position, a query sees how far away a key is", grid="", width_ratios=[1.7, 1],
    )  # fmt: skip
    for i, (pair, colour) in enumerate(((0, BLUE), (4, ORANGE), (8, GREEN))):
        for position in range(9):
            tip = turned[position, pair].item(), turned[position, pair + half].item()
            pairs.annotate("", (position + 0.42 * tip[0], 2 - i + 0.42 * tip[1]), (position, 2 - i),
                           arrowprops={"arrowstyle": "->", "color": colour, "lw": 2})  # fmt: skip
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
        11, 3.2, {"title": f"{heads} query heads share {kv_heads} key/value heads", "ylim": (-0.45, 1.3)},
        {"xlabel": "KV cache per token, bfloat16"}, grid="x", width_ratios=[1.6, 1],
        title=f"GQA makes the KV cache of Qwen2.5-0.5B {heads // kv_heads} times smaller",
    )  # fmt: skip
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
    values = [
        kv_bytes_per_token(config.num_layers, n, config.head_dim, torch.bfloat16) / 1024 for n in (heads, kv_heads)
    ]
    names = ["a KV head for\neach query head", f"GQA, {kv_heads} KV heads"]
    draw_bars(sizes, names, [(None, values, [GREY, BLUE])], [f"{value:.0f} KiB" for value in values], room=1.25)
    return finish(figure, "query heads share key and value heads; bytes of KV cache per token with and without")


def draw_swiglu() -> Picture:
    """silu next to relu, and the gate's effect on three values of `up`."""
    gate = torch.linspace(-6, 6, 241)
    figure, (curve, product) = new_panels(
        11, 3.4, {"xlabel": "g, an element of gate", "title": "silu is a smooth switch"},
        {"xlabel": "g, an element of gate", "title": "silu(g) · up: the gate decides how much of up passes"},
        title="SwiGLU: a negative gate shuts, a positive one lets its element of up through",
    )  # fmt: skip
    curve.plot(gate, F.silu(gate), color=BLUE, linewidth=2, label="silu(g) = g · sigmoid(g)")
    curve.plot(gate, F.relu(gate), color=GREY, linestyle="--", label="relu(g)")
    curve.legend(frameon=False)
    for up, colour in ((2.0, BLUE), (0.5, GREEN), (-1.0, ORANGE)):
        product.plot(gate, F.silu(gate) * up, color=colour, linewidth=2, label=f"up = {up:g}")
    product.legend(frameon=False)
    return finish(figure, "silu beside relu, and silu(gate) times up for three values of up")
