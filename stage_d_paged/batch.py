"""Lay sequences out for one step of the model, as a flat batch.

`[A A A A A B B C]` has five tokens of A's prefill, two of B's, and the one new token of C. For each token the batch has
its position (for the rotary embedding) and the slot of the pool for its K and V. For each sequence it has the start of
its tokens, the number of keys that its last token sees, and the blocks that contain these keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.sequence import Sequence

TORCH_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}


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
    last_rows: Tensor  # int64 [sequences with no tokens left to run]: the row of each one's last token, to sample from
    metadata: AttentionMetadata


def flat_batch(chunks: Iterable[Chunk], block_size: int, device: torch.device) -> FlatBatch:
    """Lay the chunks out one after another. Their blocks must be allocated already.

    A finished sequence is a padding row: one token that sees no key and writes none.
    """
    sequences, starts, counts = (list(column) for column in zip(*chunks, strict=True))
    live = np.array([not sequence.is_finished for sequence in sequences])
    cu_seqlens = np.concatenate(([0], np.cumsum(counts)))
    ends = np.add(starts, counts)
    longest = int(ends[live].max(initial=1))
    tables = np.full((len(sequences), -(-longest // block_size)), -1)
    ids: list[int] = []
    for row, (sequence, start, count) in enumerate(zip(sequences, starts, counts, strict=True)):
        if live[row]:
            used = -(-(start + count) // block_size)
            tables[row, :used] = sequence.block_table[:used]
            ids += sequence.token_ids[start : start + count]
        else:
            ids += [0] * count
    owners = np.repeat(np.arange(len(sequences)), counts)  # [tokens]: the row of each token's sequence
    positions = np.where(live[owners], np.arange(len(ids)) + np.repeat(starts - cu_seqlens[:-1], counts), 0)
    slots = tables[owners, positions // block_size] * block_size + positions % block_size
    slots = np.where(live[owners], slots, -1)
    context_lens = np.where(live, ends, 0)
    nothing_left = live & (ends == [len(sequence) for sequence in sequences])
    last_rows = cu_seqlens[1:][nothing_left] - 1

    wide = [np.array(ids), positions, last_rows, slots]  # int64
    narrow = [array.astype(np.int32) for array in (cu_seqlens, context_lens, tables)]
    input_ids, positions, last_rows, slots, cu_seqlens, context_lens, tables = upload([*wide, *narrow], device)
    metadata = AttentionMetadata(
        cu_seqlens_q=cu_seqlens,
        context_lens=context_lens,
        slot_mapping=slots,
        block_tables=tables,
        max_query_len=max(counts),
        max_context_len=longest,
    )
    return FlatBatch(input_ids, positions, last_rows, metadata)


def upload(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device in one transfer; return a tensor of the same shape and dtype for each.

    Launching a copy to a GPU costs the CPU about as much for eight bytes as for a thousand. So the arrays are put into
    one buffer, and the tensors are views of its copy. The buffer is pinned, so that the CPU can continue during the
    copy. Each array starts at a multiple of 16 bytes, because Triton compiles another variant of a kernel for other
    addresses.
    """
    arrays = [np.ascontiguousarray(array) for array in arrays]
    sizes = [-(-array.nbytes // 16) * 16 for array in arrays]
    starts = list(accumulate(sizes[:-1], initial=0))
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    as_bytes = host.numpy()
    for array, start in zip(arrays, starts, strict=True):
        as_bytes[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    copied = host.to(device, non_blocking=True)
    wholes = {dtype: copied.view(TORCH_DTYPES[dtype]) for dtype in {array.dtype for array in arrays}}
    return [
        wholes[array.dtype].as_strided(
            array.shape, [stride // array.itemsize for stride in array.strides], start // array.itemsize
        )
        for array, start in zip(arrays, starts, strict=True)
    ]


def largest_step(num_tokens: int, max_len: int, block_size: int, device: torch.device) -> FlatBatch:
    """Make a prefill of `num_tokens` in sequences of `max_len`, to measure its memory before the pool exists.

    All tokens use block 0, so that a pool of one block is enough: the results are nonsense, but the sizes are real.
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
