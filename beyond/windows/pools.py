"""Two pools in the memory of one: blocks for the layers that see everything, and blocks for those with a window.

A block of Gemma 3 270M's one pool holds 16 tokens of 18 layers. 15 of these layers see only the last 512 tokens. So a
request of 4,096 tokens holds 256 blocks of 18 layers, although its windowed layers will read 33 of them again:

    one pool    256 blocks × 18 layers                       4,608 blocks of one layer
    two pools   256 blocks × 3 layers + 34 blocks × 15       1,278

The memory is divided once, when the engine is made. The windowed pool gets what the windows of `max_num_seqs` requests
take, but no more than half of the memory; or what requests of `max_model_len` tokens need of it that fill both pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from stage_d_paged.kv_cache import KVCache


class Division(NamedTuple):
    """The blocks of the two pools."""

    full: int  # of the layers that see all tokens
    windowed: int  # of those with a window


@dataclass(frozen=True)
class Limits:
    """What decides how many windowed blocks are of use.

    Attributes:
        window: tokens that a windowed layer sees; of several windows, the largest.
        max_model_len, max_num_seqs, max_num_batched_tokens: the engine's.
        num_guesses: tokens that a step may run ahead of those that are certain.
    """

    window: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_guesses: int = 0

    def held(self, block_size: int) -> int:
        """Count the windowed blocks that a sequence holds at most in decode.

        The window's own, one that it has begun to leave, and one that is being filled, or more for guesses.
        """
        return -(-(self.window + 4 * self.num_guesses) // block_size) + 2

    def of_a_step(self, block_size: int) -> int:
        """Count the blocks of the prompt tokens of a step, which are given back after it."""
        return -(-self.max_num_batched_tokens // block_size)

    def divide(self, num_blocks: int, block_size: int, full_layers: int, windowed_layers: int) -> Division:
        """Divide the memory of `num_blocks` blocks of all layers.

        Either there are windowed blocks for a request with its window, beside the prompt tokens of a step, or as many
        as of the other layers, which is enough for whatever these hold.
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
        num_blocks: of the layers that see all tokens; these blocks are in the block tables.
        num_window_blocks: of the layers with a window.
        limits: by which they were counted.
        layers: each layer's (keys, values), as in stage D's pool, in the model's order.
    """

    def __init__(self, full: KVCache, windowed: KVCache, is_windowed: tuple[bool, ...], limits: Limits) -> None:
        self.num_blocks, self.num_window_blocks = full.num_blocks, windowed.num_blocks
        self.block_size, self.limits = full.block_size, limits
        pools = {False: iter(full.layers), True: iter(windowed.layers)}
        self.layers = [next(pools[kind]) for kind in is_windowed]
        self.num_bytes = full.num_bytes + windowed.num_bytes


@dataclass(frozen=True)
class HybridPool:
    """Makes two pools in the memory that one pool of as many blocks takes; made and called as `Formats.pool`.

    Args:
        one_pool: makes each of them.
        is_windowed: of every layer of the model, whether it has a window.
        limits: by which the memory is divided.
    """

    one_pool: Any
    is_windowed: tuple[bool, ...]
    limits: Limits

    def __call__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Any:
        """Make the pools; one block alone, in which the memory of a step is measured, is not divided."""
        shape = block_size, num_kv_heads, head_dim, dtype, device
        if num_blocks == 1:
            return self.one_pool(num_layers, 1, *shape)
        num_windowed = sum(self.is_windowed)
        layers = Division(num_layers - num_windowed, num_windowed)
        blocks = self.limits.divide(num_blocks, block_size, *layers)
        full, windowed = (self.one_pool(*counts, *shape) for counts in zip(layers, blocks, strict=True))
        return HybridKVCache(full, windowed, self.is_windowed, self.limits)

    def bytes_per_token(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Count the bytes of one token's K and V in all layers, if all of them keep it."""
        return self.one_pool.bytes_per_token(num_layers, num_kv_heads, head_dim, dtype)
