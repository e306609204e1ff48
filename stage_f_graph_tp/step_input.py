"""A step's input, packed into one buffer so that one copy moves it to the device.

The model and the sampler need thirteen arrays for a step. Launching a separate copy for each would take longer than the
copies themselves, so all arrays are stored in one pinned buffer. Their offsets follow from a few sizes (`StepShape`),
so the receiver, a GPU or another process, needs only these sizes and the bytes.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import accumulate
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.sampler.rules import WORDS, Array
from stage_e_batching.sampler import SamplerInput

MAX_VIEWS = 1024  # cached sets of views, of thirteen arrays each, on the host and on the device


class TokenSource(IntEnum):
    """Where the tokens of a step's decodes come from."""

    DEVICE = 0  # the previous step left them there (`LastTokens`)
    HOST = 1  # in the step's input, like the tokens of prompts
    TABLE = 2  # a table on the device, which may know more of them than the host


class StepShape(NamedTuple):
    """The sizes of a step, which determine the layout of its input."""

    num_tokens: int
    num_seqs: int
    num_samples: int  # sequences that sample a token
    table_width: int  # blocks of the longest context
    num_decodes: int  # sequences that run one token, the last one sampled; they come first
    max_query_len: int  # most tokens of one sequence
    max_context_len: int  # most keys of one sequence
    source: int = TokenSource.DEVICE  # where the decodes' tokens come from, a `TokenSource`

    @property
    def wide_sizes(self) -> tuple[int, ...]:
        """Lengths of the int64 arrays: input_ids, positions, slot_mapping, batch_slots, sample_slots, sample_tokens."""
        return (self.num_tokens,) * 3 + (self.num_seqs, self.num_samples, self.num_samples)

    @property
    def narrow_sizes(self) -> tuple[int, ...]:
        """Lengths of the 32-bit arrays: cu_seqlens_q, context_lens, the sampler's four, block_tables."""
        samples = self.num_samples
        sampler = samples, samples, samples * WORDS, samples
        return (self.num_seqs + 1, self.num_seqs, *sampler, self.num_seqs * self.table_width)

    @property
    def num_bytes(self) -> int:
        return self.wide_bytes + 4 * sum(map(_aligned, self.narrow_sizes))

    @property
    def wide_bytes(self) -> int:
        return 8 * sum(map(_aligned, self.wide_sizes))


