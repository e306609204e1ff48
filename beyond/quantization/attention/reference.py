"""Attention over an 8-bit cache in plain PyTorch: dequantise the blocks in use, then stage D's reference."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from beyond.quantization.formats import Quantized, quantize_rows
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.attention.reference import ReferenceAttention


class QuantizedReferenceAttention:
    """Attention for any device, floating dtype and head size; the reference for the kernels' tests."""

    def __init__(self, device: torch.device) -> None:
        self._attention = plain = ReferenceAttention(device)
        self.name, self.reason = plain.name, plain.reason
        self.preferred_block_size, self.block_size_multiple = plain.preferred_block_size, plain.block_size_multiple

    def store(self, key: Tensor, value: Tensor, k_cache: Quantized, v_cache: Quantized, slot_mapping: Tensor) -> None:
        """Quantise each head of each token and write it, with its scale, into its slot; slot -1 writes nothing."""
        written = slot_mapping >= 0
        slots = slot_mapping[written]
        block_size = k_cache.values.shape[1]
        for rows, cache in (key, k_cache), (value, v_cache):
            values, scales = quantize_rows(rows[written], cache.values.dtype)  # [tokens, kv_heads, …]
            # As bytes: on a CPU, PyTorch cannot write rows of float8 by index.
            cache.values.view(torch.int8).flatten(0, 1).index_copy_(0, slots, values.view(torch.int8))
            cache.scales[slots // block_size, :, slots % block_size] = scales

    def attend(
        self,
        query: Tensor,
        k_cache: Quantized,
        v_cache: Quantized,
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        """Run stage D's attention on a small pool: only the blocks of this batch, in the model's dtype."""
        tables, block_size = metadata.block_tables, k_cache.values.shape[1]
        first = torch.arange(tables.shape[1], device=tables.device) * block_size  # position of each entry's block
        # Past a context's end a table may hold any number; use block 0, which exists.
        tables = tables.masked_fill(first >= metadata.context_lens[:, None], 0)
        used, tables = tables.unique(return_inverse=True)
        keys, values = (_dequantize(cache, used, query.dtype) for cache in (k_cache, v_cache))
        return self._attention.attend(query, keys, values, replace(metadata, block_tables=tables.int()), scale, window)


def _dequantize(cache: Quantized, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return some blocks in the model's dtype: `[len(blocks), block_size, kv_heads, head_dim]`."""
    values = cache.values.view(torch.int8).index_select(0, blocks).view(cache.values.dtype)
    return (values.float() * cache.scales[blocks].transpose(1, 2)[..., None]).to(dtype)
