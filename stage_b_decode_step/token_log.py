"""The generated tokens: written on the device at every step, read on the host a little later.

Stage A waits for each token before it launches the next step, so the device idles while Python works, and Python idles
while the device works. But the next step reads its token on the device, where the last step wrote it. The host needs
the tokens only for the text and to detect the end. So they are copied to the host in chunks, asynchronously; an event
marks the arrival of a chunk.

        CPU  |launch 1-8|launch 9-16| wait |read 1-8|launch 17-24| wait |read 9-16|launch 25-32| …
        GPU     |===== steps 1-8 =====|===== steps 9-16 =====|===== steps 17-24 =====| …

A copy is asynchronous only if its target is pinned memory, which the operating system may not move.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class TokenLog:
    """One request's generated ids on the device, and their copy on the host.

    Args:
        capacity: the most ids that it can hold.
        device: where the ids are chosen.
        reuse: write into buffers allocated once; otherwise make new tensors at every step.
        pinned: copy to pinned host memory (only on a GPU).

    Attributes:
        next_input: `[1, 1]` int64 on the device, the input of the next step.
    """

    def __init__(self, capacity: int, device: torch.device, reuse: bool, pinned: bool) -> None:
        self._device = device
        self._reuse = reuse
        self._pin = pinned and device.type == "cuda"
        self.next_input = torch.zeros((1, 1), dtype=torch.int64, device=device)
        if reuse:
            self.generated = torch.zeros(capacity, dtype=torch.int64, device=device)
            self._host = self._host_buffer(capacity)
            torch._dynamo.mark_static_address(self.next_input)
        self.clear()

    def _host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=self._pin)

    def clear(self) -> None:
        """Forget the last request's ids. The device must have finished its work."""
        self._written = 0
        self._sent = 0
        self._unsent: list[Tensor] = []  # without reuse: the ids written since the last `send`
        self._in_flight: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def write(self, ids: Tensor) -> None:
        """Log the id `[1]` that a step chose and make it the next step's input, without waiting for it.

        A negative number is no token; until the host knows it, the following steps run with another token.
        """
        if self._reuse:
            torch.clamp(ids[None], min=0, out=self.next_input)
            self.generated[self._written : self._written + 1].copy_(ids)
        else:
            self._unsent.append(ids.to(self._device))
            self.next_input = self._unsent[-1][None].clamp(min=0)
        self._written += 1

    def send(self) -> None:
        """Enqueue the copy of everything written since the last `send`, without waiting for it."""
        if self._reuse:
            source = self.generated[self._sent : self._written]
            target = self._host[self._sent : self._written]
        else:
            source = torch.cat(self._unsent)
            target = self._host_buffer(len(source))
            self._unsent = []
        target.copy_(source, non_blocking=True)
        arrived = None
        if self._device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()  # on the stream of the steps, so that it follows the copy, which follows the steps
        self._in_flight.append((target, arrived))
        self._sent = self._written

    def receive(self, max_in_flight: int) -> list[int]:
        """Wait until at most `max_in_flight` chunks are in flight; return the ids that arrived since the last call."""
        ids: list[int] = []
        while self._in_flight:
            target, arrived = self._in_flight[0]
            if arrived is not None and not arrived.query():
                if len(self._in_flight) <= max_in_flight:
                    break
                arrived.synchronize()
            self._in_flight.popleft()
            ids += target.tolist()
        return ids
