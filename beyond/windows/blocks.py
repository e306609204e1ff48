"""Blocks of the windowed layers: which tokens each holds, and when it is freed.

Stage D's block manager is unchanged and serves the layers that see all tokens: it has the block tables and the prefix
cache. A *windowed block* belongs to one of its blocks and holds the same tokens for the windowed layers:

    block table of a sequence     [ 7  2  9  4 ]        16 tokens each, a window of 20
    windowed block of each        [ -  -  3  1 ]        those of blocks 7 and 2 have been freed

So there is no second table and no second prefix cache: a look-up that finds block 9 by its content also finds windowed
block 3, if that still exists. A windowed block that no sequence sees any more joins the free list and keeps its
content, like any block. It is lost when it, or the block that it belongs to, is allocated again. A prefix counts as
cached if all its blocks are found and those in the window of its last token have their windowed blocks.

The number of windowed blocks that a sequence needs is known: the blocks of its window. They are reserved at admission,
in addition to a step's prompt tokens, so no sequence waits for a windowed block or is preempted for one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

import numpy as np

from beyond.speculation.rows import shrink
from beyond.windows.pools import HybridKVCache
from stage_d_paged.block_manager import BlockManager
from stage_d_paged.sequence import Sequence

NONE = -1


class WindowBlocks:
    """Allocates and frees the blocks of the windowed layers.

    Args:
        kv_cache: has the number of blocks and their size.

    Attributes:
        of_block: int32 `[blocks + 1]`: the windowed block of each block, or `NONE`; the last entry is `NONE`.
    """

    def __init__(self, kv_cache: HybridKVCache) -> None:
        size, limits = kv_cache.block_size, kv_cache.limits
        self.num_full_blocks, self.num_blocks = kv_cache.num_blocks, kv_cache.num_window_blocks
        self.window, self.block_size = limits.window, size
        self._most, self._of_a_step = limits.held(size), limits.of_a_step(size)
        self.start_empty()

    def start_empty(self) -> None:
        """Forget all sequences and all content."""
        self.of_block = np.full(self.num_full_blocks + 1, NONE, np.int32)
        self._holds = [NONE] * self.num_blocks  # the block whose tokens a windowed block has
        self._users = [0] * self.num_blocks  # sequences that still see it
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))  # first = handed out next
        self._seen: dict[Sequence, range] = {}  # the entries of its block table that a sequence has windowed blocks for
        self._promised: dict[Sequence, int] = {}
        self._grown: dict[Sequence, None] = {}  # since the last step was launched

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def has_room(self, sequence: Sequence) -> bool:
        """Tell whether a sequence can be admitted while all running sequences keep enough blocks for their windows."""
        if self.num_blocks >= self.num_full_blocks:  # one for every block: they are never short
            return True
        return sum(self._promised.values()) + self._most_of(sequence) + self._of_a_step <= self.num_blocks

    def _most_of(self, sequence: Sequence) -> int:
        return min(self._most, -(-sequence.max_total_tokens // self.block_size))

    def first_seen(self, position: int) -> int:
        """Return the block-table entry of the first token that is visible at a position."""
        return max(0, position - self.window + 1) // self.block_size

    def whole_prefix(self, blocks: list[int]) -> int:
        """Count a sequence's leading blocks that can be reused: their window must have all its windowed blocks."""
        run = found = 0  # windowed blocks in a row
        for i, is_there in enumerate((self.of_block[blocks] != NONE).tolist(), 1):
            run = run + 1 if is_there else 0
            if run >= i - self.first_seen(i * self.block_size):
                found = i
        return found

    # ---- taking and returning --------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence the cached windowed blocks of its window; `has_room` must have returned True."""
        end = sequence.num_computed_tokens // self.block_size
        self._seen[sequence] = range(self.first_seen(sequence.num_computed_tokens), end)
        self._promised[sequence] = self._most_of(sequence)
        for i in self._seen[sequence]:
            block = int(self.of_block[sequence.block_table[i]])
            if not self._users[block]:
                del self._free[block]
            self._users[block] += 1

    def cover(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate windowed blocks for a running sequence's next tokens, up to `num_tokens` in all."""
        seen = self._seen[sequence]
        end = -(-num_tokens // self.block_size)
        if end <= seen.stop:
            return
        for full_block in sequence.block_table[seen.stop : end]:
            block, _ = self._free.popitem(last=False)
            if self._holds[block] != NONE:
                self.of_block[self._holds[block]] = NONE
            self._holds[block], self._users[block] = full_block, 1
            self.of_block[full_block] = block
        self._seen[sequence] = range(seen.start, end)
        self._grown[sequence] = None

    def slide(self) -> None:
        """Free blocks that no later token sees. Call it before a step's launch, once the step's tables are made.

        The device runs steps in order, so the next owner of such a block writes to it after this step has read it.
        """
        for sequence in self._grown:
            seen = self._seen[sequence]
            first = min(self.first_seen(sequence.num_computed_tokens), seen.stop)
            self._give_back(sequence.block_table[seen.start : first])
            self._seen[sequence] = range(max(seen.start, first), seen.stop)
        self._grown.clear()

    def shorten(self, sequence: Sequence, num_blocks: int) -> None:
        """Free the windowed blocks of all but the first blocks of a sequence's table."""
        seen = self._seen[sequence]
        end = min(max(num_blocks, seen.start), seen.stop)
        self._give_back(sequence.block_table[end : seen.stop])
        self._seen[sequence] = range(seen.start, end)

    def release(self, sequence: Sequence) -> None:
        """Free all windowed blocks of a sequence. A second call is a no-op."""
        if sequence in self._seen:
            self.shorten(sequence, 0)
            self._grown.pop(sequence, None)
            del self._seen[sequence], self._promised[sequence]

    def _give_back(self, full_blocks: list[int]) -> None:
        for full_block in full_blocks:  # what is farthest back is handed out first
            block = int(self.of_block[full_block])
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None

    def lose(self, full_block: int) -> None:
        """Drop the windowed block, which must be free, of a block that gets new content."""
        block = int(self.of_block[full_block])
        if block != NONE:
            self.of_block[full_block] = self._holds[block] = NONE
            self._free.move_to_end(block, last=False)

    # ---- self-check ------------------------------------------------------------------------------------------------

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise `RuntimeError` if the counts are inconsistent. `sequences`: all those that hold blocks."""
        sequences = [sequence for sequence in sequences if sequence.block_table]
        found = Counter(self.of_block[s.block_table[i]] for s in sequences for i in self._seen[s])
        wrong = [
            f"windowed block {block} has {count} users, {found[block]} found, and {'is' if free else 'is not'} free"
            for block, count in enumerate(self._users)
            if count != found[block] or (count == 0) != (free := block in self._free)
        ]
        kept = {block: full_block for block, full_block in enumerate(self._holds) if full_block != NONE}
        if kept != {int(block): i for i, block in enumerate(self.of_block) if block != NONE} or found[NONE]:
            wrong.append("blocks and windowed blocks disagree about what belongs together")
        if not set(self._seen) == set(self._promised) == set(sequences):
            wrong.append("windowed blocks are held by sequences that have no block")
        wrong += [
            f"a sequence of {s.num_computed_tokens} tokens has windowed blocks for entries {self._seen[s]}"
            for s in sequences
            if self._seen[s].start > self.first_seen(s.num_computed_tokens)
        ]
        if wrong:
            raise RuntimeError("windowed blocks: " + "; ".join(wrong[:5]))


class HybridBlockManager(BlockManager):
    """Stage D's block manager, which also allocates the windowed blocks of each sequence's window.

    Args:
        windows: the windowed blocks.
        num_blocks, block_size, enable_prefix_caching: as of `BlockManager`.
    """

    def __init__(self, windows: WindowBlocks, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self.windows = windows
        windows.start_empty()

    def allocate(self, sequence: Sequence, num_tokens: int, watermark: int = 0) -> bool:
        """Allocate as `BlockManager.allocate` does. A new sequence also needs room for its window."""
        is_new = not sequence.block_table
        if is_new and not self.windows.has_room(sequence):
            return False
        if not super().allocate(sequence, num_tokens, watermark):
            return False
        if is_new:
            self.windows.admit(sequence)  # its prompt's windowed blocks come with each chunk: see `index_computed`
        else:
            self.windows.cover(sequence, num_tokens)
        return True

    def index_computed(self, sequence: Sequence) -> None:
        """Index as `BlockManager.index_computed` does, after allocating windowed blocks for the next tokens."""
        if sequence.block_table:
            self.windows.cover(sequence, sequence.num_computed_tokens)
        super().index_computed(sequence)

    def free(self, sequence: Sequence) -> None:
        self.windows.release(sequence)
        super().free(sequence)

    def shrink(self, sequence: Sequence) -> None:
        """Free the blocks past a sequence's computed tokens: those of wrong guesses."""
        if len(sequence.block_table) > (num_blocks := self.blocks_for(sequence.num_computed_tokens)):
            self.windows.shorten(sequence, num_blocks)
            shrink(self, sequence)

    def check_invariants(self, sequences: Iterable[Sequence] | None = None) -> None:
        sequences = None if sequences is None else list(sequences)
        super().check_invariants(sequences)
        if sequences is not None:
            self.windows.check_invariants(sequences)

    def _take_block(self) -> int:
        block = super()._take_block()
        self.windows.lose(block)
        return block

    def _find_cached(self, sequence: Sequence) -> list[int]:
        """Find the longest cached prefix with a complete window; of equal blocks, prefer one with a windowed block."""
        blocks = [self._with_window(block) for block in super()._find_cached(sequence)]
        return blocks[: self.windows.whole_prefix(blocks)] if blocks else []

    def _with_window(self, block: int) -> int:
        entry = self._contents[block]
        twins = entry.blocks if entry is not None else [block]
        return next((twin for twin in twins if self.windows.of_block[twin] != NONE), block)
