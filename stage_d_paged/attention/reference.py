"""Paged attention in plain PyTorch: the reference for tests of the kernels, and the implementation on a CPU.

Every sequence's blocks are gathered into one contiguous tensor, and PyTorch's `scaled_dot_product_attention` does the
rest. The gather copies the whole context, which a real kernel never does; this copy is the cost of simplicity.

All sequences of a decode step are computed together. With one query per sequence, the `group` query heads that share a
KV head see the same keys, so they become the query axis: one [group, head_dim] by [head_dim, context] product per KV
head instead of `group` separate vector products, without repeating keys and values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .interface import AttentionMetadata


class ReferenceAttention:
    """Gathers the blocks and calls PyTorch's attention. Any device, any floating dtype, any head size."""

    name = "reference"
    preferred_block_size = 16  # a gather copies row by row: small blocks are as fast and waste least
    block_size_multiple = 1

    def __init__(self, device: torch.device) -> None:
        self.reason = f"plain PyTorch serves any device, here {device.type}"

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        store(key, value, k_cache, v_cache, slot_mapping)

    def attend(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
    ) -> torch.Tensor:
        if metadata.max_query_len == 1:
            caches, contexts, tables = (k_cache, v_cache), metadata.context_lens, metadata.block_tables
            return _decode(query, *_last_keys(*caches, contexts, tables, window), scale)
        starts = metadata.cu_seqlens_q.tolist()
        query_lens = [end - start for start, end in zip(starts, starts[1:], strict=False)]
        output = torch.zeros_like(query)
        decodes = [s for s, length in enumerate(query_lens) if length == 1]
        if decodes:
            rows = metadata.cu_seqlens_q[decodes].long()
            contexts, tables = metadata.context_lens[decodes], metadata.block_tables[decodes]
            output[rows] = _decode(query[rows], *_last_keys(k_cache, v_cache, contexts, tables, window), scale)
        for s, context_len in enumerate(metadata.context_lens.tolist()):
            if query_lens[s] > 1 and context_len > 0:
                chunk = slice(starts[s], starts[s + 1])
                table = metadata.block_tables[s]
                output[chunk] = _prefill(query[chunk], k_cache, v_cache, context_len, table, scale, window)
        return output


def store(
    key: torch.Tensor,  # [tokens, kv_heads, head_dim]
    value: torch.Tensor,  # [tokens, kv_heads, head_dim]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, head_dim]
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,  # int64 [tokens]
) -> None:
    """Copy row t of `key` and `value` to slot `slot_mapping[t]`; -1 copies nothing."""
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    k_cache.flatten(0, 1).index_copy_(0, slots, key[written])
    v_cache.flatten(0, 1).index_copy_(0, slots, value[written])


def _prefill(
    query: torch.Tensor,  # [query_len, heads, head_dim]
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: int,
    block_table: torch.Tensor,  # [max_blocks]
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Attend with a chunk of one sequence's queries, the last of its `context_len` positions, to their keys."""
    query_len, block_size = query.shape[0], k_cache.shape[1]
    unseen = (
        max(context_len - query_len + 1 - window, 0) // block_size if window else 0
    )  # blocks, by any of the queries
    blocks = block_table[unseen : -(-context_len // block_size)]
    context_len -= unseen * block_size
    keys = k_cache.index_select(0, blocks).flatten(0, 1)[:context_len]  # [context, kv_heads, head_dim]
    values = v_cache.index_select(0, blocks).flatten(0, 1)[:context_len]
    mask = None
    if query_len != context_len or window:
        # Causal with a cached prefix: the diagonal ends in the lower right corner.
        mask = torch.ones(query_len, context_len, dtype=torch.bool, device=query.device).tril(context_len - query_len)
        mask = mask.triu(context_len - query_len + 1 - window) if window else mask
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],  # [1, heads, query_len, head_dim]
        keys.transpose(0, 1)[None],  # [1, kv_heads, context, head_dim]
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return output[0].transpose(0, 1)


def _last_keys(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_lens: torch.Tensor,  # [seqs]
    block_tables: torch.Tensor,  # [seqs, max_blocks]
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return caches, lengths and tables for only the last `window` keys of each sequence, as blocks of one key."""
    if not window:
        return k_cache, v_cache, context_lens, block_tables
    block_size = k_cache.shape[1]
    first = (context_lens - window).clamp(min=0)
    positions = first[:, None] + torch.arange(window, device=context_lens.device)
    positions = torch.minimum(positions, (context_lens[:, None] - 1).clamp(min=0))  # past the end: not read
    slots = block_tables.gather(1, (positions // block_size).long()) * block_size + positions % block_size
    return k_cache.flatten(0, 1)[:, None], v_cache.flatten(0, 1)[:, None], context_lens - first, slots


def _decode(
    query: torch.Tensor,  # [seqs, heads, head_dim]
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_lens: torch.Tensor,  # [seqs]
    block_tables: torch.Tensor,  # [seqs, max_blocks]
    scale: float,
) -> torch.Tensor:
    """Attend with one query per sequence, all sequences at once, padded to the longest context."""
    seqs, heads, head_dim = query.shape
    block_size, kv_heads = k_cache.shape[1:3]
    longest = max(int(context_lens.max()), 1)
    positions = torch.arange(longest, device=query.device)
    # Positions past its end repeat a sequence's last slot, so that uninitialised memory (perhaps NaN) is never read.
    readable = torch.minimum(positions, (context_lens[:, None] - 1).clamp(min=0))  # [seqs, longest]
    # A sequence without context (padding) may have any ids in its table, and reads block 0.
    blocks = block_tables.gather(1, readable // block_size).masked_fill((context_lens == 0)[:, None], 0)
    slots = (blocks.long() * block_size + readable % block_size).flatten()
    # index_select, because on a CPU it is several times as fast as keys[slots]: it copies whole rows.
    keys = k_cache.flatten(0, 1).index_select(0, slots).view(seqs, longest, kv_heads, head_dim)
    values = v_cache.flatten(0, 1).index_select(0, slots).view(seqs, longest, kv_heads, head_dim)
    output = F.scaled_dot_product_attention(
        query.view(seqs, kv_heads, heads // kv_heads, head_dim),  # the group of heads is the query axis
        keys.transpose(1, 2),  # [seqs, kv_heads, longest, head_dim]
        values.transpose(1, 2),
        attn_mask=(positions < context_lens[:, None])[:, None, None],  # [seqs, 1, 1, longest]
        scale=scale,
    )
    return output.reshape(seqs, heads, head_dim).masked_fill((context_lens == 0)[:, None, None], 0)
