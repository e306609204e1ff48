"""The links between stages: a ring of point-to-point connections, by NCCL between GPUs, by gloo between processes.

Every link is a separate group of two ranks. NCCL runs the operations of one group in the order of their calls. With one
group for both directions, a send that waits for its receiver would block the receive after it, and two stages could
wait for each other.

Both sides know the size of a message from the step's command: `[tokens, hidden]` to the next stage, and from the last
stage back to stage 0 `[samples, hidden]`, the rows that need the LM head. So no sizes are sent. Between CPU processes
the command's number is sent first, so that no stage uses the states of another step. Between GPUs that would cost a
message and a wait.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from beyond.scale_out.spans import Spans
from stage_f_graph_tp.tensor_parallel import RankGroup, Rendezvous, Workers, check_number

SENDER, RECEIVER = 0, 1  # their ranks within a link


class Link(RankGroup):
    """One direction between two stages.

    Args:
        rendezvous, device, workers: as in `RankGroup`; the sender is rank 0 of the two.
        max_unsent: tensors that may wait for their receiver, which limits the memory.
    """

    def __init__(self, rendezvous: Rendezvous, device: torch.device, workers: Workers | None, max_unsent: int) -> None:
        super().__init__(rendezvous, device, workers, uses_one_shot=False)  # a link has no sums
        self.max_unsent = max_unsent
        self.num_bytes = 0  # sent so far
        self._unsent: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, x: Tensor, number: int) -> None:
        """Send a tensor, which must not be overwritten afterwards. Returns before the tensor has arrived.

        Args:
            number: of the command that it belongs to.
        """
        x = x.contiguous()
        self.num_bytes += x.nbytes
        self._unsent.append((self._start_sending(x, number), x))
        if len(self._unsent) > self.max_unsent:
            self._wait(self._unsent.popleft()[0])

    def _start_sending(self, x: Tensor, number: int) -> dist.Work:
        """Start sending a contiguous tensor of command `number`, and return at once."""
        if self.device.type == "cuda":
            return self._start("send", [x], RECEIVER, 0)
        # Not gloo's `send`, which cannot be polled.
        self._start("broadcast", torch.tensor([number]), SENDER)
        return self._start("broadcast", x, SENDER)

    def receive(self, out: Tensor, number: int) -> Tensor:
        """Receive the next tensor into `out`.

        Raises:
            RuntimeError: on a CPU, the tensor belongs to another command than `number`.
        """
        if self.device.type == "cuda":
            self._run("recv", [out], SENDER, 0)
        else:
            found = torch.tensor([-1])
            self._run("broadcast", found, SENDER)
            check_number(int(found), number)
            self._run("broadcast", out, SENDER)
        return out

    def connect(self) -> None:
        """Connect to the other rank, which calls it too."""
        # Silences PyTorch's warning that messages wait for the group's other operations: here there are none.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
        super().connect()

    def _connect_nccl(self) -> None:
        """Send a first message: NCCL connects two ranks at the first message between them."""
        torch.cuda.set_device(self.device)  # of this thread
        assert self._group is not None
        self._group.eager_connect_single_device(self.device)  # else the first message would make another group
        x = torch.zeros(1, device=self.device)
        self._run(*(("send", [x], RECEIVER, 0) if self.rank == SENDER else ("recv", [x], SENDER, 0)))
        torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Position:
    """A rank's stage, and its number within the stage. A stage's ranks have consecutive numbers."""

    rank: int
    num_stages: int
    stage_size: int  # ranks of a stage, which share its layers by tensor parallelism

    @property
    def stage(self) -> int:
        return self.rank // self.stage_size

    @property
    def rank_in_stage(self) -> int:
        return self.rank % self.stage_size


class StageLinks:
    """This rank's links to the stage before it and the stage after it; the stages form a ring.

    Rank t of a stage is linked to rank t of the next one: all ranks of a stage have the same hidden states.

    Args:
        position: this rank's.
        rendezvous: of all ranks.
        device: this rank's.
        states: `[rows, hidden]`, receives arriving hidden states; recorded steps read them there.
        workers: rank 0's handle on the others; None on the others.
        max_unsent: see `Link`.
        spans: records this rank's busy times, if given.
    """

    def __init__(
        self,
        position: Position,
        rendezvous: Rendezvous,
        device: torch.device,
        states: Tensor,
        workers: Workers | None,
        max_unsent: int,
        spans: Spans | None = None,
    ) -> None:
        self.stage = position.stage
        self.is_last = position.stage == position.num_stages - 1
        self.spans = spans
        self.states = states
        before = (self.stage - 1) % position.num_stages

        def link(number: int, rank: int) -> Link:
            part = subgroup(rendezvous, f"link{number}/{position.rank_in_stage}", rank, 2)
            return Link(part, device, workers, max_unsent)

        self._out, self._in = link(self.stage, SENDER), link(before, RECEIVER)
        # In the order of the links: if all ranks made the link to the next stage first, they would deadlock.
        self.links = sorted((self._out, self._in), key=lambda own: before if own is self._in else self.stage)

    def connect(self) -> None:
        """Connect to both neighbours. All ranks call it, once each of them is known to be ready."""
        for link in self.links:
            link.connect()

    def send(self, x: Tensor, number: int) -> None:
        """Send the hidden states of command `number` to the next stage; the last one sends to stage 0."""
        self._out.send(x, number)

    def receive(self, rows: int, number: int) -> Tensor:
        """Receive the previous stage's states of command `number`, `[rows, hidden]`, valid until the next arrive."""
        x = self._in.receive(self.states[:rows], number)
        if self.spans is not None:
            self.spans.begin()
        return x

    @property
    def num_bytes(self) -> int:
        """Bytes sent by this rank so far."""
        return self._out.num_bytes


def subgroup(rendezvous: Rendezvous, name: str, rank: int, size: int) -> Rendezvous:
    """Make a rendezvous of some of the ranks, in which this one has the number `rank`."""
    return replace(rendezvous, store=dist.PrefixStore(name, rendezvous.store), rank=rank, size=size)
