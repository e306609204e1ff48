"""Tensor parallelism: one model on several ranks, each with a slice of every matrix.

Two linears in a row need one exchange, not two (Megatron-LM, Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053):

    column-parallel   each rank holds some of the *rows* of W (some output features): x W_rᵀ is its part of the output,
                      with nothing to exchange; the part is just what the next layer's rank needs
    row-parallel      each rank holds some of the *columns* of W (some input features): x_r W_rᵀ is a full-sized
                      partial sum, and adding the ranks' partial sums up (an all-reduce) gives the output

So attention is split by heads (QKV column-parallel, output row-parallel) and the MLP by intermediate features (gate
and up column-parallel, down row-parallel): two all-reduces a layer. Where there are more ranks than KV heads, several
ranks hold a copy of the same one. The embedding is split by vocabulary: a rank looks up the ids that it has, zeros for
the others, and an all-reduce puts them together; as the LM head, each rank scores its part of the vocabulary and the
parts are gathered.

Small sums, those of decode steps, are made by a kernel of our own where the GPUs can read one another's memory
(`exchange.py`); all else is NCCL's.

Only `ShardedFactory` knows of all this. The model is stage D's, unchanged, and a rank reads of the checkpoint's files
only its slices.
"""

from __future__ import annotations

import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from stage_d_paged.config import ModelConfig
from stage_d_paged.layers import Embedding, LayerFactory, PackedLinear, ResidualLinear
from stage_d_paged.weights import WeightLoader

COLLECTIVE_TIMEOUT = timedelta(seconds=60)


