"""Waiting orders: which request is tried first, and that none starves."""

from __future__ import annotations

from collections import deque

import pytest
from fake_model import completion_of

from stage_a_naive.contract.params import SamplingParams
from stage_d_paged.block_manager import BlockManager
from stage_e_batching.queues import MAX_OVERTAKES, FirstCome
from stage_e_batching.scheduler import LOOKAHEAD, Scheduler
from stage_e_batching.step import BatchSequence, State
from stage_e_batching.waiting_order import LongestCachedPrefix, Priority, ShortestFirst

pytestmark = pytest.mark.fast


def waiting(*prompts: list[int]) -> deque[BatchSequence]:
    sequences = deque(BatchSequence(completion_of(prompt)) for prompt in prompts)
    for number, sequence in enumerate(sequences):
        sequence.request_id = number
    return sequences


def ids(order: FirstCome, sequences: deque[BatchSequence], limit: int = 9, manager: BlockManager | None = None) -> list:
    return [s.request_id for s in order.candidates(sequences, limit, manager or BlockManager(20, 4))]


def test_each_order_looks_at_the_waiting_in_its_own_way():
    queue = waiting(list(range(9)), [1, 2, 3], [1, 2, 3, 4, 5])
    assert ids(FirstCome(), queue) == [0, 1, 2]
    assert ids(ShortestFirst(), queue) == [1, 2, 0]
    assert ids(ShortestFirst(), queue, limit=2) == [1, 2]
    assert ids(Priority(lambda prompt: -len(prompt)), queue) == [0, 2, 1]
    queue[0].times_overtaken = 1
    assert ids(ShortestFirst(), queue) == [0, 1, 2], "one overtake is worth 16 tokens"
    queue[2].times_overtaken = MAX_OVERTAKES - 1
    assert len(ids(Priority(len), queue)) == 3
    queue[2].times_overtaken += 1
    assert ids(Priority(len), queue) == [2], "it has been overtaken as often as may be"


def test_the_longest_cached_prefix_goes_first():
    manager = BlockManager(20, 4)
    first = BatchSequence(completion_of(list(range(8))))
    assert manager.allocate(first, 8)
    first.num_computed_tokens = 8
    manager.index_computed(first)
    queue = waiting([90, 91, 92, 93, 94], [*range(8), 99], [*range(4), 98, 97, 96, 95, 94])
    assert ids(LongestCachedPrefix(), queue, manager=manager) == [1, 2, 0]


@pytest.mark.parametrize("order", [ShortestFirst(), Priority(len), LongestCachedPrefix()])
def test_nobody_starves_whatever_the_order(order):
    scheduler = Scheduler(num_blocks=100, block_size=4, max_num_seqs=2, max_num_batched_tokens=16)
    scheduler.order = order
    long = BatchSequence(completion_of(list(range(5000, 5100)), SamplingParams(max_tokens=4)))
    for number in range(200):
        for _ in range(2):
            scheduler.add(BatchSequence(completion_of([1, 2, 3, 4, 5], SamplingParams(max_tokens=3))))
        if number == 3:
            scheduler.add(long)
        step = scheduler.schedule()
        for entry in step:
            if entry.samples:
                entry.sequence.token_ids.append(7)
        for entry in step:
            if len(entry.sequence) >= entry.sequence.max_total_tokens:
                scheduler.remove(entry.sequence)
        if long.state is not State.WAITING:
            break
    assert long.state is not State.WAITING
    assert long.times_overtaken <= MAX_OVERTAKES + scheduler.max_num_seqs


@pytest.mark.parametrize("num_refused", [LOOKAHEAD - 1, LOOKAHEAD, 2 * LOOKAHEAD])
def test_a_short_request_is_looked_at_however_many_were_refused_before_it_came(num_refused):
    scheduler = Scheduler(num_blocks=100, block_size=4, max_num_seqs=8, max_num_batched_tokens=400)
    scheduler.order = ShortestFirst()
    running = BatchSequence(completion_of(list(range(300)), SamplingParams(max_tokens=4)))
    scheduler.add(running)
    scheduler.schedule()
    for number in range(1, num_refused + 1):
        scheduler.add(BatchSequence(completion_of([1000 * number + i for i in range(200)])))
    assert not scheduler.schedule().admitted
    short = BatchSequence(completion_of([1, 2, 3]))
    scheduler.add(short)
    assert scheduler.schedule().admitted == [short]
