"""Break it, lab D: some answers quote a conversation that their user never had.

It happens only on a busy server, and goes away with `enable_prefix_caching=False`. The block manager of the broken
engine differs from the reference by one line. Write a test that passes with the reference and fails with the broken
one.
"""

from labs.tests.support import completion_of
from stage_d_paged.block_manager import BlockManager
from stage_d_paged.sequence import Sequence


def sequence_of(token_ids: list[int]) -> Sequence:
    """A request with this prompt."""
    return Sequence(completion_of(list(token_ids)))


def prefill(manager: BlockManager, sequence: Sequence) -> bool:
    """Give a sequence its blocks and note that its whole prompt was computed, as a step of the engine does."""
    if not manager.allocate(sequence, len(sequence)):
        return False
    sequence.num_computed_tokens = len(sequence)
    manager.index_computed(sequence)
    return True


def test_no_stranger_is_found_in_the_cache():
    """The first request ends, others take its blocks, and then the first prompt is asked again."""
    manager = BlockManager(num_blocks=2, block_size=4)
    first = sequence_of(range(9))
    assert not prefill(manager, first), "3 blocks do not fit"
    first = sequence_of(range(8))
    assert prefill(manager, first)
    manager.free(first)
    other = sequence_of(range(100, 108))
    assert prefill(manager, other), "it takes both blocks"
    manager.free(other)
    assert manager.count_cached_tokens(sequence_of([*range(8), 8])) == 0, "both blocks hold the other's tokens"
    manager.check_invariants([])
