"""Paged attention: one interface, three implementations, and the choice between them.

In earlier stages each request kept its keys and values in one long tensor. Here they are stored in *blocks* of a shared
pool, and a *block table* says which block holds which part of a sequence, exactly as an operating system's page table
does (PagedAttention, Kwon et al. 2023, arXiv:2309.06180). Attention itself is unchanged; it only finds its keys
differently.

Everything that a layer needs to know about the batch is in one `AttentionMetadata`, which is passed as an argument and
never stored in a global. A batch is flat: the tokens of all sequences one after another, with no padding between them,
so one tensor can hold a prefill of 500 tokens and a decode step of one token.

Implementations: `reference` (plain PyTorch, any device), `triton` (our kernels), `flash` (the flash-attn package).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

BACKENDS = ("auto", "reference", "triton", "flash")
# Fastest first, according to benchmarks/results/attention-h200.json: our kernels before flash-attn 2.8.3.
AUTO_ORDER = ("triton", "flash", "reference")


@dataclass(frozen=True)
class AttentionMetadata:
    """The sequence, context and slot of each token in a flat batch. All tensors are on the device of the KV pool.

    A sequence with `context_lens == 0` is padding: its output is zero, and nothing in the pool is read for it.
    """

    cu_seqlens_q: torch.Tensor  # int32 [seqs + 1]: sequence s owns tokens cu_seqlens_q[s] … cu_seqlens_q[s + 1] - 1
    context_lens: torch.Tensor  # int32 [seqs]: keys visible to the last query, including this step's
    slot_mapping: torch.Tensor  # int64 [tokens]: block_id * block_size + offset for each new K/V; -1 = write nothing
    block_tables: torch.Tensor  # int32 [seqs, max_blocks]: the block of each block_size tokens; unused = -1
    max_query_len: int  # the most queries of one sequence; 1 means that this is a pure decode step
    max_context_len: int  # an upper bound of context_lens (under a CUDA graph: the bound it was captured with)
    one_new_key: bool = (
        False  # surely: of the keys that a query of a decode step sees, the newest alone is of this step
    )

    @cached_property
    def cu_seqlens_k(self) -> torch.Tensor:
        """int32 [seqs + 1]: running sum of `context_lens`, computed once for all layers."""
        return torch.nn.functional.pad(self.context_lens.cumsum(0, dtype=torch.int32), (1, 0))


class AttentionBackend(Protocol):
    """The interface of an attention implementation."""

    name: str
    reason: str  # why this backend was chosen, in one line to print
    preferred_block_size: int
    block_size_multiple: int  # block sizes must be multiples of this

    def store(
        self,
        key: torch.Tensor,  # [tokens, kv_heads, head_dim]
        value: torch.Tensor,  # [tokens, kv_heads, head_dim]
        k_cache: Any,  # [blocks, block_size, kv_heads, head_dim]: a tensor, or an object that holds the numbers
        v_cache: Any,  # as k_cache
        slot_mapping: torch.Tensor,  # int64 [tokens]
    ) -> None:
        """Write each token's key and value into its slot of the pool; slot -1 writes nothing."""

    def attend(
        self,
        query: torch.Tensor,  # [tokens, heads, head_dim]
        k_cache: Any,  # [blocks, block_size, kv_heads, head_dim]: a tensor, or an object that holds the numbers
        v_cache: Any,  # as k_cache
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
    ) -> torch.Tensor:  # [tokens, heads, head_dim]
        """Attend causally over the blocks: query i of q with a context of L sees keys 0 … L - q + i.

        With a window it sees only the last `window` of these, including its own; earlier keys are not read.
        """
        ...


class BackendUnavailable(ValueError):
    """This implementation cannot be used here; the message says why."""


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
