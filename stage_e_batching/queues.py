"""The waiting and the running sequences, and their batch slots.

    arrive -> waiting -> prefilling -> decoding -> gone

`Queues` records where every sequence is and releases what it held when it leaves. The scheduler (`scheduler.py`)
decides which sequences move on in a step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Protocol

from stage_d_paged.block_manager import BlockManager
from stage_d_paged.sequence import Sequence
from stage_e_batching.step import BatchSequence, State

by_arrival = attrgetter("request_id")
MAX_OVERTAKES = 16  # times that later requests may overtake a request
LOOKAHEAD = 64  # waiting requests that a step considers, so that a long queue costs no more than a short one


class Order(Protocol):
    """The order in which waiting sequences are tried; see also `waiting_order.py`."""

    def candidates(self, waiting: Iterable[BatchSequence], limit: int, manager: BlockManager) -> list[BatchSequence]:
        """Return at most `limit` of the waiting sequences, the one to try first at the front."""
        ...


class FirstCome:
    """The order of arrival."""

    def candidates(self, waiting: Iterable[BatchSequence], limit: int, manager: BlockManager) -> list[BatchSequence]:
        """Return the waiting sequences to try to admit in this step, the first one first.

        Args:
            waiting: all that wait, by arrival.
            limit: of the result's length.
            manager: tells orders which blocks are cached.
        """
        return list(islice(waiting, limit))


class Queues:
    """The sequences of one engine, and the pool of blocks that they share.

    Args:
        num_blocks, block_size, enable_prefix_caching: the pool of blocks.
        max_num_seqs: sequences that run at the same time.
        max_num_penalty_seqs: how many of these may have penalties; None means all.
        block_manager_class: manages the pool.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        max_num_seqs: int,
        max_num_penalty_seqs: int | None = None,
        block_manager_class: type[BlockManager] = BlockManager,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self._num_table_slots = min(max_num_penalty_seqs or max_num_seqs, max_num_seqs)
        self._new_pool = partial(block_manager_class, num_blocks, block_size, enable_prefix_caching)
        self._next_request_id = 0
        self._unfinished: dict[int, BatchSequence] = {}
        self._start_empty()

    def _start_empty(self) -> None:
        self.block_manager = self._new_pool()
        # All three are sorted by arrival. The first may be long and changes near its front; a deque does not move the
        # rest.
        self.waiting: deque[BatchSequence] = deque()
        self.prefilling: list[BatchSequence] = []
        self.decoding: list[BatchSequence] = []
        # The first batch slots have a row in the sampler's table of counts, which penalties read.
        self._free_table_slots = list(range(self._num_table_slots - 1, -1, -1))
        self._free_plain_slots = list(range(self.max_num_seqs - 1, self._num_table_slots - 1, -1))
        # Waiting sequences that did not fit, and nothing has come free since. A step that would consider only these
        # considers none.
        self._refused: set[BatchSequence] = set()
        self._scored: set[Sequence] = set()  # in no queue, and hold blocks
        self._unscored: dict[Sequence, int] = {}  # found too few blocks; the requests that were admitted since

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.block_manager.capacity

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_table_slots or self._free_plain_slots)

    def free_slots_for(self, sequence: BatchSequence) -> list[int]:
        """Return the free batch slots to choose from. Slots with a row of counts are spared for penalties."""
        if sequence.request.params.needs_penalties or not self._free_plain_slots:
            return self._free_table_slots
        return self._free_plain_slots

    def free_slots_like(self, batch_slot: int) -> list[int]:
        """Return the list of free batch slots that `batch_slot` belongs to when it is free."""
        return self._free_table_slots if batch_slot < self._num_table_slots else self._free_plain_slots

    @property
    def unfinished(self) -> list[BatchSequence]:
        """All waiting and running sequences, by arrival."""
        return list(self._unfinished.values())

    def find(self, request_id: int) -> BatchSequence | None:
        return self._unfinished.get(request_id)

    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def add(self, sequence: BatchSequence) -> None:
        """Queue a sequence whose prompt was checked. Its last token is never read, so it needs no slot."""
        if sequence.max_total_tokens > self.capacity + 1:
            raise ValueError(f"{sequence.max_total_tokens} tokens could outgrow a pool of {self.capacity}")
        sequence.request_id = self._next_request_id
        self._next_request_id += 1
        self._unfinished[sequence.request_id] = sequence
        if len(self._refused) >= LOOKAHEAD:  # the new sequence may be tried first: make the next step look again
            self._refused.pop()
        self.waiting.append(sequence)

    def remove(self, sequence: BatchSequence) -> None:
        """Remove a sequence, finished or aborted, from its queue. A second call is a no-op.

        Its full blocks stay in the prefix cache: the next turn of a conversation starts with this text.
        """
        if sequence.state is State.FINISHED:
            return
        queue = getattr(self, sequence.state.value)  # the queues have the states' names
        i = bisect_left(queue, sequence.request_id, key=by_arrival)
        if i < len(queue) and queue[i] is sequence:  # an interrupt may have kept it out of the queue as it arrived
            del queue[i]
        self.block_manager.index_computed(sequence)
        self._vacate(sequence)
        sequence.state = State.FINISHED
        del self._unfinished[sequence.request_id]

    def forget(self) -> None:
        """Restart with an empty pool after a step that broke off; every request waits again and keeps its tokens.

        The contents of the blocks are unknown then, and an interrupt may have come between any two lines, so the
        bookkeeping is not repaired but started again. Steps scheduled before are invalid. May be called twice.
        """
        for scored in self._scored:
            scored.block_table, scored.num_computed_tokens = [], 0
        self._start_empty()
        for sequence in self.unfinished:
            sequence.highest_computed = max(sequence.highest_computed, sequence.num_computed_tokens)
            sequence.block_table = []
            sequence.num_computed_tokens = sequence.num_indexed_blocks = sequence.num_in_flight = 0
            sequence.batch_slot, sequence.state = -1, State.WAITING
            self.waiting.append(sequence)

    def check_idle(self) -> None:
        """Check that every block is free when nothing runs or waits, so that a leak is found where it happened."""
        used = self.block_manager.num_used
        if used and not self._scored:
            raise RuntimeError(f"the engine is idle but {used} blocks of KV cache are in use")

    def note_room(self, batch_slot: int = -1) -> None:
        """Let the next step try sequences again that did not fit: blocks came free, or the watermark is lower.

        Everything that frees what a waiting sequence may need calls this.

        Args:
            batch_slot: one that came free too; -1 for none.
        """
        if batch_slot >= 0:
            self.free_slots_like(batch_slot).append(batch_slot)
        self._refused.clear()

    def _vacate(self, sequence: BatchSequence) -> None:
        self.block_manager.free(sequence)
        batch_slot, sequence.batch_slot = sequence.batch_slot, -1
        self.note_room(batch_slot)
