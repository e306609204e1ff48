"""Tensor parallelism: one model on several ranks, each with a slice of every matrix.

Two linears in a row need one all-reduce, not two (Megatron-LM, Shoeybi et al., 2019,
https://arxiv.org/abs/1909.08053):

    column-parallel   each rank holds some of the *rows* of W (some output features): x W_rᵀ is its part of the output,
                      and no communication is needed, because the next layer of the same rank reads only that part
    row-parallel      each rank holds some of the *columns* of W (some input features): x_r W_rᵀ is a full-sized
                      partial sum, and adding up the ranks' partial sums (an all-reduce) gives the output

Attention is split by heads (QKV column-parallel, output row-parallel) and the MLP by intermediate features (gate and up
column-parallel, down row-parallel): two all-reduces per layer. If there are more ranks than KV heads, several ranks
hold a copy of the same KV head. The embedding is split by vocabulary: a rank looks up the ids that it holds, uses zeros
for the others, and an all-reduce combines them. As the LM head, each rank scores its part of the vocabulary. The parts
are gathered only for requests that need whole rows (`shard_sampling.py`). In layers with experts, a rank has a part of
each expert, or some whole experts.

So a rank's share of stage D's model is stage D's model, built from a smaller config (`shard_config`), filled with
slices (`ShardedTensors`), with a collective after every row-parallel linear and every embedding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stage_a_naive.checkpoints.experts import expert_of
from stage_a_naive.checkpoints.tensor_source import LazyTensor
from stage_d_paged.config import ModelConfig
from stage_d_paged.layers import Embedding
from stage_d_paged.model import DecoderModel
from stage_d_paged.runtime import Plan, empty_model
from stage_d_paged.weights import TensorSource, WeightLoader
from stage_f_graph_tp.tensor_parallel.rank_group import RankGroup

if TYPE_CHECKING:  # only GPUs need Triton
    from stage_f_graph_tp.kernels.rank_sum import Peers


def check_divisible(config: ModelConfig, size: int) -> None:
    """Check that the model can be divided among this many ranks.

    Raises:
        ValueError: it cannot; the message names the size that does not fit.
    """
    kv_heads = config.num_kv_heads
    counts = {("attention heads", config.num_heads), ("intermediate features", config.intermediate_size)}
    for experts in filter(None, (kind.experts for kind in config.layers)):
        features = "intermediate features of an expert"
        counts |= {(features, experts.shared_size)}
        counts |= {("experts", experts.count) if experts.ranks > 1 else (features, experts.size)}
    for what, count in sorted(counts):
        if count % size:
            raise ValueError(f"tensor_parallel_size={size} does not divide the model's {count} {what}")
    if kv_heads % size and size % kv_heads:
        raise ValueError(f"tensor_parallel_size={size} and the model's {kv_heads} KV heads do not divide one another")


def shard_config(config: ModelConfig, size: int, rank: int = 0) -> ModelConfig:
    """Shrink a config to one rank's share. The vocabulary is rounded up: the last rank's table may end in zero rows."""
    check_divisible(config, size)
    return replace(
        config,
        layers=tuple(replace(kind, experts=kind.experts and kind.experts.shard(rank, size)) for kind in config.layers),
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
        vocab_size=-(-config.vocab_size // size),
    )


def build_sharded_model(plan: Plan, group: RankGroup) -> DecoderModel:
    """Build this rank's share of stage D's model, with its weights and its collectives; `plan` is the whole model's."""
    config = plan.config
    model = empty_model(plan._replace(config=shard_config(config, group.size, group.rank)))
    model.load(WeightLoader(ShardedTensors(plan.tensors, config, group.rank, group.size)))
    for layer in model.layers:
        layer.self_attn.o_proj = RowParallelLinear(layer.self_attn.o_proj, group)
        layer.mlp.down_proj = RowParallelLinear(layer.mlp.down_proj, group)
    tied = model.lm_head is model.embed_tokens
    model.embed_tokens = VocabParallelEmbedding(model.embed_tokens, config.vocab_size, group)
    model.lm_head = model.embed_tokens if tied else VocabParallelEmbedding(model.lm_head, config.vocab_size, group)
    return model


