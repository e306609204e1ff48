"""The block allocator: which block of the pool holds which tokens of which sequence.

A reservation of `max_model_len` per request wastes most of its memory, because the length of an answer is not known in
advance. Blocks avoid that, like the pages of virtual memory (PagedAttention, Kwon et al. 2023, arXiv:2309.06180): the
pool is divided into blocks of `block_size` tokens; a sequence takes a block when it needs one, and its *block table*
lists them.

Blocks can also be shared. The keys and values of a token depend on that token and on everything before it, so a full
block is identified by *its whole prefix*. Each full block is entered in an index under a chained hash,

    key(block i) = xxh64(key(block i - 1) + bytes of the block's token ids),

and a new sequence follows its chain of keys through the index and takes every block that it finds. A hash is only a
hint: an entry counts as found if its token bytes are equal and its parent is the entry found one step before. By
induction this compares the whole prefix.

A block without users keeps its content and joins the free list; it can still be found until it is handed out again.
Blocks are handed out in the order in which they were freed (least recently freed first), and a sequence frees its last
block first, so that a prefix outlives its continuations. Blocks without indexed content are handed out before all
others, because that loses nothing.

No tensor is touched here: a block is a number. Cost: O(1) for a token that fits in its block, O(new blocks) otherwise.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

from stage_d_paged.sequence import Sequence, pack


@dataclass(slots=True, eq=False)
class CachedBlock:
    """Index entry: the tokens of one full block after one exact prefix, and the blocks that hold its K and V."""

    parent: CachedBlock | None  # the entry of the block before it; None for a first block
    key: int  # chained hash
    tokens: bytes
    blocks: list[int] = field(default_factory=list)  # usually one; more if equal blocks were computed at the same time


def block_key(parent_key: int, tokens: bytes) -> int:
    """Hash a block to 64 bits: its tokens and, through the parent's key, everything before them."""
    return xxhash.xxh64_intdigest(parent_key.to_bytes(8, "little") + tokens)


