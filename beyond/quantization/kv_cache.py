"""The KV pool in 8 bits.

A scale belongs to one head of one token (of one layer, of K or of V). A block fills token by token, and any number of
sequences may share a full block. With one scale for a whole block, a token with larger numbers than the earlier ones
would force all of them to be read, rescaled, rounded a second time and written again, while other programs write to the
same block. With a scale per token, a slot is written once and never again, so prefix caching, preemption and chunked
prefill need not know about the format. A scale costs 4 bytes next to the 64 or 128 bytes of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from beyond.quantization.floor import SCALE_BYTES
from beyond.quantization.formats import Quantized
from stage_d_paged.kv_cache import KVCache, PoolShape


class QuantizedKVCache:
    """Stage D's pool in an 8-bit format, with scales.

    Args:
        pool: has dtype int8 or float8_e4m3fn.

    Attributes:
        tensor: the pool's: `[2, layers, blocks, block_size, kv_heads, head_dim]`.
        scales: float32 `[2, layers, blocks, kv_heads, block_size]`, so that the scales of a tile of keys are adjacent.
        layers: each layer's (keys, values), `Quantized`.
    """

    def __init__(self, pool: KVCache) -> None:
        self.tensor, self.num_blocks, self.block_size = pool.tensor, pool.num_blocks, pool.block_size
        _, num_layers, num_blocks, block_size, num_kv_heads, _ = pool.tensor.shape
        shape = (2, num_layers, num_blocks, num_kv_heads, block_size)
        self.scales = torch.zeros(shape, dtype=torch.float32, device=pool.tensor.device)
        self.layers = [
            tuple(Quantized(values, scales) for values, scales in zip(caches, self.scales[:, layer], strict=True))
            for layer, caches in enumerate(pool.layers)
        ]
        self.num_bytes = pool.num_bytes + self.scales.nbytes


@dataclass(frozen=True)
class QuantizedPool:
    """Makes pools in the format `stored`, for any model dtype: `Formats.pool`."""

    stored: torch.dtype

    def __call__(self, shape: PoolShape) -> QuantizedKVCache:
        return QuantizedKVCache(KVCache(shape._replace(dtype=self.stored)))

    def bytes_per_token(self, shape: PoolShape) -> int:
        """Count the bytes of one token's K and V in all layers, with their scales."""
        values = KVCache.bytes_per_token(shape._replace(dtype=self.stored))
        return values + 2 * shape.num_layers * shape.num_kv_heads * SCALE_BYTES
