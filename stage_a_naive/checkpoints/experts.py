"""Mixture of experts: which layers have experts, their sizes, and the forms in which checkpoints store them.

A layer with experts has many small MLPs instead of a large one, and a router that chooses a few of them for each token.
Checkpoints store the matrices of the experts in three forms:

    model.layers.0.mlp.experts.7.gate_proj.weight           [size, hidden]               Qwen
    model.layers.0.block_sparse_moe.experts.7.w1.weight     [size, hidden]               Mixtral
    model.layers.0.mlp.experts.gate_up_proj                 [experts, 2 size, hidden]    transformers 5, in memory

`ExpertTensors` gives all of them the names of the first form.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from transformers import PretrainedConfig

from stage_a_naive.checkpoints.tensor_source import LazyTensor, TensorSource
from stage_a_naive.contract.errors import ModelError, shown

ARCHITECTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
ONE = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<index>\d+)\.(?P<matrix>gate_proj|up_proj|down_proj)\.weight")
FUSED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<matrix>gate_up_proj|down_proj)")
MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
MIXTRAL_NAME = re.compile(r"\.block_sparse_moe\.(?:(experts\.\d+\.)(w[123]))?")


class Experts(NamedTuple):
    """The experts of a layer.

    Attributes:
        count: experts in the layer.
        per_token: experts that the router chooses for a token.
        size: intermediate features of an expert.
        shared_size: intermediate features of an expert that every token uses; 0: there is none.
        weights_sum_to_one: whether the weights of a token's experts are divided by their sum.
        rounds_weights: whether these weights are rounded to the model's dtype.
        ranks, rank: ranks that divide the experts among them, each whole, and which of them this one is; 1: a rank has
            all experts, or a part of each.
    """

    count: int
    per_token: int
    size: int
    shared_size: int = 0
    weights_sum_to_one: bool = True
    rounds_weights: bool = True
    ranks: int = 1
    rank: int = 0

    @property
    def held(self) -> range:
        """The experts whose matrices are on this rank."""
        share = self.count // self.ranks
        return range(self.rank * share, (self.rank + 1) * share)

    @property
    def router_rows(self) -> int:
        """Rows of the matrices that weigh the experts: one per expert, and one for a shared expert."""
        return self.count + bool(self.shared_size)

    def shard(self, rank: int, ranks: int) -> Experts:
        """Return a rank's share: whole experts if they are divided, or else a part of each one's features."""
        shared_size = self.shared_size // ranks
        if self.ranks > 1:
            return self._replace(rank=rank, shared_size=shared_size)
        return self._replace(size=self.size // ranks, shared_size=shared_size)


def experts_of_layers(config: PretrainedConfig) -> list[Experts | None]:
    """Return the experts of each layer; None for a layer with an ordinary MLP."""
    if config.model_type not in ARCHITECTURES:
        return [None] * config.num_hidden_layers
    count, per_token = config.num_experts, config.num_experts_per_tok
    if config.model_type == "mixtral":
        experts = Experts(count, per_token, config.intermediate_size, rounds_weights=False)
        return [experts] * config.num_hidden_layers
    shared = getattr(config, "shared_expert_intermediate_size", 0)
    experts = Experts(count, per_token, config.moe_intermediate_size, shared, bool(config.norm_topk_prob))
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    return [experts if i not in dense and (i + 1) % step == 0 else None for i in range(config.num_hidden_layers)]


def check_experts(config: PretrainedConfig) -> None:
    """Raise `ModelError` for impossible numbers of experts; the message names the field."""
    if config.model_type not in ARCHITECTURES:
        return
    fields = ["num_experts", "num_experts_per_tok"]
    if config.model_type != "mixtral":
        fields += ["moe_intermediate_size", "decoder_sparse_step"]
    if config.model_type == "qwen2_moe":
        fields.append("shared_expert_intermediate_size")
    for field in fields:
        value = getattr(config, field)
        if value is None or value < 1:
            raise ModelError(f"{field} must be 1 or more, got {shown(value)}")
    if config.num_experts_per_tok > config.num_experts:
        raise ModelError(
            f"num_experts_per_tok ({config.num_experts_per_tok}) is more than num_experts ({config.num_experts})"
        )


def expert_of(name: str) -> int | None:
    """Return the number of the expert whose matrix has this name; None if it is no expert's."""
    match = ONE.fullmatch(name)
    return match and int(match["index"])


def names_of_experts(fused: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the experts' matrices that one tensor for all of them holds.

    A tensor that is none of these is returned as it is.
    """
    match = FUSED.fullmatch(fused)
    if match is None:
        return {fused: shape}
    count, rows, columns = shape
    parts = ("gate_proj", "up_proj") if match["matrix"] == "gate_up_proj" else ("down_proj",)
    prefix, part_shape = match["experts"], (rows // len(parts), columns)
    return {f"{prefix}.{i}.{part}.weight": part_shape for i in range(count) for part in parts}


class ExpertTensors:
    """The tensors of a source, with one name per matrix of an expert, whichever form the source has.

    Args:
        source: a checkpoint, or a source that makes tensors.
        count: experts of a layer.
    """

    def __init__(self, source: TensorSource, count: int) -> None:
        self.name, self._source, self._count = source.name, source, count
        self._stored_as: dict[str, str] = {}  # our name -> the source's, where they differ
        self._read: tuple[str, LazyTensor] | None = None  # the last tensor for all experts
        stored = source.names()
        self._names = None if stored is None else {ours for name in stored for ours in self._our_names(name)}

    def names(self) -> set[str] | None:
        return self._names

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, or of the part for one expert."""
        stored = self._stored_as.get(name, name)
        shape = self._source.shape(stored)
        if shape is None or len(shape) != 3 or FUSED.fullmatch(stored) is None:
            return shape
        return shape[1] // (1 if stored.endswith(".down_proj") else 2), shape[2]

    def lazy(self, name: str, shape: tuple[int, ...]) -> LazyTensor:
        """Find a tensor; of a tensor for all experts, read the part of one."""
        one = ONE.fullmatch(name)
        stored = self._stored_as.get(name, name)
        if one is not None and self._names is None:
            stored = f"{one['experts']}.{'down_proj' if one['matrix'] == 'down_proj' else 'gate_up_proj'}"
        if one is None or FUSED.fullmatch(stored) is None:
            return self._source.lazy(stored, shape)
        rows, columns = shape
        height = rows if stored.endswith(".down_proj") else 2 * rows
        first = rows if one["matrix"] == "up_proj" else 0
        index = int(one["index"])
        return self._all_experts(stored, (self._count, height, columns))[index : index + 1, first : first + rows][0]

    def _all_experts(self, stored: str, shape: tuple[int, ...]) -> LazyTensor:
        """Find the tensor for all experts, once: a source may have to make it."""
        if self._read is None or self._read[0] != stored:
            self._read = None  # frees its memory first
            self._read = stored, self._source.lazy(stored, shape)
        return self._read[1]

    def _our_names(self, stored: str) -> list[str]:
        ours = MIXTRAL_NAME.sub(lambda m: f".mlp.{m[1]}{MIXTRAL[m[2]]}" if m[1] else ".mlp.", stored)
        shape = self._source.shape(stored) if FUSED.fullmatch(stored) else None
        names = [ours] if shape is None or len(shape) != 3 else list(names_of_experts(stored, shape))
        self._stored_as |= {name: stored for name in names if name != stored}
        return names