class BlockManager:
    """Hands out, shares, counts and takes back the `num_blocks` blocks of a pool.

    Every operation either succeeds completely or changes nothing; `free + used == num_blocks` always holds.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        enable_prefix_caching: whether sequences may share the blocks of equal prefixes.

    Raises:
        ValueError: `num_blocks` or `block_size` is below 1.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks ({num_blocks}) and block_size ({block_size}) must both be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # first = handed out next
        self._ref_counts = [0] * num_blocks
        self._contents: list[CachedBlock | None] = [None] * num_blocks
        self._index: dict[int, list[CachedBlock]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def capacity(self) -> int:
        """Number of tokens that the whole pool can hold."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Count the blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def check_prompt(self, num_tokens: int) -> None:
        """Raise `ValueError` for a prompt that is too long even for the whole pool."""
        if num_tokens > self.capacity:
            raise ValueError(
                f"{num_tokens} tokens take {self.blocks_for(num_tokens)} blocks of {self.block_size} tokens, and the "
                f"KV pool has {self.num_blocks}; shorten the prompt, or raise num_kvcache_blocks or "
                "gpu_memory_utilization"
            )

    # ---- taking and returning blocks ----------------------------------------------------------------------------

    def allocate(self, sequence: Sequence, num_tokens: int, watermark: int = 0) -> bool:
        """Give `sequence` the blocks for its first `num_tokens` tokens; False, and no change, if there are too few.

        A sequence without blocks first takes its cached prefix from the prefix cache, which sets its
        `num_computed_tokens` (and `num_cached_tokens`, if it is new). At least `watermark` blocks stay free afterwards:
        a scheduler uses this when it admits a sequence, so that running sequences can still grow.
        """
        table = sequence.block_table
        missing = self.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return True
        shared = [] if table else self._find_cached(sequence)
        fresh = max(0, missing - len(shared))
        revived = sum(self._ref_counts[block] == 0 for block in shared)
        if fresh + revived + watermark > len(self._free):
            return False
        for block in shared:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1
        if not table:
            sequence.num_indexed_blocks = len(shared)
            sequence.num_computed_tokens = len(shared) * self.block_size
            if sequence.is_new:
                sequence.num_cached_tokens = sequence.num_computed_tokens
        table += shared
        table += [self._take_block() for _ in range(fresh)]
        return True

    def append(self, sequence: Sequence) -> bool:
        """Reserve a slot for the sequence's last token (just sampled); take a new block if the last block is full."""
        return self.allocate(sequence, len(sequence))

    def free(self, sequence: Sequence) -> None:
        """Take back all blocks of a sequence (finish, abort, preemption, error). A second call does nothing."""
        table, sequence.block_table = sequence.block_table, []
        sequence.num_computed_tokens = sequence.num_indexed_blocks = 0
        for block in reversed(table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._contents[block] is None:
                    self._free.move_to_end(block, last=False)

    def _take_block(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._ref_counts[block] = 1
        return block

    # ---- prefix cache ------------------------------------------------------------------------------------------

    def is_cached(self, block: int) -> bool:
        """Return whether the index has this block, written by a running sequence or by one that has ended."""
        return self._contents[block] is not None

    def count_cached_tokens(self, sequence: Sequence) -> int:
        """Count the tokens that `allocate` would find in the cache for a sequence without blocks."""
        return len(self._find_cached(sequence)) * self.block_size

    def index_computed(self, sequence: Sequence) -> None:
        """Add the blocks filled up to `sequence.num_computed_tokens` to the prefix cache.

        Call it just before the step that computes them: other sequences in the *same* step may then share them, because
        in every layer a step stores all its K and V before it reads any. If the step fails, the index contains blocks
        that were not written: an engine then starts again with a new, empty `BlockManager`.
        """
        if not self.enable_prefix_caching:
            return
        known = min(sequence.num_computed_tokens, len(sequence.token_ids))  # a key needs known tokens
        first, end = sequence.num_indexed_blocks, known // self.block_size
        parent = self._contents[sequence.block_table[first - 1]] if first else None
        for i in range(first, end):
            block = sequence.block_table[i]
            entry = self._find_entry(sequence, i, parent)
            if entry is None:
                entry = CachedBlock(parent, *sequence.block_keys[i])
                self._index.setdefault(entry.key, []).append(entry)
            entry.blocks.append(block)
            self._contents[block] = parent = entry
            sequence.num_indexed_blocks = i + 1

    def _find_cached(self, sequence: Sequence) -> list[int]:
        """Return the blocks of the longest cached prefix. The last token is left out: it must run for its logits."""
        blocks: list[int] = []
        if not self.enable_prefix_caching:
            return blocks
        parent = None
        for i in range((len(sequence) - 1) // self.block_size):
            parent = self._find_entry(sequence, i, parent)
            if parent is None:
                break
            blocks.append(parent.blocks[0])
        return blocks

    def _find_entry(self, sequence: Sequence, i: int, parent: CachedBlock | None) -> CachedBlock | None:
        key, tokens = self._key_and_tokens(sequence, i)
        for entry in self._index.get(key, ()):
            if entry.parent is parent and entry.tokens == tokens:
                return entry
        return None

    def _key_and_tokens(self, sequence: Sequence, i: int) -> tuple[int, bytes]:
        """Return the key and the packed tokens of the full block `i`, computed once per sequence."""
        keys = sequence.block_keys
        if len(keys) <= i:
            key = keys[-1][0] if keys else 0
            packed = pack(sequence.token_ids[len(keys) * self.block_size :])  # all full blocks, and the rest
            size = 4 * self.block_size
            for start in range(0, len(packed) - size + 1, size):
                tokens = packed[start : start + size]
                key = block_key(key, tokens)
                keys.append((key, tokens))
        return keys[i]

    def _forget(self, block: int) -> None:
        """Remove a block from the index. Another block with the same content stays in it."""
        entry, self._contents[block] = self._contents[block], None
        if entry is None:
            return
        entry.blocks.remove(block)
        if not entry.blocks:
            bucket = self._index[entry.key]
            bucket.remove(entry)
            if not bucket:
                del self._index[entry.key]

    # ---- self-check --------------------------------------------------------------------------------------------

    def check_invariants(self, sequences: Iterable[Sequence] | None = None) -> None:
        """Raise `RuntimeError` if the counts are inconsistent; `sequences` must be all that hold blocks."""
        wrong = [
            f"block {block} has {count} users but {'is' if block in self._free else 'is not'} free"
            for block, count in enumerate(self._ref_counts)
            if (count == 0) != (block in self._free)
        ]
        entries = [entry for bucket in self._index.values() for entry in bucket]
        indexed = sorted(block for entry in entries for block in entry.blocks)
        if indexed != [block for block, content in enumerate(self._contents) if content is not None]:
            wrong.append("the index and the blocks disagree about what is cached")
        wrong += [f"entry {entry.key:#x} has no block" for entry in entries if not entry.blocks]
        wrong += [f"key {key:#x} has no entry" for key, bucket in self._index.items() if not bucket]
        if sequences is not None:
            found = Counter(block for sequence in sequences for block in sequence.block_table)
            wrong += [
                f"block {block}: {have} users counted, {found[block]} found"
                for block, have in enumerate(self._ref_counts)
                if have != found[block]
            ]
        if wrong:
            raise RuntimeError("block manager: " + "; ".join(wrong[:5]))
