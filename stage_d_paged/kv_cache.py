"""The pool of blocks in device memory: its size, its tensor, and the memory that it saves.

The K and V of all sequences are in one tensor `[2, layers, blocks, block_size, kv_heads, head_dim]`, allocated once. A
token's *slot* is `block_id * block_size + offset`; the same slot is used in every layer, so one block table serves the
whole model.

How many blocks? On a GPU, the pool gets the rest of this process's share after the weights and the activations of the
largest step, which are measured by running one. On the CPU, whose memory all programs share, the pool gets a modest
fixed amount.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stage_a_naive.checkpoints.memory import free_memory

CPU_POOL_BYTES = 512 * 2**20


class PoolShape(NamedTuple):
    """The sizes of a pool, the dtype of its model, and where it is."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class KVCache:
    """The pool of blocks, filled with zeros.

    Attributes:
        tensor: `[2, layers, blocks, block_size, kv_heads, head_dim]`, keys first, then values.
        layers: each layer's (keys, values), views `[blocks, block_size, kv_heads, head_dim]` of `tensor`.
    """

    def __init__(self, shape: PoolShape) -> None:
        num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype, device = shape
        num_bytes = num_blocks * block_size * self.bytes_per_token(shape)
        available = available_memory(device)
        if num_bytes > available:
            raise MemoryError(
                f"a KV pool of {num_blocks} blocks of {block_size} tokens takes {num_bytes / 2**30:.1f} GiB; "
                f"{device} has {available / 2**30:.1f} GiB. Lower num_kvcache_blocks or kvcache_block_size, "
                "or leave both out for the engine to choose"
            )
        # Zeros, because a kernel may load a block's unused tail and mask it, and NaN times a zero weight is NaN.
        self.tensor = zero_bytes(num_bytes, device).view(dtype)
        self.tensor = self.tensor.view(2, num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = [(self.tensor[0, i], self.tensor[1, i]) for i in range(num_layers)]  # views, made once

    @staticmethod
    def bytes_per_token(shape: PoolShape) -> int:
        """Return the bytes of one token's K and V in all layers."""
        return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def zero_bytes(count: int, device: torch.device) -> Tensor:
    """Return `count` bytes of zeros; on the CPU they take memory where they are written."""
    if device.type == "cpu":  # NumPy leaves the zeros to the system; PyTorch would write all of them
        return torch.from_numpy(np.zeros(count, dtype=np.uint8))
    return torch.zeros(count, dtype=torch.uint8, device=device)


def available_memory(device: torch.device) -> int:
    """Return the bytes that a new tensor could take: a GPU's free memory, or all memory of the machine.

    (A CPU's memory is assigned only when it is written, and all programs share it.)
    """
    if device.type == "cuda":
        return free_memory(device)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cpu_num_blocks(block_bytes: int, block_size: int, max_model_len: int) -> int:
    """Return the CPU's default: 512 MiB of blocks, or what one sequence of `max_model_len` takes if that is more."""
    return max(CPU_POOL_BYTES // block_bytes, -(-max_model_len // block_size))


def cuda_num_blocks(
    block_bytes: int, gpu_memory_utilization: float, device: torch.device, run_largest_step: Callable[[], None]
) -> int:
    """Return how many blocks fit on a GPU in addition to the weights (already loaded) and the largest activations.

    `gpu_memory_utilization` is the share of the card that *this process* may use, regardless of other processes:

        pool = total * utilization - (weights + peak activations of this process)

    Other processes' memory counts only if it limits the pool: the pool also fits into `utilization` of the free memory.
    """
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    share = int(total * gpu_memory_utilization) - peak
    room = int(free * gpu_memory_utilization) - (peak - before)
    return blocks_that_fit(min(share, room), block_bytes, free, gpu_memory_utilization)


def blocks_that_fit(budget: int, block_bytes: int, free: int, gpu_memory_utilization: float) -> int:
    """Return how many blocks fit into `budget` bytes; `MemoryError` says what to change if not even one fits."""
    if budget < block_bytes:
        raise MemoryError(
            f"no room for a single block of KV cache: a block takes {block_bytes / 2**20:.2f} MiB, "
            f"{max(budget, 0) / 2**20:.2f} MiB are left for blocks ({free / 2**20:.0f} MiB of the GPU are free, "
            f"gpu_memory_utilization={gpu_memory_utilization}). Raise gpu_memory_utilization, lower "
            "max_num_batched_tokens, or free memory that other processes hold."
        )
    return budget // block_bytes


@dataclass(frozen=True)
class MemoryReport:
    """Memory of some sequences in blocks, compared with contiguous reservations of `max_model_len` for each."""

    num_sequences: int
    block_size: int
    bytes_per_token: int
    tokens: int  # tokens of all sequences together; a shared token counts once for each
    stored_tokens: int  # stored tokens: a shared token counts once
    blocks: int  # distinct blocks in use
    reserved_tokens: int  # num_sequences * max_model_len: the contiguous reservation

    @property
    def block_waste(self) -> float:
        """Share of the blocks' slots that is empty: the tails of last blocks."""
        return 1 - self.stored_tokens / (self.blocks * self.block_size) if self.blocks else 0.0

    @property
    def reservation_waste(self) -> float:
        """Share of a contiguous reservation that would be empty."""
        return 1 - self.tokens / self.reserved_tokens if self.reserved_tokens else 0.0

    @property
    def block_bytes(self) -> int:
        return self.blocks * self.block_size * self.bytes_per_token

    @property
    def reserved_bytes(self) -> int:
        return self.reserved_tokens * self.bytes_per_token

    def __str__(self) -> str:
        return (
            f"{self.num_sequences} sequences, {self.tokens} tokens in {self.blocks} blocks of {self.block_size} "
            f"({self.block_bytes / 2**20:.1f} MiB, {self.block_waste:.1%} unused); reserved contiguously: "
            f"{self.reserved_bytes / 2**20:.1f} MiB, {self.reservation_waste:.1%} unused"
        )


def memory_report(
    held: Iterable[tuple[int, list[int]]], block_size: int, max_model_len: int, bytes_per_token: int
) -> MemoryReport:
    """Report the memory of sequences. `held` has the number of stored tokens and the block table of each sequence.

    Sequences without blocks are waiting and hold nothing.
    """
    filled: dict[int, int] = {}  # block -> tokens in it
    holders = [(num_tokens, table) for num_tokens, table in held if table]
    for num_tokens, table in holders:
        for i, block in enumerate(table):
            filled[block] = min(block_size, max(0, num_tokens - i * block_size))  # equal for all users of a block
    return MemoryReport(
        num_sequences=len(holders),
        block_size=block_size,
        bytes_per_token=bytes_per_token,
        tokens=sum(num_tokens for num_tokens, _ in holders),
        stored_tokens=sum(filled.values()),
        blocks=len(filled),
        reserved_tokens=len(holders) * max_model_len,
    )