class RankGroup:
    """The ranks of one engine: NCCL between GPUs, gloo between CPU processes.

    The group is an object and not PyTorch's global default group, so that several engines fit into one process.

    Args:
        store: where the ranks find each other.
        rank, size: this rank, and how many there are.
        device: this rank's device.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = COLLECTIVE_TIMEOUT
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
            from stage_f_graph_tp.exchange import PeerExchange  # imports Triton, which is not everywhere

            self.exchange = PeerExchange(store, rank, size, device)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, COLLECTIVE_TIMEOUT)
            self.exchange = None

    def connect(self) -> None:
        """Make what the first collective needs; all ranks call it, when each is there."""
        if self.exchange is None:
            return
        reason = self.exchange.open()
        if reason is not None:
            self.exchange = None
            if self.rank == 0:
                warnings.warn(f"NCCL adds up small tensors too, which takes longer: {reason}", stacklevel=2)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum of all ranks' `x`, written over `x`; or, given a residual, added to it, in place."""
        if self.exchange is not None and self.exchange.takes(x):
            return self.exchange.add_up(x, residual)
        self._group.allreduce([x]).wait()
        return x if residual is None else residual.add_(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x [rows, columns]` side by side: `[rows, size * columns]`."""
        parts = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        self._group.allgather([list(parts.unbind(0))], [x.contiguous()]).wait()
        return parts.transpose(0, 1).flatten(1)

    def broadcast(self, x: Tensor) -> None:
        """Rank 0's `x`, written over everybody else's."""
        self._group.broadcast(x, 0).wait()

    def abort(self) -> None:
        """Let go of the other ranks, also in the middle of a collective that one of them will never join."""
        if self.exchange is not None:
            self.exchange.stop()
        abort = getattr(self._group, "abort", None)
        if abort is not None:
            abort()


def check_divisible(config: ModelConfig, size: int) -> None:
    """Refuse a number of ranks that does not divide the model.

    Raises:
        ValueError: naming what does not divide.
    """
    kv_heads = config.num_kv_heads
    for what, count in (("attention heads", config.num_heads), ("intermediate features", config.intermediate_size)):
        if count % size:
            raise ValueError(f"tensor_parallel_size={size} does not divide the model's {count} {what}")
    if kv_heads % size and size % kv_heads:
        raise ValueError(f"tensor_parallel_size={size} and the model's {kv_heads} KV heads do not divide one another")


class ColumnParallelLinear(PackedLinear):
    """Some rows of each packed matrix. `parts`: name -> (rows of the whole matrix, this rank's rows of it)."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str, tuple[int, slice]],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows = {name: own.stop - own.start for name, (_, own) in parts.items()}
        super().__init__(in_features, rows, bias, dtype, device)
        self._slices = parts

    def load(self, weights: WeightLoader, prefix: str) -> None:
        start, in_features = 0, self.weight.shape[1]
        for part, (total, own) in self._slices.items():
            here = slice(start, start + own.stop - own.start)
            weights.fill(self.weight[here], f"{prefix}.{part}.weight", (total, in_features), (own,))
            if self.bias is not None:
                weights.fill(self.bias[here], f"{prefix}.{part}.bias", (total,), (own,))
            start = here.stop


class RowParallelLinear(ResidualLinear):
    """Some columns of the matrix; the ranks' partial sums are added up, then the residual."""

    def __init__(
        self, in_features: int, out_features: int, group: RankGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(in_features // group.size, out_features, dtype, device)
        self.group = group

    def load(self, weights: WeightLoader, prefix: str) -> None:
        out_features, own = self.weight.shape
        columns = slice(self.group.rank * own, (self.group.rank + 1) * own)
        weights.fill(self.weight, f"{prefix}.weight", (out_features, own * self.group.size), (slice(None), columns))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.group.all_reduce(F.linear(x, self.weight), residual)


class VocabParallelEmbedding(Embedding):
    """Some rows of the table. The last rank's share is padded where the ranks do not divide the vocabulary."""

    def __init__(
        self, vocab_size: int, hidden_size: int, group: RankGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(-(-vocab_size // group.size), hidden_size, dtype, device)
        self.group = group
        self.vocab_size = vocab_size
        self.first = min(group.rank * self.weight.shape[0], vocab_size)
        self.last = min(self.first + self.weight.shape[0], vocab_size)
        self.weight[self.last - self.first :].zero_()

    def load(self, weights: WeightLoader, prefix: str) -> None:
        own = self.weight[: self.last - self.first]
        shape = (self.vocab_size, self.weight.shape[1])
        weights.fill(own, f"{prefix}.weight", shape, (slice(self.first, self.last),))

    def check_copy(self, weights: WeightLoader, prefix: str) -> None:
        own = self.weight[: self.last - self.first]
        shape = (self.vocab_size, self.weight.shape[1])
        weights.check_equal(own, f"{prefix}.weight", shape, (slice(self.first, self.last),))

    def forward(self, input_ids: Tensor) -> Tensor:
        elsewhere = (input_ids < self.first) | (input_ids >= self.last)
        rows = F.embedding((input_ids - self.first).masked_fill_(elsewhere, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.group.all_gather(self.local_logits(hidden))[:, : self.vocab_size]

    def local_logits(self, hidden: Tensor) -> Tensor:
        """Scores of this rank's part of the vocabulary: `[rows, hidden]` -> `[rows, ceil(vocab / ranks)]`."""
        return F.linear(hidden, self.weight)


class ShardedFactory(LayerFactory):
    """Makes one rank's share of every layer."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, group: RankGroup) -> None:
        super().__init__(config, dtype, device)
        check_divisible(config, group.size)
        self.group = group
        self.num_heads = config.num_heads // group.size
        self.num_kv_heads = max(1, config.num_kv_heads // group.size)
        # With fewer KV heads than ranks, neighbouring ranks hold the same one.
        self._kv_rank = group.rank * config.num_kv_heads // group.size if self.num_kv_heads == 1 else group.rank

    def embedding(self) -> VocabParallelEmbedding:
        config = self.config
        return VocabParallelEmbedding(config.vocab_size, config.hidden_size, self.group, self.dtype, self.device)

    def qkv(self) -> ColumnParallelLinear:
        config, head_dim = self.config, self.config.head_dim
        query = _own(self.num_heads * head_dim, self.group.rank)
        key = _own(self.num_kv_heads * head_dim, self._kv_rank)
        parts = {
            "q_proj": (config.num_heads * head_dim, query),
            "k_proj": (config.num_kv_heads * head_dim, key),
            "v_proj": (config.num_kv_heads * head_dim, key),
        }
        return ColumnParallelLinear(config.hidden_size, parts, config.qkv_bias, self.dtype, self.device)

    def attention_output(self) -> RowParallelLinear:
        width = self.config.num_heads * self.config.head_dim
        return RowParallelLinear(width, self.config.hidden_size, self.group, self.dtype, self.device)

    def gate_up(self) -> ColumnParallelLinear:
        total = self.config.intermediate_size
        own = _own(total // self.group.size, self.group.rank)
        parts = {"gate_proj": (total, own), "up_proj": (total, own)}
        return ColumnParallelLinear(self.config.hidden_size, parts, False, self.dtype, self.device)

    def down(self) -> RowParallelLinear:
        config = self.config
        return RowParallelLinear(config.intermediate_size, config.hidden_size, self.group, self.dtype, self.device)


def _own(count: int, rank: int) -> slice:
    return slice(rank * count, (rank + 1) * count)
