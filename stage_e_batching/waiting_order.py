"""In which order waiting requests are looked at: first come first served, or another policy.

An order is a small object with one method. It looks at the requests that wait, and nothing else; whether a request fits
is the scheduler's business. Any order but the first lets later requests pass earlier ones, so each of them is bounded:
a request that was overtaken `MAX_OVERTAKES` times is looked at alone, until it is in.

    llm.engine.scheduler.order = ShortestFirst()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import nsmallest

from stage_d_paged.block_manager import BlockManager
from stage_e_batching.queues import MAX_OVERTAKES
from stage_e_batching.step import BatchSequence


class ByRank:
    """The lowest rank first, ties by arrival; a starving request alone."""

    def rank(self, sequence: BatchSequence, manager: BlockManager) -> float:
        raise NotImplementedError(f"{type(self).__name__} has no rank")

    def candidates(self, waiting: Iterable[BatchSequence], limit: int, manager: BlockManager) -> list[BatchSequence]:
        for sequence in waiting:
            if sequence.times_overtaken >= MAX_OVERTAKES:
                return [sequence]
        return nsmallest(limit, waiting, key=lambda sequence: self.rank(sequence, manager))


class ShortestFirst(ByRank):
    """Shortest prompt first, with ageing: the mean wait of many short requests is what one long one would cost them."""

    def rank(self, sequence: BatchSequence, manager: BlockManager) -> float:
        """Return what decides the sequence's place among those that wait."""
        return len(sequence) - 16 * sequence.times_overtaken


class Priority(ByRank):
    """By a number that the caller gives each request, the lowest first.

    Args:
        priority_of: the request's prompt -> its priority.
    """

    def __init__(self, priority_of: Callable[[list[int]], float]) -> None:
        self.priority_of = priority_of

    def rank(self, sequence: BatchSequence, manager: BlockManager) -> float:
        return self.priority_of(sequence.request.prompt_token_ids)


class LongestCachedPrefix(ByRank):
    """The request first of which the prefix cache holds most tokens, while it still does (SGLang's default order)."""

    def rank(self, sequence: BatchSequence, manager: BlockManager) -> float:
        return -manager.count_cached_tokens(sequence)
