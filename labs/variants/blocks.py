"""Group the pairs of a step into a fixed number of blocks, without waiting for each expert's count.

The program of the lesson asks how many tokens each expert has, and on a GPU the CPU would wait for the answer in every
layer. Here the pairs of each expert are cut into blocks of a few rows, and the last block is padded. How many blocks
there can be at most follows from the number of pairs alone; so shapes are known in advance, and a CUDA graph can hold
the step. `python -m labs.variants.blocks` computes a layer this way, compares it with the lesson's program, and prints
the cost: the rows that are computed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from beyond.experts import loop

ROWS = 4


def blocks_of(chosen: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Group the pairs of a token and an expert by expert, in blocks of `rows`.

    Args:
        chosen: the experts of each token, int64 `[tokens, per_token]`. Pair p is element p of it, row by row.
        experts: how many there are.
        rows: of a block.

    Returns:
        The pair in every row of every block, int64 `[blocks, rows]`, -1 for none; and the expert of every block, int64
        `[blocks]`, -1 for none. There are `min(pairs, experts + pairs // rows)` blocks, whatever was chosen. They are
        in the order of the experts, and the pairs of an expert keep their order, with padding only after the last one;
        blocks without a pair come last. No number is read on the host and no shape depends on one (no `tolist`,
        `nonzero`, `unique`, `bincount`).
    """
    pairs, places = chosen.flatten(), torch.arange(chosen.numel())
    blocks = torch.arange(min(len(pairs), experts + len(pairs) // rows))
    counts = (pairs[:, None] == torch.arange(experts)).sum(0)
    ends, pair_ends = ((counts + rows - 1) // rows).cumsum(0), counts.cumsum(0)  # blocks and pairs up to an expert
    order = pairs.argsort(stable=True)
    own = pairs[order]
    rank = places - (pair_ends - counts)[own]  # a pair's place among those of its expert
    row = (ends - (counts + rows - 1) // rows)[own] * rows + rank
    table = torch.full((len(blocks) * rows,), -1).scatter(0, row, order)
    of_block = torch.searchsorted(ends, blocks, right=True)
    return table.view(-1, rows), torch.where(of_block < experts, of_block, -1)


def in_blocks(x: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, int]:
    """Compute a layer by blocks; returns the outputs and how many rows were computed."""
    order, of_block = blocks_of(chosen, loop.EXPERTS, ROWS)
    gate, up, down = (matrix[of_block.clamp(min=0)] for matrix in (loop.GATE, loop.UP, loop.DOWN))
    rows = x[order.clamp(min=0) // loop.PER_TOKEN]
    products = (F.silu(rows @ gate.mT) * (rows @ up.mT)) @ down.mT
    outputs = torch.zeros(chosen.numel() + 1, loop.HIDDEN)  # padding goes into the last row
    outputs[order] = products
    return (weights[..., None] * outputs[:-1].view(*chosen.shape, loop.HIDDEN)).sum(1), order.numel()


def main() -> None:
    numbers = torch.Generator().manual_seed(2)
    for tokens in (1, 8, 64):
        x = torch.randn(tokens, loop.HIDDEN, generator=numbers)
        weights, chosen = loop.route(x)
        outputs, computed = in_blocks(x, weights, chosen)
        torch.testing.assert_close(outputs, loop.dense(x, weights, chosen)[0], rtol=1e-4, atol=1e-4)
        print(f"tokens in a step: {tokens:2}   pairs {chosen.numel():3}   rows computed {computed}")


if __name__ == "__main__":
    main()
