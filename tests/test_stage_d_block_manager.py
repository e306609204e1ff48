"""The block allocator: sharing, eviction, reference counts, and consistent counts in any order of operations."""

from __future__ import annotations

import pytest
from examples import examples
from fake_model import completion_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stage_d_paged.block_manager import BlockManager
from stage_d_paged.kv_cache import memory_report
from stage_d_paged.sequence import Sequence, pack

pytestmark = pytest.mark.fast


def make(tokens: list[int]) -> Sequence:
    return Sequence(completion_of(tokens))


def admit(manager: BlockManager, tokens: list[int]) -> Sequence:
    """A sequence whose tokens have all been computed."""
    sequence = make(tokens)
    assert manager.allocate(sequence, len(sequence))
    run(manager, sequence)
    return sequence


def run(manager: BlockManager, sequence: Sequence) -> None:
    sequence.num_computed_tokens = len(sequence)
    manager.index_computed(sequence)


CACHED = {  # blocks of the pool, tokens of a block, what has ended, what runs, a prompt, how much of it is cached
    "a full block outlives its sequence": (3, 4, [range(6)], [], range(6), 4),
    "until it is handed out again": (3, 4, [range(6)], [range(50, 62)], range(6), 0),
    "the last block is computed again": (10, 4, [range(8)], [], range(8), 4),
    "a running sequence shares its full blocks": (10, 4, [], [range(10)], [*range(10), 77], 8),
    "blocks that were never used go first": (4, 2, [[1, 2], [3, 4]], [[9] * 3], [1, 2, 0], 2),
    "then the one that was freed first": (4, 2, [[1, 2], [3, 4]], [[9] * 5], [1, 2, 0], 0),
    "and no other": (4, 2, [[1, 2], [3, 4]], [[9] * 5], [3, 4, 0], 2),
    "a part of a block goes before full ones": (3, 4, [[1, 2, 3, 4], [5, 6]], [range(50, 58)], [1, 2, 3, 4, 9], 4),
    "a prefix outlives its continuation": (4, 2, [range(1, 9)], [[9, 9, 9]], range(1, 9), 4),
    "equal blocks after different prefixes differ": (9, 2, [], [[1, 1, 5, 6], [2, 2, 7, 8]], [2, 2, 5, 6, 0], 2),
}


@pytest.mark.parametrize(("blocks", "size", "ended", "running", "prompt", "cached"), CACHED.values(), ids=CACHED)
def test_what_of_a_prompt_is_cached(blocks: int, size: int, ended: list, running: list, prompt: list, cached: int):
    manager = BlockManager(blocks, size)
    for tokens in ended:
        manager.free(admit(manager, list(tokens)))
    live = [admit(manager, list(tokens)) for tokens in running]
    sequence = make(list(prompt))
    assert manager.count_cached_tokens(sequence) == cached
    if manager.allocate(sequence, len(sequence)):
        assert sequence.num_cached_tokens == sequence.num_computed_tokens == cached
    manager.check_invariants([*live, sequence])


def test_the_prefix_cache_can_be_switched_off():
    manager = BlockManager(10, 4, enable_prefix_caching=False)
    admit(manager, list(range(9)))
    second = admit(manager, list(range(9)))
    assert second.num_cached_tokens == 0 and manager.num_used == 6


def test_the_watermark_keeps_blocks_free_and_revived_blocks_count_as_taken_from_them():
    manager = BlockManager(4, 4)
    assert not manager.allocate(make([1] * 12), 12, watermark=2)
    manager.free(admit(manager, list(range(8))))
    assert not manager.allocate(make([*range(8), 99]), 9, watermark=2)
    sequence = make([*range(8), 99])
    assert manager.allocate(sequence, 9, watermark=1)
    assert manager.allocate(sequence, 12, watermark=2), "it has room for these"


def test_the_live_twin_of_an_evicted_block_stays_findable():
    manager = BlockManager(3, 4)
    first, second = make([1, 2, 3, 4]), make([1, 2, 3, 4])
    for sequence in (first, second):  # side by side, so that neither finds the other
        assert manager.allocate(sequence, 4)
    for sequence in (first, second):
        run(manager, sequence)
    assert first.block_table != second.block_table
    manager.free(first)
    evictor = make([7] * 8)
    assert manager.allocate(evictor, 8)
    third = make([1, 2, 3, 4, 5])
    assert manager.count_cached_tokens(third) == 4
    manager.check_invariants([second, evictor])


