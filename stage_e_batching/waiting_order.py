"""The order in which waiting requests are tried: first come first served, or another policy.

An order is a small object with one method. It sees only the waiting requests; the scheduler decides whether a request
fits. Every order but the first lets later requests overtake earlier ones, within a bound: once a request was overtaken
`MAX_OVERTAKES` times, only that request is tried until it is admitted.

    llm.engine.scheduler.order = ShortestFirst()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import nsmallest

from stage_d_paged.block_manager import BlockManager
from stage_e_batching.queues import MAX_OVERTAKES
from stage_e_batching.step import BatchSequence


class ByRank:
    """Lowest rank first, ties by arrival; a request at the limit of overtakes is the only candidate."""

    def rank(self, sequence: BatchSequence, manager: BlockManager) -> float:
        raise NotImplementedError(f"{type(self).__name__} has no rank")

    def candidates(self, waiting: Iterable[BatchSequence], limit: int, manager: BlockManager) -> list[BatchSequence]:
        for sequence in waiting:
            if sequence.times_overtaken >= MAX_OVERTAKES:
                return [sequence]
        return nsmallest(limit, waiting, key=lambda sequence: self.rank(sequence, manager))


class ShortestFirst(ByRank):
    """Shortest prompt first, with ageing. This lowers the mean wait: short requests do not wait for a long one."""

    def rank(self, sequence: BatchSequence, manager: BlockManager) -> float:
        """Return the number by which waiting sequences are sorted."""
        return len(sequence) - 16 * sequence.times_overtaken


class Priority(ByRank):
    """By a priority that the caller gives each request, lowest number first.

    Args:
        priority_of: the request's prompt -> its priority.
    """

    def __init__(self, priority_of: Callable[[list[int]], float]) -> None:
        self.priority_of = priority_of

    def rank(self, sequence: BatchSequence, manager: BlockManager) -> float:
        return self.priority_of(sequence.request.prompt_token_ids)


class LongestCachedPrefix(ByRank):
    """Longest cached prefix first, to use it before it is evicted (SGLang's default order)."""

    def rank(self, sequence: BatchSequence, manager: BlockManager) -> float:
        return -manager.count_cached_tokens(sequence)
