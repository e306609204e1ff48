"""How tensor parallelism splits a model: which part of every matrix each rank reads, asked of stage F's own layers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from math import prod
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from torch import Tensor

from benchmarks.pictures.picture import PALETTE, Picture, new_figure
from figures.canvas import draw_box
from stage_a_naive.checkpoints.checkpoint import TensorSource
from stage_a_naive.checkpoints.loading import resolve
from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_d_paged.weights import WeightLoader
from stage_f_graph_tp.tensor_parallel.sharding import ShardedTensors, shard_config

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
LONGEST = 2.6  # no side is drawn longer than this many times the hidden size's

Bounds = tuple[tuple[int, int], ...]  # rows and columns as (start, stop)


class Part(NamedTuple):
    """What one rank reads of one tensor."""

    rank: int
    name: str
    shape: tuple[int, ...]
    bounds: Bounds

    @property
    def numbers(self) -> int:
        return prod(stop - start for start, stop in self.bounds)


class _Recorder(TensorSource):
    """A source of weights that holds none, has a tensor of any name and shape, and notes what it is asked for."""

    name = "recorder"

    def __init__(self, rank: int, parts: list[Part]) -> None:
        self.rank, self.parts = rank, parts

    def lazy(self, name: str, shape: tuple[int, ...]) -> _Noted:
        return _Noted(shape, lambda bounds: self.parts.append(Part(self.rank, name, shape, bounds)))


class _Noted(NamedTuple):
    """A tensor of a `_Recorder`: indexing it notes the part."""

    shape: tuple[int, ...]
    note: Callable[[Bounds], None]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        whole = zip_longest(index, self.shape, fillvalue=slice(None))
        self.note(tuple(part.indices(size)[:2] for part, size in whole))
        return torch.empty(self.shape, device="meta")[index]


def split(model: str, size: int) -> list[Part]:
    """Every tensor part that every one of `size` ranks reads. Nothing is loaded.

    Raises:
        ValueError: this number of ranks does not divide the model.
    """
    config, parts = ModelConfig.from_hf(resolve(model).config), []
    for rank in range(size):
        own = DecoderModel(shard_config(config, size), None, 8, torch.float32, torch.device("meta"))
        own.load(WeightLoader(ShardedTensors(_Recorder(rank, parts), config, rank, size)))
    return parts


def draw_split(parts: list[Part]) -> Picture:
    """The matrices of one layer and the embedding, each region in its rank's colour; lengths are roots of sizes."""
    figure = new_figure(10, 3.1)
    _draw_matrices(figure.subplots(), parts)
    return Picture(figure, f"the matrices of a layer and which of {1 + parts[-1].rank} ranks holds which part")


def _draw_matrices(axes: Axes, parts: list[Part]) -> None:
    """Draw the embedding and one layer's matrices side by side; a side of the hidden size is 1 long."""
    found = {label: [p for p in parts if p.name == f"model.{name}.weight"] for name, label in MATRICES.items()}
    hidden, x = found["Q"][0].shape[1], 0.0
    for label, own in found.items():
        rows, columns = own[0].shape
        height, width = (min(LONGEST, (side / hidden) ** 0.5) for side in (rows, columns))
        holders: dict[Bounds, list[int]] = {}
        for part in own:
            holders.setdefault(part.bounds, []).append(part.rank)
        for ((top, bottom), (left, right)), ranks in holders.items():
            one = (right - left) / columns * width / len(ranks)  # ranks that hold the same part share it in stripes
            for i, rank in enumerate(ranks):
                corner = x + left / columns * width + i * one, top / rows * height
                look = {"facecolor": PALETTE[rank % len(PALETTE)], "edgecolor": "white", "linewidth": 1}
                draw_box(axes, *corner, one, (bottom - top) / rows * height, **look)
        axes.text(x + width / 2, -0.06, f"{label}\n{rows} × {columns}", ha="center", va="bottom", fontsize=9)
        x += width + 0.45
    ranks = range(1 + parts[-1].rank)
    handles = [Patch(color=PALETTE[rank % len(PALETTE)], label=f"rank {rank}") for rank in ranks]
    axes.legend(handles=handles, frameon=False, loc="lower right", ncols=len(ranks))
    axes.set(xlim=(-0.1, x), ylim=(LONGEST + 0.1, -0.8), aspect="equal")
    axes.axis("off")
