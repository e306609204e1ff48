"""Windows: a layer that sees only the last tokens frees the blocks that no later token sees.

Take blocks of 4 tokens and a window of 6. Token 13 sees the tokens 8 to 13, which are in the blocks 2 and 3. Token 14
sees 9 to 14. No token from here on sees the tokens of the blocks 0 and 1, so their memory can be another sequence's.
The block table keeps its length, because token 13 is still in entry 13 // 4 = 3. Its first two entries are empty.

`python -m beyond.windows.loop` runs one such layer over 4,000 tokens, in blocks of 16 with a window of 512, and keeps
all blocks, then those in the window. Both give what masked attention over all tokens gives. It counts blocks held.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stage_a_naive.cache import HEAD_DIM, TO_QUERY, attend, keys_and_values

LENGTH, WINDOW, BLOCK_SIZE = 4000, 512, 16  # tokens


class Pool:
    """Blocks of keys and values, `[blocks, block_size, head_dim]`, and the list of free ones."""

    def __init__(self, num_blocks: int) -> None:
        self.keys, self.values = torch.zeros(2, num_blocks, BLOCK_SIZE, HEAD_DIM)
        self.free = list(range(num_blocks))
        self.num_blocks = num_blocks


def first_visible(position: int) -> int:
    """Return the first token that the token at a position sees."""
    return max(0, position - WINDOW + 1)


def keep_all(pool: Pool, table: list[int | None], position: int) -> None:
    """Keep every block until the sequence ends."""


def give_back(pool: Pool, table: list[int | None], position: int) -> None:
    """Free the blocks that neither the token at `position` nor a later one sees."""
    for i in range(first_visible(position) // BLOCK_SIZE):
        block = table[i]
        if block is not None:
            pool.keys[block] = torch.nan  # as the next owner would write over it: nobody reads this
            pool.free.append(block)
            table[i] = None


def run(x: Tensor, pool: Pool, way: Callable) -> tuple[Tensor, list[int]]:
    """Attend with one token `x[i]` after another; returns the outputs and how many blocks were held in each step."""
    table: list[int | None] = []
    outputs, held = [], []
    for position in range(len(x)):
        way(pool, table, position)
        if position % BLOCK_SIZE == 0:
            table.append(pool.free.pop())
        slot = table[-1], position % BLOCK_SIZE
        pool.keys[slot], pool.values[slot] = (row[0] for row in keys_and_values(x[position : position + 1]))
        first = first_visible(position)
        blocks = table[first // BLOCK_SIZE :]  # the visible ones: none of them is None
        seen = slice(first % BLOCK_SIZE, first % BLOCK_SIZE + position - first + 1)
        keys, values = (cache[blocks].flatten(0, 1)[seen] for cache in (pool.keys, pool.values))
        outputs.append(attend(x[position : position + 1], keys, values))
        held.append(pool.num_blocks - len(pool.free))
    return torch.cat(outputs), held


def masked(x: Tensor) -> Tensor:
    """Compute all scores at once, and remove those of tokens that are not visible."""
    keys, values = keys_and_values(x)
    scores = x @ TO_QUERY @ keys.T / HEAD_DIM**0.5
    visible = torch.ones(len(x), len(x), dtype=torch.bool).tril().triu(1 - WINDOW)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values


def main() -> None:
    x = torch.randn(LENGTH, HEAD_DIM)
    expected, most = masked(x), []
    for way in (keep_all, give_back):
        outputs, held = run(x, Pool(-(-LENGTH // BLOCK_SIZE)), way)
        torch.testing.assert_close(outputs, expected, rtol=1e-3, atol=1e-3)
        print(f"{way.__name__}: {held[999]} blocks after 1,000 tokens, {held[-1]} after {LENGTH:,}")
        most.append(max(held))
    before, after = most
    print(f"blocks held by a sequence of {LENGTH:,} tokens: {before} → {after} [Gemma 3 270M at 32,768: 604 → 109 MB]")


if __name__ == "__main__":
    main()
