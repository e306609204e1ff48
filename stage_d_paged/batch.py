"""Sequences laid out for one step of the model: a flat batch.

`[A A A A A B B C]`: five tokens of A's prefill, two of B's, the one new token of C. For each token the batch says which
position it has (for the rotary embedding) and which slot of the pool its K and V go to; for each sequence, where its
tokens begin, how many keys the last of them sees, and in which pages these lie.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.sequence import Sequence


class Chunk(NamedTuple):
    """Tokens `start` … `start + count - 1` of a sequence, to be run in one step."""

    sequence: Sequence
    start: int
    count: int


@dataclass(frozen=True)
class FlatBatch:
    """One step's input, on the device."""

    input_ids: Tensor  # [tokens], int64
    positions: Tensor  # [tokens], int64
    last_rows: Tensor  # [live sequences], int64: the row of each sequence's last token, padding left out
    metadata: AttentionMetadata


def flat_batch(chunks: Iterable[Chunk], block_size: int, device: torch.device) -> FlatBatch:
    """The chunks laid out one after another. Their pages must have been allocated.

    A finished sequence is a padding row: one token that sees no key and writes none, so that its seat stays in place.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    counts: list[int] = []
    contexts: list[int] = []
    tables: list[list[int]] = []
    last_rows: list[int] = []
    for sequence, start, count in chunks:
        counts.append(count)
        if sequence.is_finished:
            ids += [0] * count
            positions += [0] * count
            slots += [-1] * count
            contexts.append(0)
            tables.append([])
            continue
        table = sequence.block_table
        span = range(start, start + count)
        ids += sequence.token_ids[start : start + count]
        positions += span
        slots += [table[position // block_size] * block_size + position % block_size for position in span]
        contexts.append(start + count)
        tables.append(table[: -(-(start + count) // block_size)])
        last_rows.append(len(ids) - 1)
    width = max(1, *map(len, tables))

    def tensor(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    metadata = AttentionMetadata(
        cu_seqlens_q=tensor([0, *accumulate(counts)], torch.int32),
        context_lens=tensor(contexts, torch.int32),
        slot_mapping=tensor(slots),
        block_tables=tensor([table + [-1] * (width - len(table)) for table in tables], torch.int32),
        max_query_len=max(counts),
        max_context_len=max(contexts),
    )
    return FlatBatch(tensor(ids), tensor(positions), tensor(last_rows), metadata)


def largest_step(num_tokens: int, max_len: int, block_size: int, device: torch.device) -> FlatBatch:
    """A prefill of `num_tokens` in sequences of `max_len`, for measuring memory before there is a pool.

    All of it lives in page 0, so that a pool of one page is enough: the numbers are nonsense, the sizes are real.
    """
    lengths = [max_len] * (num_tokens // max_len) + ([num_tokens % max_len] if num_tokens % max_len else [])
    positions = torch.cat([torch.arange(length) for length in lengths])
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        slot_mapping=(positions % block_size).to(device),
        block_tables=torch.zeros(len(lengths), -(-max_len // block_size), dtype=torch.int32, device=device),
        max_query_len=max(lengths),
        max_context_len=max(lengths),
    )
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    return FlatBatch(ids, positions.to(device), metadata.cu_seqlens_q[1:].long() - 1, metadata)
