"""Compute log-probabilities for the rows that ask for them, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stage_a_naive.contract.logprobs import likeliest

GROUP = 2**22  # logits at a time: as float32, as 64-bit keys and sorted, each takes about thirty bytes


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of the rows that ask for them, on the host once the copies have arrived."""

    rows: list[int]
    counts: list[int]  # how many of the likeliest tokens each row asks for
    ids: Tensor  # int64 [asking, most]
    values: Tensor  # float32 [asking, most], likeliest first
    chosen: Tensor  # float32 [asking]: of the sampled token

    def by_row(self, token_ids: list[int]) -> list[dict[int, float] | None]:
        """Return a dictionary per row that asks, in stage A's order: the likeliest first, then the sampled token."""
        result: list[dict[int, float] | None] = [None] * len(token_ids)
        ids, values, chosen = self.ids.tolist(), self.values.tolist(), self.chosen.tolist()
        for i, (row, count) in enumerate(zip(self.rows, self.counts, strict=True)):
            found = dict(zip(ids[i][:count], values[i][:count], strict=True))
            found.setdefault(token_ids[row], chosen[i])
            result[row] = found
        return result


def row_logprobs(logits: Tensor, ids: Tensor, asking: Tensor, rows: list[int], counts: list[int]) -> RowLogprobs:
    """Compute the log-probabilities of some rows, and start their copies to the host.

    Args:
        logits: `[rows, vocab]`, of the model, without penalties.
        ids: int64 `[rows]`, the sampled tokens.
        asking: the rows that ask, int32 `[asking]`, on the logits' device.
        rows: the same on the host.
        counts: how many of the likeliest tokens each of these asks for.
    """
    most, group = max(counts), max(1, GROUP // logits.shape[1])
    parts = [_of_group(logits, ids, at, most) for at in asking.split(group)]
    return RowLogprobs(rows, counts, *(_to_host(torch.cat(column)) for column in zip(*parts, strict=True)))


def _of_group(logits: Tensor, ids: Tensor, at: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = logits.index_select(0, at).float().log_softmax(-1)  # [asking, vocab]
    best = likeliest(logprobs, most)
    chosen = logprobs.gather(1, ids.index_select(0, at)[:, None])[:, 0]
    return best, logprobs.gather(1, best), chosen


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