class ShardedTensors:
    """One rank's view of a checkpoint: only this rank's slice of every tensor that is cut.

    Args:
        whole: the whole checkpoint.
        config: the whole model's shape.
        rank, size: this rank, and how many there are.
    """

    def __init__(self, whole: TensorSource, config: ModelConfig, rank: int, size: int) -> None:
        self.name, self._whole, self._rank = whole.name, whole, rank
        kv_dim, kv_parts = config.num_kv_heads * config.head_dim, min(size, config.num_kv_heads)
        rows = {"q_proj": config.num_heads * config.head_dim, "embed_tokens": config.vocab_size}
        rows |= {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        # For each tensor that is cut: the dimension, its whole length there, the number of parts, and this rank's part.
        self._cuts = {name: (0, total, size, rank) for name, total in rows.items()}
        self._cuts |= {"lm_head": (0, config.vocab_size, size, rank)}
        self._cuts |= dict.fromkeys(("k_proj", "v_proj"), (0, kv_dim, kv_parts, rank * kv_parts // size))
        self._cuts |= {"o_proj": (1, rows["q_proj"], size, rank)}
        self._cuts |= {"down_proj": (1, config.intermediate_size, size, rank)}
        experts = next((kind.experts for kind in config.layers if kind.experts), None)
        self._experts, self._names = experts, whole.names()
        if experts is not None and experts.ranks > 1 and self._names is not None:
            elsewhere = set(range(experts.count)).difference(experts._replace(rank=rank).held)
            self._names = {name for name in self._names if expert_of(name) not in elsewhere}

    def names(self) -> set[str] | None:
        """Return the names of the tensors that this rank reads, whole or in part."""
        return self._names

    def _cut(self, name: str) -> tuple[int, int, int, int] | None:
        matrix, kind = name.split(".")[-2:]
        cut = self._cuts.get(matrix)
        if cut is None or (kind == "bias" and cut[0] == 1):
            return None
        if self._experts is None or "expert" not in name:
            return cut
        is_shared = ".shared_expert." in name
        if self._experts.ranks > 1 and not is_shared:
            return None
        dim, _, parts, part = cut  # an expert is cut as an MLP is, and has another size
        return dim, self._experts.shared_size if is_shared else self._experts.size, parts, part

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of this rank's slice, or the whole shape of a tensor that cannot be cut."""
        stored, cut = self._whole.shape(name), self._cut(name)
        if stored is None or cut is None:
            return stored
        dim, total, parts, _ = cut
        return (*stored[:dim], -(-total // parts), *stored[dim + 1 :]) if stored[dim] == total else stored

    def lazy(self, name: str, shape: tuple[int, ...]) -> LazyTensor:
        """Read this rank's slice of the tensor `name`, of shape `shape`. Rows past the end of the tensor are zeros.

        The ranks' results are summed, so only rank 0 has the bias of a row-parallel linear; the others have zeros.
        """
        cut = self._cut(name)
        if cut is None:
            behind_columns = name.endswith(".bias") and self._rank > 0
            return torch.zeros(shape) if behind_columns else self._whole.lazy(name, shape)
        dim, total, _, part = cut
        start = min(part * shape[dim], total)
        stop = min(start + shape[dim], total)
        whole = self._whole.lazy(name, (*shape[:dim], total, *shape[dim + 1 :]))
        own = whole[(slice(None),) * dim + (slice(start, stop),)]
        missing = shape[dim] - (stop - start)
        return F.pad(own, (0, 0) * (len(shape) - 1) + (0, missing)) if missing else own


class RowParallelLinear(nn.Module):
    """A linear that holds some columns of the matrix: sums the ranks' partial sums, then adds the residual, if any.

    Args:
        linear: stage D's layer, holding this rank's columns.
    """

    def __init__(self, linear: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.linear = linear
        self.group = group

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.group.all_reduce(self.linear(x), residual)

    @property
    def weight(self) -> Any:  # a tensor, or a format's replacement for it
        return self.linear.weight

    @property
    def peers(self) -> Peers | None:
        """The arguments for a kernel that sums over the ranks; None if the GPUs cannot write one another's memory."""
        return None if self.group.one_shot is None else self.group.one_shot.peers


class VocabParallelEmbedding(nn.Module):
    """An embedding that holds `ceil(vocab / ranks)` rows of the table; the last rank may end in padding.

    Args:
        embedding: stage D's layer, holding this rank's rows.
        vocab_size: rows of the whole table.
    """

    def __init__(self, embedding: Embedding, vocab_size: int, group: RankGroup) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.group = group
        self.vocab_size = vocab_size
        self.first = min(group.rank * self.weight.shape[0], vocab_size)
        self.last = min(self.first + self.weight.shape[0], vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        elsewhere = (input_ids < self.first) | (input_ids >= self.last)
        rows = F.embedding((input_ids - self.first).masked_fill_(elsewhere, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Score this rank's part of the vocabulary: `[rows, ceil(vocab / ranks)]`, zeros beyond the last token."""
        return F.linear(hidden, self.weight)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Score the whole vocabulary, on all ranks: `[rows, vocab]`."""
        logits = self.group.all_gather(self.own_logits(hidden))[:, : self.vocab_size]
        return logits if out is None else out.copy_(logits)
