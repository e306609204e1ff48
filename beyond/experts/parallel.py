"""Expert parallelism: every rank has some whole experts of each layer, instead of a part of every expert.

The ranks divide attention by tensor parallelism, so after it all of them have the rows of all tokens. There are two
ways from these rows to a token's experts:

    sum          a rank runs its experts on the rows that chose them; it need not send any, and needs none
    all_to_all   a rank handles its share of the tokens: it sends each row to the ranks of its experts (dispatch),
                 and these send back the weighted sums of their experts' outputs (combine)

In both, every rank then has a part of the result, and the all-reduce that ends the layer adds the parts up. So "sum"
sends less here. A rank that has only the rows of its own requests (attention by data parallelism) cannot do without the
all-to-all. How many rows travel depends on the router: the host must know the counts, so no CUDA graph can hold it.

Both ways are a `Compute` around another one, which runs a rank's experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from beyond.options import Options
from stage_d_paged.config import ModelConfig

if TYPE_CHECKING:
    from beyond.experts.layers import Compute, SparseMLP


RECORDED = "graphs", "prefill_graphs"


def divide_experts(config: ModelConfig, options: Options) -> ModelConfig:
    """Return the shape of a model whose experts the ranks divide, each whole, if the options ask for it."""
    if options.expert_parallel == "off":
        return config
    ranks = options.tensor_parallel_size
    layers = (replace(kind, experts=kind.experts and kind.experts._replace(ranks=ranks)) for kind in config.layers)
    return replace(config, layers=tuple(layers))


def check_expert_parallel(config: ModelConfig, options: Options, device: str) -> None:
    """Check `expert_parallel` against the model and the kind of device.

    Raises:
        ValueError: the model has no experts, or a GPU would have to record all-to-alls.
    """
    given = f"expert_parallel={options.expert_parallel!r}"
    if options.expert_parallel != "off" and not config.has_experts:
        raise ValueError(f"{given}, but the model has no experts; leave expert_parallel out")
    if options.expert_parallel == "all_to_all" and device == "cuda" and any(map(options.uses, RECORDED)):
        raise ValueError(
            f"{given} cannot be recorded in CUDA graphs: the host must know how many rows travel; use "
            "expert_parallel='sum', or enforce_eager=True"
        )


def own_index(chosen: Tensor, held: range) -> Tensor:
    """Number the chosen experts as this rank's matrices are; -1 for experts of other ranks, and for padding."""
    return torch.where((chosen >= held.start) & (chosen < held.stop), chosen - held.start, -1)


def run_on_all_rows(
    compute: Compute, mlp: SparseMLP, x: Tensor, weights: Tensor, chosen: Tensor, residual: Tensor
) -> Tensor:
    """Run this rank's experts on all rows that chose them; `residual` gets this rank's part of the sums."""
    return compute(mlp, x, weights, own_index(chosen, mlp.experts.held), residual)


def dispatch_and_combine(
    compute: Compute, mlp: SparseMLP, x: Tensor, weights: Tensor, chosen: Tensor, residual: Tensor
) -> Tensor:
    """Run the experts of this rank's tokens on the ranks that hold them; `residual` gets these tokens' sums only."""
    group, held = mlp.group, mlp.experts.held
    own = slice(group.rank * len(x) // group.size, (group.rank + 1) * len(x) // group.size)
    rank_of = chosen[own] // len(held)  # [tokens, per_token]; of padding -1, no rank's
    going = [(rank_of == rank).any(1).nonzero().flatten() for rank in range(group.size)]
    tokens, sent, one_each = torch.cat(going), [len(of_rank) for of_rank in going], [1] * group.size
    received = group.all_to_all(torch.tensor(sent, device=x.device), one_each, one_each).tolist()
    rows, row_weights, row_experts = (
        group.all_to_all(part[own][tokens], sent, received) for part in (x, weights, chosen)
    )
    sums = torch.zeros_like(rows)
    if len(rows) > 0:
        sums = compute(mlp, rows, row_weights, own_index(row_experts, held), sums)
    back = group.all_to_all(sums, received, sent)
    for of_rank, part in zip(going, back.split(sent), strict=True):  # in the order of the ranks
        residual[own][of_rank] += part
    return residual


WAYS = {"sum": run_on_all_rows, "all_to_all": dispatch_and_combine}
