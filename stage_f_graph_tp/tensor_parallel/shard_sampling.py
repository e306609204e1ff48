"""Sample without gathering the logits: each rank finds its best token, and the winners are compared.

A greedy token is an argmax, and so is a token sampled at a temperature: the argmax of `logits / temperature + noise`
(Gumbel-max, stage A). A maximum can be found in parts, and a token's noise is a hash of the request's seed, the
step and the token's id, so every rank can compute the noise of its tokens:

    rank 0   logits of tokens 0 … n/2 ─► its winner's (logit, noise, highest logit, id) ─┐
                                                                                         ├► all-gather ─► the same
    rank 1   logits of the others     ─► its winner's (logit, noise, highest logit, id) ─┘             token on both

So the ranks send a few numbers per row instead of all logits, and no rank has to tell the others which token was
sampled. Requests that need a whole row (top-k, top-p, min-p, penalties, logprobs, a replaced sampler) still gather it.

Among equal logits the smallest id wins, as with one rank. Within a rank, noise is added to the distance from the rank's
highest logit; only the winners are compared relative to the highest logit of all ranks. So the sampled token differs
from one rank's result only if two tokens of a rank differ by no more than a float32 rounding, and the all-reduce's sums
change logits by as much.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stage_a_naive.contract.filters import HOTTEST
from stage_a_naive.contract.noise import gumbel_from_bits, mix32
from stage_a_naive.sampling import where_finite
from stage_d_paged.sampler.reference import sample_reference
from stage_f_graph_tp.tensor_parallel.sharding import VocabParallelEmbedding


class ShardSampler:
    """Samples greedy and temperature-only rows, on all ranks together.

    Args:
        head: the LM head, of which this rank has a part.
    """

    def __init__(self, head: VocabParallelEmbedding) -> None:
        self._head = head
        self._count = head.last - head.first  # this rank's tokens; the rest of its table is padding
        device = head.weight.device
        tokens = torch.arange(head.weight.shape[0], device=device)
        self._mixed_ids = mix32(head.first + tokens) if device.type == "cpu" else None

    def __call__(self, hidden: Tensor, temperatures: Tensor, noise_keys: Tensor) -> tuple[Tensor, Tensor]:
        """Choose a token for every row of the final states `[rows, hidden]`, the same on all ranks.

        Args:
            temperatures: float32 `[rows]`.
            noise_keys: int32 `[rows]`, the bits of `noise_key(seed, step)`.

        Returns:
            ids int64 `[rows]`, and the same for the host: see `Sampler.choose`.
        """
        scores = self._head.own_logits(hidden)  # [rows, columns]
        scores[:, self._count :] = -math.inf
        if scores.device.type == "cuda":
            # Here, because only GPUs need Triton.
            import stage_f_graph_tp.tensor_parallel.shard_sampling_kernels as kernels

            winners = kernels.find_winners(scores, temperatures, noise_keys, self._head.first)
            return kernels.compare_winners(self._head.group.stack(winners), temperatures)
        assert self._mixed_ids is not None
        temperatures = temperatures.clamp(max=HOTTEST)
        winners = find_winners(scores, temperatures, noise_keys, self._head.first, self._mixed_ids)
        return compare_winners(self._head.group.stack(winners), temperatures)


def find_winners(scores: Tensor, temperatures: Tensor, noise_keys: Tensor, first: int, mixed_ids: Tensor) -> Tensor:
    """Find the best token of every row.

    Args:
        scores: `[rows, columns]`, the logits of tokens `first`, `first + 1`, …; -inf where there is no token.
        temperatures: float32 `[rows]`.
        noise_keys: int32 `[rows]`.
        mixed_ids: `mix32` of these tokens' ids, int64 `[columns]`.

    Returns:
        float32 `[4, rows, 1]`: the winner's logit, its noise, the row's highest logit, and the winner's id, which a
        float32 holds exactly below 2**24.
    """
    best = sample_reference(scores, temperatures, noise_keys, mixed_ids)
    noise = gumbel_from_bits(mix32(mixed_ids[best] ^ (noise_keys.long() & 0xFFFFFFFF)))
    logit = scores.gather(1, best[:, None])[:, 0].float()
    return torch.stack([logit, noise, scores.amax(-1).float(), (first + best).float()])[..., None]


def compare_winners(winners: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Find the best token of every row among the winners of its parts; returns ids, and the same for the host.

    Args:
        winners: float32 `[ranks, 4, rows, parts]`, as `find_winners` returns them; ids ascend with ranks and parts.
        temperatures: float32 `[rows]`.
    """
    logits, noise, highest, ids = winners.permute(1, 2, 0, 3).flatten(2)  # each [rows, ranks * parts]
    greedy = (temperatures == 0)[:, None]
    shifted = (logits - highest.amax(-1, keepdim=True)) / temperatures[:, None].masked_fill(greedy, 1)
    best = torch.where(greedy, logits, shifted + noise).argmax(-1, keepdim=True)  # of equals the first
    chosen = ids.gather(1, best)[:, 0].long()
    return chosen, where_finite(chosen, highest)
