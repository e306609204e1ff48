"""Paged attention that reads 8-bit keys and values; other packages call `pick_quantized_backend`."""

from __future__ import annotations

import torch

from stage_d_paged.attention import AttentionBackend, pick_backend


def pick_quantized_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, has_windows: bool = False
) -> AttentionBackend:
    """Return the backend that stage D's `pick_backend` would pick, for `Quantized` keys and values.

    Raises:
        ValueError: as in `pick_backend`; or the backend has no 8-bit version, such as flash-attn.
    """
    backend = pick_backend(name, device, dtype, head_dim, has_windows)
    if backend.name == "reference":
        from beyond.quantization.attention.reference import QuantizedReferenceAttention

        return QuantizedReferenceAttention(device)
    if backend.name == "triton":
        from beyond.quantization.attention.triton_paged import KERNELS
        from stage_d_paged.attention.triton_paged import TritonAttention

        return TritonAttention(device, dtype, head_dim, KERNELS)
    raise ValueError(f"attention_backend={backend.name!r} cannot read an 8-bit KV cache; use 'triton' or 'reference'")
