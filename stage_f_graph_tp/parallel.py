"""The ranks of one engine and what they do together: add tensors up, gather them, hand one out.

Small sums, those of decode steps, are made by a kernel of our own where the GPUs can read one another's memory
(`exchange.py`); all else is NCCL's, or gloo's between CPU processes.
"""

from __future__ import annotations

import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

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
