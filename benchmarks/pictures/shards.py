"""How tensor parallelism splits a model: which part of every matrix each rank reads, asked of stage F's own layers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from benchmarks.pictures.picture import BLUE, PALETTE, Picture, draw_bars, finish, new_figure, plain
from stage_a_naive.checkpoint import TensorSource
from stage_a_naive.loading import resolve
from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_f_graph_tp.tensor_parallel.sharding import ShardedWeightLoader, shard_config

MATRICES = {  # by the end of its name in the checkpoint
    "embed_tokens": "embedding,\nLM head",
    "layers.0.self_attn.q_proj": "Q",
    "layers.0.self_attn.k_proj": "K",
    "layers.0.self_attn.v_proj": "V",
    "layers.0.self_attn.o_proj": "attention\noutput",
    "layers.0.mlp.gate_proj": "gate",
    "layers.0.mlp.up_proj": "up",
    "layers.0.mlp.down_proj": "down",
}
LONGEST = 2.6


@dataclass(frozen=True)
class Part:
    """What one rank reads of one tensor: rows and columns as (start, stop)."""

    rank: int
    name: str
    shape: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]

    @property
    def numbers(self) -> int:
        return prod(stop - start for start, stop in self.bounds)


class _Recorder(TensorSource):
    """A source of weights that holds none, has a tensor of any name and shape, and notes what it is asked for."""

    name = "recorder"

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.parts: list[Part] = []

    def lazy(self, name: str, shape: tuple[int, ...]) -> _Noted:
        return _Noted(self, name, shape)


@dataclass(frozen=True)
class _Noted:
    """A tensor of a `_Recorder`: indexing it notes the part."""

    recorder: _Recorder
    name: str
    shape: tuple[int, ...]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        bounds = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=False)]
        bounds += [(0, size) for size in self.shape[len(bounds) :]]
        self.recorder.parts.append(Part(self.recorder.rank, self.name, self.shape, tuple(bounds)))
        return torch.empty(self.shape, device="meta")[index]


def split(model: str, size: int) -> list[Part]:
    """Every tensor part that every one of `size` ranks reads. Nothing is loaded.

    Raises:
        ValueError: this number of ranks does not divide the model.
    """
    config = ModelConfig.from_hf(resolve(model).config)
    parts: list[Part] = []
    for rank in range(size):
        recorder = _Recorder(rank)
        model = DecoderModel(shard_config(config, size), None, 8, torch.float32, torch.device("meta"))
        model.load(ShardedWeightLoader(recorder, config, rank, size))
        parts += recorder.parts
    return parts


def draw_split(parts: list[Part]) -> Picture:
    """The matrices of one layer and the embedding, each region in its rank's colour.

    Lengths are roots of sizes, and no side is drawn longer than `LONGEST` times the hidden size's.
    """
    figure = new_figure(10, 3.1)
    ranks = _draw_matrices(figure.subplots(), parts)
    return finish(figure, f"the matrices of a layer and which of {ranks} ranks holds which part")


def draw_ranks(model: str = "random:qwen3-0.6b", sizes: tuple[int, ...] = (1, 2, 4)) -> Picture:
    """Which part of each matrix two ranks hold, and the bytes of weights that a rank reads per decode step."""
    figure = new_figure(10, 5)
    above, below = figure.subplots(2, height_ratios=(3, 1.3))
    _draw_matrices(above, split(model, 2))
    config = ModelConfig.from_hf(resolve(model).config)
    read = {size: 2 * sum(part.numbers for part in split(model, size) if part.rank == 0) / 1e6 for size in sizes}
    sums = 2 * config.num_layers + 1  # two per layer in the skinny GEMMs, in float32, and the embedding's in 16 bits
    kilobytes = (4 * (sums - 1) + 2) * config.hidden_size / 1e3
    labels = [f"{size} rank{'s' * (size > 1)}" for size in sizes]
    more = f", and {sums} sums: {kilobytes:.0f} KB to each other rank"
    texts = [f"{megabytes:,.0f} MB" + more * (size > 1) for size, megabytes in read.items()]
    draw_bars(below, labels, [(None, list(read.values()), BLUE)], texts, room=1.1, height=0.6)
    below.set_xlabel(f"MB of weights that each rank reads per step; one request of {model.removeprefix('random:')}")
    plain(below, "x")
    figure.suptitle("Each rank reads its share of every matrix; what the ranks add up is small", fontsize=12)
    return finish(figure, "which rank holds which part of a layer, and the bytes that a rank reads per step")


def _draw_matrices(axes: Axes, parts: list[Part]) -> int:
    """Draws the embedding and one layer's matrices side by side; returns the number of ranks."""
    ranks = 1 + max(part.rank for part in parts)
    found = {label: [p for p in parts if p.name == f"model.{name}.weight"] for name, label in MATRICES.items()}
    hidden, x = found["Q"][0].shape[1], 0.0
    for label, own in found.items():
        x += _draw_matrix(axes, x, label, own, hidden) + 0.45
    handles = [Patch(color=PALETTE[rank % len(PALETTE)], label=f"rank {rank}") for rank in range(ranks)]
    axes.legend(handles=handles, frameon=False, loc="lower right", ncols=ranks)
    axes.set(xlim=(-0.1, x), ylim=(LONGEST + 0.1, -0.8), aspect="equal")
    axes.axis("off")
    return ranks


def _draw_matrix(axes: Axes, x: float, label: str, parts: list[Part], hidden: int) -> float:
    """Draws one matrix with its upper left corner at (x, 0); returns its width. A side of `hidden` is drawn 1 long."""
    rows, columns = parts[0].shape
    height, width = (min(LONGEST, (side / hidden) ** 0.5) for side in (rows, columns))
    holders: dict[tuple, list[int]] = {}
    for part in parts:
        holders.setdefault(part.bounds, []).append(part.rank)
    for ((top, bottom), (left, right)), ranks in holders.items():
        for i, rank in enumerate(ranks):  # several ranks that hold the same part share its area in stripes
            one = (right - left) / columns * width / len(ranks)
            corner = (x + left / columns * width + i * one, top / rows * height)
            box = Rectangle(corner, one, (bottom - top) / rows * height, facecolor=PALETTE[rank % len(PALETTE)],
                            edgecolor="white", linewidth=1)  # fmt: skip
            axes.add_patch(box)
    axes.text(x + width / 2, -0.06, f"{label}\n{rows} × {columns}", ha="center", va="bottom", fontsize=9)
    return width
