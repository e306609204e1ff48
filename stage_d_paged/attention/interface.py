"""The interface of paged attention: what an implementation does, and the data of a batch that it reads.

Everything that a layer needs to know about the batch is in one `AttentionMetadata`, which is passed as an argument and
never stored in a global. A batch is flat: the tokens of all sequences one after another, with no padding between them,
so one tensor can hold a prefill of 500 tokens and a decode step of one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch


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