def _aligned(size: int) -> int:
    """Round an array's size up, so that every array starts at a multiple of 16 bytes, which kernels prefer."""
    return -(-size // 4) * 4


class StepInput(NamedTuple, Generic[Array]):
    """A step's arrays, as views of one buffer. On the host they are numpy arrays, on the device tensors."""

    input_ids: Array  # int64 [tokens]; those of decodes are filled in on the device
    positions: Array  # int64 [tokens]
    slot_mapping: Array  # int64 [tokens]
    batch_slots: Array  # int64 [seqs]
    sample_slots: Array  # int64 [samples]
    sample_tokens: Array  # int64 [samples]: index of each sampling sequence's last token among the tokens
    cu_seqlens_q: Array  # int32 [seqs + 1]
    context_lens: Array  # int32 [seqs]
    sampling: SamplerInput[Array]  # of `samples` rows
    block_tables: Array  # int32 [seqs, width]


def host_views(buffer: np.ndarray, shape: StepShape) -> StepInput[np.ndarray]:
    """Return the arrays inside a byte buffer of `shape.num_bytes` or more."""
    return _views(buffer, shape, np.int64, np.int32, np.float32)


def device_views(buffer: Tensor, shape: StepShape) -> StepInput[Tensor]:
    """Return the same as tensors."""
    return _views(buffer, shape, torch.int64, torch.int32, torch.float32)


def _views(buffer: Any, shape: StepShape, int64: Any, int32: Any, float32: Any) -> StepInput:
    """Make the views of a NumPy array or a tensor; only the names of the dtypes differ."""
    split = shape.wide_bytes
    wide = _carve(buffer[:split].view(int64), shape.wide_sizes)
    narrow = _carve(buffer[split : shape.num_bytes].view(int32), shape.narrow_sizes)
    cu_seqlens_q, context_lens, temperatures, noise_keys, rules, asking, tables = narrow
    rules = rules.reshape(shape.num_samples, WORDS)
    tables = tables.reshape(shape.num_seqs, shape.table_width)
    sampling = SamplerInput(temperatures.view(float32), noise_keys, rules, asking)
    return StepInput(*wide, cu_seqlens_q, context_lens, sampling, tables)  # pyright: ignore[reportCallIssue] (ten)


def _carve(array: Any, sizes: tuple[int, ...]) -> list[Any]:
    starts = accumulate(map(_aligned, sizes[:-1]), initial=0)
    return [array[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def attention_metadata(inputs: StepInput[Tensor], shape: StepShape) -> AttentionMetadata:
    """Tell the attention kernels where each token of a step's input belongs."""
    return AttentionMetadata(
        cu_seqlens_q=inputs.cu_seqlens_q,
        context_lens=inputs.context_lens,
        slot_mapping=inputs.slot_mapping,
        block_tables=inputs.block_tables,
        max_query_len=shape.max_query_len,
        max_context_len=shape.max_context_len,
        # False if drafts have rows, or if a prompt shares a block that another prompt fills in this step.
        one_new_key=shape.source == TokenSource.DEVICE and shape.num_decodes == shape.num_seqs,
    )


class InputViews(NamedTuple):
    """Views for one step's input in a host buffer and in the device buffer: its arrays, and all its bytes."""

    host: StepInput[np.ndarray]
    device: StepInput[Tensor]
    host_bytes: Tensor
    device_bytes: Tensor


class StepBuffers:
    """The buffers for inputs: two on the host, used in turn, and one on the device.

    A host buffer may not be overwritten before its copy to the device is done. There are two, so that one is free while
    the other's copy waits for the running step; a CPU that is further ahead waits.

    Args:
        num_bytes: the largest input.
        device: the model's. The input is copied on a CPU too, because a recorded step reads the same addresses every
            time.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._arrays = [tensor.numpy() for tensor in self._host]
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._copied = [torch.cuda.Event() if pinned else None for _ in range(2)]  # at the last copy's end
        self._turn = 0
        # Cached views, by host buffer and the sizes that determine the offsets: graphs repeat the same sizes, and
        # making views is a large part of the host's work in a small step.
        self._views: dict[tuple[int, tuple[int, ...]], InputViews] = {}
        self._current: InputViews | None = None  # views of the current input, or of the last one

    def next_host(self, shape: StepShape) -> StepInput[np.ndarray]:
        """Return host views to fill in."""
        self._turn ^= 1
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()
        key = self._turn, shape[:4]
        if key not in self._views:
            if len(self._views) == MAX_VIEWS:  # eager steps can have any sizes
                self._views.clear()
            self._views[key] = self._make_views(shape)
        self._current = self._views[key]
        return self._current.host

    def packed(self, shape: StepShape) -> bytes:
        """Return the bytes of the current input, for another process."""
        return self._arrays[self._turn][: shape.num_bytes].tobytes()

    def unpack(self, shape: StepShape, data: bytes) -> None:
        """Make the bytes that another process packed the current input."""
        self.next_host(shape)
        self._arrays[self._turn][: len(data)] = np.frombuffer(data, np.uint8)

    def send(self) -> StepInput[Tensor]:
        """Copy the current input to the device in one copy, and return its views there."""
        views = self._current
        assert views is not None
        views.device_bytes.copy_(views.host_bytes, non_blocking=True)
        if (copied := self._copied[self._turn]) is not None:
            copied.record()
        return views.device

    def _make_views(self, shape: StepShape) -> InputViews:
        host, device = host_views(self._arrays[self._turn], shape), device_views(self._device, shape)
        return InputViews(host, device, self._host[self._turn][: shape.num_bytes], self._device[: shape.num_bytes])


def largest_input(num_tokens: int, max_num_seqs: int, table_width: int) -> int:
    """Return the bytes of the largest possible input."""
    return StepShape(num_tokens, max_num_seqs, max_num_seqs, table_width, 0, 1, 1).num_bytes
