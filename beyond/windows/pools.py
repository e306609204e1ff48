"""Two pools in the memory of one: blocks for the layers that see all tokens, and blocks for those with a window.

A block of Gemma 3 270M's one pool holds 16 tokens of 18 layers. 15 of these layers see only the last 512 tokens. So a
request of 4,096 tokens holds 256 blocks of 18 layers, although its windowed layers will read 33 of them again:

    one pool    256 blocks × 18 layers                       4,608 blocks of one layer
    two pools   256 blocks × 3 layers + 34 blocks × 15       1,278

The memory is divided once, when the engine is made. The windowed pool gets enough blocks for the windows of
`max_num_seqs` requests, but at most half of the memory; or as many as requests of `max_model_len` tokens that fill both
pools need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from stage_d_paged.kv_cache import KVCache, PoolShape


class Division(NamedTuple):
    """The blocks of the two pools."""

    full: int  # of the layers that see all tokens
    windowed: int  # of those with a window


@dataclass(frozen=True)
class Limits:
    """The numbers that limit how many windowed blocks can be used.

    Attributes:
        window: tokens that a windowed layer sees; the largest, if there are several windows.
        max_model_len, max_num_seqs, max_num_batched_tokens: the engine's.
        num_guesses: tokens that a step may run beyond the certain ones.
    """

    window: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_guesses: int = 0

    def held(self, block_size: int) -> int:
        """Return the most windowed blocks that a sequence holds in decode.

        These are the window's blocks, one that it has begun to leave, and one that is being filled (more with guesses).
        """
        return -(-(self.window + 4 * self.num_guesses) // block_size) + 2

    def of_a_step(self, block_size: int) -> int:
        """Return the blocks for the prompt tokens of a step, which are freed after it."""
        return -(-self.max_num_batched_tokens // block_size)

    def divide(self, num_blocks: int, block_size: int, full_layers: int, windowed_layers: int) -> Division:
        """Divide the memory of `num_blocks` blocks of all layers.

        The windowed pool either has enough blocks for a request's window and the prompt tokens of a step, or as many as
        the other pool, which always suffices.
        """
        longest = -(-self.max_model_len // block_size)  # blocks of a request of `max_model_len`
        window, step = min(longest, self.held(block_size)), self.of_a_step(block_size)
        memory = num_blocks * (full_layers + windowed_layers)  # in blocks of one layer
        of_all = memory - step * windowed_layers
        of_half = memory // 2 - step * windowed_layers
        fitting = of_all // (longest * full_layers + window * windowed_layers), of_half // (window * windowed_layers)
        requests = min(self.max_num_seqs, max(1, *fitting))
        windowed = min(num_blocks, step + max(self.held(block_size), requests * window))
        if windowed == num_blocks:
            return Division(num_blocks, num_blocks)
        if not full_layers:  # their blocks are numbers without memory
            return Division(self.max_num_seqs * longest, windowed)
        return Division((memory - windowed * windowed_layers) // full_layers, windowed)


class HybridKVCache:
    """A pool for each kind of layer.

    Attributes:
        num_blocks: blocks of the layers that see all tokens; the block tables list these.
        num_window_blocks: blocks of the layers with a window.
        limits: the limits by which the memory was divided.
        layers: each layer's (keys, values), as in stage D's pool, in the model's order.
    """

    def __init__(
        self, blocks: Division, pools: dict[bool, KVCache], is_windowed: tuple[bool, ...], limits: Limits
    ) -> None:
        self.num_blocks, self.num_window_blocks = blocks
        self.block_size, self.limits = pools[True].block_size, limits
        layers = {kind: iter(pool.layers) for kind, pool in pools.items()}
        self.layers = [next(layers[kind]) for kind in is_windowed]
        self.num_bytes = sum(pool.num_bytes for pool in pools.values())


@dataclass(frozen=True)
class HybridPool:
    """Makes two pools in the memory of one pool with the given number of blocks; called as `Formats.pool`.

    Args:
        one_pool: makes each of the two.
        is_windowed: for every layer of the model, whether it has a window.
        limits: determine how the memory is divided.
    """

    one_pool: Any
    is_windowed: tuple[bool, ...]
    limits: Limits

    def __call__(self, shape: PoolShape) -> HybridKVCache:
        """Make the pools. With `num_blocks` 1, each has one block: this is used to measure the memory of a step."""
        num_windowed = sum(self.is_windowed)
        layers = Division(shape.num_layers - num_windowed, num_windowed)
        blocks = self.limits.divide(shape.num_blocks, shape.block_size, *layers)
        counts = zip((False, True), layers, blocks, strict=True)  # a kind without layers has no pool
        pools = {kind: self.one_pool(PoolShape(n, of_each, *shape[2:])) for kind, n, of_each in counts if n}
        return HybridKVCache(blocks, pools, self.is_windowed, self.limits)

    def bytes_per_token(self, shape: PoolShape) -> int:
        """Return the bytes of one token's K and V in all layers, if all layers keep it."""
        return self.one_pool.bytes_per_token(shape)
