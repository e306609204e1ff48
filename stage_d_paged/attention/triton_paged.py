"""Paged attention with our Triton kernels.

There are three kernels, one file each: `triton_store` (write K and V into blocks), `triton_prefill` (several queries
per sequence) and `triton_decode` (one query per sequence). For a mixed batch both attention kernels run. Each handles
its kind of sequences, and they write different rows of one output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from .interface import AttentionMetadata, BackendUnavailable
from .triton_decode import decode, decode_kernel
from .triton_prefill import prefill
from .triton_store import store

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)  # bfloat16 tensor cores, asynchronous copies to shared memory
_COUNTERS = 1 << 16  # arrival counters (sequences × KV heads) allocated in advance: 256 KiB


class Kernels(NamedTuple):
    """The functions that launch the kernels; a replacement is called like its default."""

    store: Callable[..., None] = store
    prefill: Callable[..., None] = prefill
    decode: Callable[..., None] = decode


KERNELS = Kernels()


class TritonAttention:
    """Our kernels. Float16, bfloat16 or float32; any head size up to 256; any block size."""

    name = "triton"
    # The smallest block that holds a whole tile of keys: one table lookup serves 64 keys, and Hopper's copy engine can
    # fetch the tile. Larger blocks gain nothing and waste more of each sequence's last block.
    preferred_block_size = 64
    block_size_multiple = 1

    def __init__(self, device: torch.device, dtype: torch.dtype, head_dim: int, kernels: Kernels = KERNELS) -> None:
        interpreted = not isinstance(decode_kernel, triton.JITFunction)  # TRITON_INTERPRET=1 was set before the import
        if interpreted and dtype != torch.float32:
            raise BackendUnavailable(f"Triton's interpreter is for testing in float32, not in {dtype}")
        if not interpreted and device.type != "cuda":
            raise BackendUnavailable(
                f"Triton compiles for GPUs, not for {device.type}; set TRITON_INTERPRET=1 to interpret the kernels"
            )
        if not interpreted and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
            raise BackendUnavailable(f"compute capability {torch.cuda.get_device_capability(device)} is below (8, 0)")
        if dtype not in DTYPES:
            raise BackendUnavailable(f"the Triton kernels compute in float16, bfloat16 or float32, not in {dtype}")
        if head_dim > MAX_HEAD_DIM:
            raise BackendUnavailable(f"head_dim={head_dim}: the Triton kernels take heads of up to {MAX_HEAD_DIM}")
        self.kernels = kernels
        self.reason = "our Triton kernels, interpreted" if interpreted else "our Triton kernels"
        self.sm_count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        # The splits of a sequence count their arrivals here and reset the counters to zero. They are allocated once, so
        # that no launch needs another one to clear them; all launches of a backend must be on one stream.
        self._arrival_counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: Any,
        v_cache: Any,
        slot_mapping: torch.Tensor,
    ) -> None:
        self.kernels.store(key, value, k_cache, v_cache, slot_mapping)

    def attend(
        self,
        query: torch.Tensor,
        k_cache: Any,
        v_cache: Any,
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
    ) -> torch.Tensor:
        tokens, heads, head_dim = query.shape
        seqs, kv_heads = metadata.context_lens.shape[0], k_cache.shape[2]
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads: must be a multiple of the {kv_heads} KV heads")
        if query.stride(1) != head_dim or query.stride(2) != 1:
            raise ValueError(f"query has strides {query.stride()}; a token's heads must be adjacent: {[head_dim, 1]}")
        out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
        if metadata.max_query_len > 1:
            self.kernels.prefill(query, k_cache, v_cache, metadata, scale, out, window=window)
        # If every sequence has the same number of queries, and this is not one, none is a decode.
        if metadata.max_query_len == 1 or tokens != seqs * metadata.max_query_len:
            counters = self.arrival_counters(seqs * kv_heads)
            self.kernels.decode(query, k_cache, v_cache, metadata, scale, out, counters, self.sm_count, window=window)
        return out

    def arrival_counters(self, count: int) -> torch.Tensor:
        """Return at least `count` counters, int32 zeros."""
        if count > _COUNTERS:
            return torch.zeros(count, dtype=torch.int32, device=self._arrival_counters.device)
        return self._arrival_counters
