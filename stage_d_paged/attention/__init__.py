"""Paged attention: one interface, three implementations, and the choice between them.

In earlier stages each request kept its keys and values in one long tensor. Here they are stored in *blocks* of a shared
pool, and a *block table* says which block holds which part of a sequence, exactly as an operating system's page table
does (PagedAttention, Kwon et al. 2023, arXiv:2309.06180). Attention itself is unchanged; it only finds its keys
differently.

Implementations: `reference` (plain PyTorch, any device), `triton` (our kernels), `flash` (the flash-attn package).
"""

from __future__ import annotations

import torch

from .interface import AttentionBackend, AttentionMetadata, BackendUnavailable

__all__ = ["AttentionBackend", "AttentionMetadata", "BackendUnavailable", "pick_backend"]
BACKENDS = ("auto", "reference", "triton", "flash")
# Fastest first, according to benchmarks/results/attention-h200.json: our kernels before flash-attn 2.8.3.
AUTO_ORDER = ("triton", "flash", "reference")


def pick_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, has_windows: bool = False
) -> AttentionBackend:
    """Return the backend called `name`, or for "auto" the fastest one for this device, dtype and head size.

    `has_windows` says whether some layer of the model sees only the last tokens. Raises ValueError if `name` is
    unknown, or BackendUnavailable (a ValueError) if the named backend cannot be used here. "auto" always finds one; its
    `reason` says which backends were skipped and why.
    """
    device = torch.device(device)
    if name not in BACKENDS:
        raise ValueError(f"attention_backend={name!r} is unknown; choose one of {', '.join(BACKENDS)}")
    if name != "auto":
        try:
            return _make(name, device, dtype, head_dim, has_windows)
        except BackendUnavailable as error:
            raise BackendUnavailable(f"attention_backend={name!r} cannot be used: {error}") from error
    if device.type != "cuda":
        return _make("reference", device, dtype, head_dim, has_windows)
    passed_over = []
    for candidate in AUTO_ORDER:
        try:
            backend = _make(candidate, device, dtype, head_dim, has_windows)
        except BackendUnavailable as error:
            passed_over.append(str(error))
            continue
        backend.reason = "; ".join([backend.reason, *passed_over])
        return backend
    raise AssertionError("the reference serves everywhere")


def _make(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, has_windows: bool) -> AttentionBackend:
    """Make a backend; import it only when it is needed, because Triton and flash-attn may not be installed."""
    if name == "flash":
        from .flash import FlashAttention

        return FlashAttention(device, dtype, head_dim, has_windows)
    if name == "triton":
        try:
            from .triton_paged import TritonAttention
        except ImportError as error:
            raise BackendUnavailable(f"Triton cannot be imported ({error}); pip install triton") from error
        return TritonAttention(device, dtype, head_dim)
    from .reference import ReferenceAttention

    return ReferenceAttention(device)