def test_a_hash_collision_is_not_a_hit():
    def colliding(tokens: list[int]) -> Sequence:
        sequence = make(tokens)
        sequence.block_keys = [(42, pack(tokens[i : i + 2])) for i in range(0, len(tokens) - 1, 2)]
        return sequence

    manager = BlockManager(20, 2)
    for tokens in ([1, 1, 5, 6], [2, 2, 7, 8]):
        sequence = colliding(tokens)
        assert manager.allocate(sequence, 4)
        run(manager, sequence)
    assert manager.count_cached_tokens(colliding([1, 1, 5, 6, 0])) == 4
    assert manager.count_cached_tokens(colliding([2, 2, 5, 6, 0])) == 2  # the prefix decides, not the tokens alone
    assert manager.count_cached_tokens(colliding([3, 3, 5, 6, 0])) == 0


def test_generated_tokens_are_cached_too():
    manager = BlockManager(10, 4)
    sequence = admit(manager, [1, 2, 3])
    for token in (4, 5, 6, 7, 8):
        sequence.token_ids.append(token)
        assert manager.append(sequence)
        run(manager, sequence)
    manager.free(sequence)
    assert manager.count_cached_tokens(make([1, 2, 3, 4, 9])) == 4
    assert manager.count_cached_tokens(make([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 8
    manager.index_computed(sequence)  # it has no blocks any more


def test_the_invariants_notice_a_leaked_block():
    manager = BlockManager(4, 4)
    sequence = admit(manager, [1] * 6)
    sequence.block_table.pop()
    with pytest.raises(RuntimeError, match="users counted"):
        manager.check_invariants([sequence])


def test_the_memory_report_counts_a_shared_block_once():
    manager = BlockManager(10, 4)
    sequences = [admit(manager, list(range(6))), admit(manager, [0, 1, 2, 3, 9])]
    held = [(len(sequence), sequence.block_table) for sequence in sequences]
    report = memory_report(held, block_size=4, max_model_len=20, bytes_per_token=8)
    assert (report.tokens, report.stored_tokens, report.blocks) == (11, 7, 3)
    assert report.block_waste == pytest.approx(1 - 7 / 12)
    assert report.reservation_waste == pytest.approx(1 - 11 / 40)
    assert (report.block_bytes, report.reserved_bytes) == (96, 320)
    assert "3 blocks of 4" in str(report)
    report = memory_report([(3, [0, 1, 2])], block_size=4, max_model_len=20, bytes_per_token=8)
    assert (report.stored_tokens, report.blocks) == (3, 3), "two blocks are empty still"


class BlockManagerMachine(RuleBasedStateMachine):
    """Any order of allocate, append, share, free and evict, on a pool that is always too small.

    A model of the pool's *content* runs along with the manager: what a computed token would have written is a function
    of its whole prefix. A sequence whose blocks contain anything other than its own prefix has wrong blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(8, 3)
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> prefix up to that token
        self.live: list[Sequence] = []

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        for position in range(start, end):
            slot = sequence.block_table[position // 3], position % 3
            self.content[slot] = tuple(sequence.token_ids[: position + 1])

    def compute(self, sequence: Sequence, count: int) -> None:
        """One step: index, run, as an engine does."""
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens += count
        self.manager.index_computed(sequence)
        self.write(sequence, start, start + count)

    def drop(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        self.manager.free(sequence)
        self.manager.free(sequence)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        watermark=st.integers(0, 2),
        part=st.integers(1, 14),
    )
    def admit(self, tokens: list[int], watermark: int, part: int) -> None:
        sequence = make(tokens)
        free = self.manager.num_free
        if self.manager.allocate(sequence, len(sequence), watermark):
            self.live.append(sequence)
            assert sequence.num_uncomputed_tokens >= 1
            assert self.manager.num_free >= watermark
            self.compute(sequence, min(part, sequence.num_uncomputed_tokens))
        else:
            assert not sequence.block_table and self.manager.num_free == free

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def advance(self, data: st.DataObject, token: int) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        if sequence.num_uncomputed_tokens == 0:
            sequence.token_ids.append(token)
            if not self.manager.append(sequence):
                self.drop(sequence)
                return
        self.compute(sequence, data.draw(st.integers(1, sequence.num_uncomputed_tokens)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(self.live)))

    @invariant()
    def books_balance(self) -> None:
        self.manager.check_invariants(self.live)
        assert self.manager.num_free + self.manager.num_used == 8

    @invariant()
    def everyone_reads_their_own_prefix(self) -> None:
        for sequence in self.live:
            for position in range(sequence.num_computed_tokens):
                slot = sequence.block_table[position // 3], position % 3
                assert self.content[slot] == tuple(sequence.token_ids[: position + 1])


TestBlockManagerInAnyOrder = BlockManagerMachine.TestCase
TestBlockManagerInAnyOrder.settings = examples(20, stateful_step_count=40)
