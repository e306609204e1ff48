"""From a scheduled step to the model's input, in one piece of memory.

A step's input is eleven arrays. Built one by one from Python lists they would cost a loop over the requests each, and
eleven copies to the GPU, each of which costs more to order than to carry out. Here

* what a request brings with it (its block table, its prompt's length) lies in numpy tables with a row for each *seat*.
  A seat is filled when a sequence is admitted, and its row grows only when the sequence gets a page;
* a step gathers the rows of its sequences with whole-array operations;
* all arrays lie side by side in one pinned buffer, which goes to the device in one copy. Where each array lies
  follows from a handful of sizes (`StepShape`), so the other side, a GPU or another process, needs no more than those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stage_d_paged.attention import AttentionMetadata
from stage_e_batching.step import ScheduledStep


@dataclass(frozen=True)
class StepShape:
    """The sizes of a step: they determine the layout of its input."""

    num_tokens: int
    num_seqs: int
    num_samples: int
    table_width: int
    num_decodes: int
    max_query_len: int
    max_context_len: int

    @property
    def wide_sizes(self) -> tuple[int, ...]:
        """Lengths of the int64 arrays: input_ids, positions, slot_mapping, seats, sample_seats, sample_tokens."""
        return (self.num_tokens,) * 3 + (self.num_seqs, self.num_samples, self.num_samples)

    @property
    def narrow_sizes(self) -> tuple[int, ...]:
        """Lengths of the 32-bit arrays: cu_seqlens_q, context_lens, temperatures, noise_keys, block_tables."""
        samples = self.num_samples
        return (self.num_seqs + 1, self.num_seqs, samples, samples, self.num_seqs * self.table_width)

    @property
    def num_bytes(self) -> int:
        return 8 * sum(self.wide_sizes) + 4 * sum(self.narrow_sizes)


class StepInput(NamedTuple):
    """A step's arrays, as views of one buffer. On the host they are numpy arrays, on the device tensors."""

    input_ids: Tensor  # int64 [tokens]; those of decodes are filled in on the device
    positions: Tensor  # int64 [tokens]
    slot_mapping: Tensor  # int64 [tokens]
    seats: Tensor  # int64 [seqs]
    sample_seats: Tensor  # int64 [samples]
    sample_tokens: Tensor  # int64 [samples]: the place, among the tokens, of each sampling sequence's last one
    cu_seqlens_q: Tensor  # int32 [seqs + 1]
    context_lens: Tensor  # int32 [seqs]
    temperatures: Tensor  # float32 [samples]
    noise_keys: Tensor  # int32 [samples], the bits of an unsigned number
    block_tables: Tensor  # int32 [seqs, width]


def host_views(buffer: np.ndarray, shape: StepShape) -> StepInput:
    """The arrays inside a byte buffer of `shape.num_bytes` or more."""
    split = 8 * sum(shape.wide_sizes)
    wide = np.split(buffer[:split].view(np.int64), np.cumsum(shape.wide_sizes)[:-1])
    narrow = np.split(buffer[split : shape.num_bytes].view(np.int32), np.cumsum(shape.narrow_sizes)[:-1])
    cu_seqlens_q, context_lens, temperatures, noise_keys, tables = narrow
    tables = tables.reshape(shape.num_seqs, shape.table_width)
    return StepInput(*wide, cu_seqlens_q, context_lens, temperatures.view(np.float32), noise_keys, tables)


def device_views(buffer: Tensor, shape: StepShape) -> StepInput:
    """The same as tensors."""
    split = 8 * sum(shape.wide_sizes)
    wide = buffer[:split].view(torch.int64).split(shape.wide_sizes)
    narrow = buffer[split : shape.num_bytes].view(torch.int32).split(shape.narrow_sizes)
    cu_seqlens_q, context_lens, temperatures, noise_keys, tables = narrow
    tables = tables.view(shape.num_seqs, shape.table_width)
    return StepInput(*wide, cu_seqlens_q, context_lens, temperatures.view(torch.float32), noise_keys, tables)


def attention_metadata(inputs: StepInput, shape: StepShape) -> AttentionMetadata:
    return AttentionMetadata(
        cu_seqlens_q=inputs.cu_seqlens_q,
        context_lens=inputs.context_lens,
        slot_mapping=inputs.slot_mapping,
        block_tables=inputs.block_tables,
        max_query_len=shape.max_query_len,
        max_context_len=shape.max_context_len,
    )


