"""Paged attention over an 8-bit cache with our own Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from beyond.quantization.attention.triton_decode import decode
from beyond.quantization.attention.triton_prefill import prefill
from beyond.quantization.attention.triton_store import store
from beyond.quantization.formats import Quantized
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.attention.triton_paged import TritonAttention


class QuantizedTritonAttention(TritonAttention):
    """Stage D's backend with kernels that write and read 8 bits."""

    def store(self, key: Tensor, value: Tensor, k_cache: Quantized, v_cache: Quantized, slot_mapping: Tensor) -> None:
        store(key, value, k_cache, v_cache, slot_mapping)

    def attend(
        self, query: Tensor, k_cache: Quantized, v_cache: Quantized, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        tokens, seqs = query.shape[0], metadata.context_lens.shape[0]
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if metadata.max_query_len > 1:
            prefill(query, k_cache, v_cache, metadata, scale, out)
        # Where every sequence has the same number of queries, and that is not one, none is a decode.
        if metadata.max_query_len == 1 or tokens != seqs * metadata.max_query_len:
            counters = self.arrival_counters(seqs * k_cache.values.shape[2])
            decode(query, k_cache, v_cache, metadata, scale, out, counters, self.sm_count)
        return out
