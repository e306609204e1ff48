"""Paged attention that reads 8-bit keys and values: `use_eight_bits` gives a backend its counterpart here."""

from __future__ import annotations

import torch

from stage_d_paged.attention import AttentionBackend


def use_eight_bits(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, head_dim: int
) -> AttentionBackend:
    """Return the backend of the same name that stores and reads `Quantized` keys and values.

    Raises:
        ValueError: there is none, as for flash-attn.
    """
    if backend.name == "reference":
        from beyond.quantization.attention.reference import QuantizedReferenceAttention

        return QuantizedReferenceAttention(device)
    if backend.name == "triton":
        from beyond.quantization.attention.triton_paged import QuantizedTritonAttention

        return QuantizedTritonAttention(device, dtype, head_dim)
    raise ValueError(f"attention_backend={backend.name!r} cannot read an 8-bit KV cache; use 'triton' or 'reference'")