class InputBatch:
    """The seats' tables, and the building of a step's input from them.

    Args:
        num_seats: sequences that can run at the same time.
        max_model_len, block_size: they bound the length of a block table.
    """

    def __init__(self, num_seats: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self._tables = np.full((num_seats, self.max_blocks), -1, np.int32)
        self._table_lens = [0] * num_seats
        self._prompt_lens = np.zeros(num_seats, np.int64)

    def update(self, step: ScheduledStep) -> None:
        """Take over what the step changed: who was seated, and whose block table has grown."""
        for sequence in step.admitted:
            self._tables[sequence.row] = -1
            self._table_lens[sequence.row] = 0
            self._prompt_lens[sequence.row] = sequence.num_prompt_tokens
        for sequence in step.grown:
            row, table = sequence.row, sequence.block_table
            filled = self._table_lens[row]
            self._tables[row, filled : len(table)] = table[filled:]
            self._table_lens[row] = len(table)

    def shape_of(self, step: ScheduledStep) -> StepShape:
        """The sizes of a step's input. The table is as wide as the longest context needs, and no wider."""
        longest = max(map(int.__add__, step.starts, step.num_tokens))
        return StepShape(
            num_tokens=step.total_tokens,
            num_seqs=len(step),
            num_samples=sum(step.samples),
            table_width=-(-longest // self.block_size),
            num_decodes=step.num_decodes,
            max_query_len=max(step.num_tokens),
            max_context_len=longest,
        )

    def fill(self, step: ScheduledStep, out: StepInput) -> np.ndarray:
        """Write a step's input, all but the sampler's part, into host views of the right shape.

        Returns:
            how many tokens each sampling sequence has generated before, int64 [samples].
        """
        seats = np.array([sequence.row for sequence in step.sequences])  # [seqs]
        starts, counts = np.array(step.starts), np.array(step.num_tokens)
        ends = starts + counts
        out.seats[:] = seats
        out.context_lens[:] = ends
        out.cu_seqlens_q[0] = 0
        np.cumsum(counts, out=out.cu_seqlens_q[1:])
        out.block_tables[:] = self._tables[seats, : out.block_tables.shape[1]]
        if len(out.positions) == len(seats):  # one token each
            owners, positions = seats, starts  # [tokens]
        else:
            owners = np.repeat(seats, counts)
            positions = np.arange(len(out.positions)) + np.repeat(starts - out.cu_seqlens_q[:-1], counts)
        out.positions[:] = positions
        pages = self._tables[owners, positions // self.block_size]
        np.multiply(pages, self.block_size, out=out.slot_mapping, casting="unsafe", dtype=np.int64)
        np.add(out.slot_mapping, positions % self.block_size, out=out.slot_mapping)
        self._fill_prompt_tokens(step, out)
        if len(out.sample_seats) == len(seats):
            sampling, sampling_ends = slice(None), ends
        else:
            sampling = np.flatnonzero(step.samples)
            sampling_ends = ends[sampling]
        out.sample_seats[:] = seats[sampling]
        out.sample_tokens[:] = out.cu_seqlens_q[1:][sampling] - 1
        return sampling_ends - self._prompt_lens[out.sample_seats]

    def _fill_prompt_tokens(self, step: ScheduledStep, out: StepInput) -> None:
        out.input_ids[: step.num_decodes] = 0
        for i in range(step.num_decodes, len(step)):
            start, count = step.starts[i], step.num_tokens[i]
            first = out.cu_seqlens_q[i]
            out.input_ids[first : first + count] = step.sequences[i].token_ids[start : start + count]


class StepBuffers:
    """The memory that inputs travel in: two buffers on the host, used in turn, and one on the device.

    Two, because a buffer may not be written again before its copy to the device has been carried out: with one step in
    preparation while another runs, the copy before last certainly has.

    Args:
        num_bytes: the largest input.
        device: where the model computes.
        fixed: the device's views lie at the same place in every step, on a CPU too: a recorded step needs that.
    """

    def __init__(self, num_bytes: int, device: torch.device, fixed: bool = False) -> None:
        pinned = device.type == "cuda"
        self._host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._arrays = [tensor.numpy() for tensor in self._host]
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device) if pinned or fixed else None
        self._turn = 0

    def next_host(self, shape: StepShape) -> StepInput:
        """Host views to fill in."""
        self._turn ^= 1
        return host_views(self._arrays[self._turn], shape)

    def packed(self, shape: StepShape) -> bytes:
        """What was filled in, for another process."""
        return self._arrays[self._turn][: shape.num_bytes].tobytes()

    def unpack(self, data: bytes) -> None:
        """Take over what another process packed, as if it had been filled in here."""
        self._turn ^= 1
        self._arrays[self._turn][: len(data)] = np.frombuffer(data, np.uint8)

    def send(self, shape: StepShape) -> StepInput:
        """Copy what was filled in to the device, in one go, and return its views there."""
        host = self._host[self._turn]
        if self._device is None:  # the CPU computes on the host's memory itself
            return device_views(host, shape)
        self._device[: shape.num_bytes].copy_(host[: shape.num_bytes], non_blocking=True)
        return device_views(self._device, shape)


def largest_input(num_tokens: int, num_seats: int, table_width: int) -> int:
    """Bytes of the largest input there can be."""
    return StepShape(num_tokens, num_seats, num_seats, table_width, 0, 1, 1).num_bytes
