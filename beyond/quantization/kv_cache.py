"""The pool with keys and values in 8 bits, and the runtime that makes it.

A scale belongs to one head of one token (of one layer, of K or of V). A block fills token by token, and a block that is
full may be shared by any number of sequences: with one scale for a whole block, a token that is larger than those
before it would make all of them be read, rescaled, rounded a second time and written again, while other programs write
to the same block. With a scale per token, a slot is written once and never again, so prefix caching, preemption and
chunked prefill need not know about the format. It costs 4 bytes for the 64 or 128 of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from beyond.quantization.floor import SCALE_BYTES
from beyond.quantization.formats import Quantized
from stage_d_paged.kv_cache import KVCache, kv_bytes_per_token
from stage_d_paged.runtime import Runtime


class QuantizedKVCache(KVCache):
    """Stage D's pool in an 8-bit format, with its scales.

    Attributes:
        tensor: `[2, layers, blocks, block_size, kv_heads, head_dim]`, int8 or float8_e4m3fn.
        scales: float32 `[2, layers, blocks, kv_heads, block_size]`: those that a tile of keys needs are adjacent.
        layers: each layer's (keys, values), `Quantized`.
    """

    layers: list[Any]

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype, device)
        shape = (2, num_layers, num_blocks, num_kv_heads, block_size)
        self.scales = torch.zeros(shape, dtype=torch.float32, device=device)
        self.layers = [
            tuple(Quantized(values, scales) for values, scales in zip(caches, self.scales[:, layer], strict=True))
            for layer, caches in enumerate(self.layers)
        ]

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.scales.numel() * SCALE_BYTES


@dataclass(frozen=True)
class QuantizedRuntime(Runtime):
    """A runtime whose pool is in 8 bits."""

    kv_cache_dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token on this device, with their scales."""
        config = self.model.config
        values = kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, self.kv_cache_dtype)
        return values + 2 * config.num_layers * config.num_kv_heads * SCALE_BYTES

    def make_pool(self, num_blocks: int) -> QuantizedKVCache:
        config = self.model.config
        return QuantizedKVCache(
            config.num_layers,
            num_blocks,
            self.block_size,
            config.num_kv_heads,
            config.head_dim,
            self.kv_cache_dtype,
            self.device,
        )
