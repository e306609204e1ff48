"""Plan the decode kernel's work: the number of splits of a context, and the kernel's compile-time constants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

MAX_SPLITS = 64


@dataclass(frozen=True)
class DecodeConfig:
    """Tuning of the decode kernel; `choose_decode_config` has the measured choices.

    Attributes:
        block_n: keys per tile.
        num_warps, num_stages: of a program; stages are tiles whose loads are in flight at the same time.
        programs_per_sm: the context is split until the grid has this many programs per multiprocessor.
        split_keys: but there is at most one split per this many keys, because combining costs time.
        min_splits: least number of splits of a long context in any batch; two even out unequal lengths.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    split_keys: int = 64
    min_splits: int = 1


class DecodePlan(NamedTuple):
    """One launch of the decode kernel."""

    programs: int
    num_splits: int  # the most splits of a sequence
    split_keys: int  # a sequence has at most one split per this many keys
    partial_rows: int  # partial results: sequences × heads × splits
    constants: dict[str, Any]

    def make_partials(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate float32 memory for the splits' results, `partial_rows` × head_dim, and their log-sums, at once."""
        split_at = self.partial_rows * self.constants["HEAD_DIM"]
        partials = torch.empty(split_at + self.partial_rows, dtype=torch.float32, device=device)
        return partials, partials[split_at:]


def choose_decode_config(head_dim: int, element_size: int, pairs: int, sm_count: int) -> DecodeConfig:
    """Return the fastest configuration that was tried on an H200. `pairs` is sequences × KV heads."""
    if head_dim > 128:  # a key of 256 numbers is as long as two: small tiles, for the shared memory of any GPU
        return DecodeConfig(16 if element_size == 4 else 32, num_warps=4, num_stages=2, programs_per_sm=4)
    if element_size == 4:  # tensor cores do not multiply float32 at full precision: small tiles
        return DecodeConfig(16, num_warps=4, num_stages=2, programs_per_sm=4, min_splits=2)
    if pairs < sm_count:  # few programs, each alone on its multiprocessor: many warps each, for the shortest latency
        return DecodeConfig(64, num_warps=4, num_stages=2, programs_per_sm=8)
    # Enough programs to hide each other's waits: one warp each, which never waits for other warps.
    if head_dim <= 64:
        return DecodeConfig(32, num_warps=1, num_stages=4, programs_per_sm=8, min_splits=2)
    if pairs <= 4 * sm_count:
        return DecodeConfig(32, num_warps=1, num_stages=2, programs_per_sm=8, min_splits=2)
    return DecodeConfig(64, num_warps=4, num_stages=3, programs_per_sm=1)


@lru_cache(maxsize=64)
def plan_decode(
    seqs: int,
    max_context_len: int,
    heads: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    sm_count: int,
    config: DecodeConfig | None = None,
    window: int = 0,
) -> DecodePlan:
    """Plan a launch for `seqs` sequences of up to `max_context_len` keys, of which the last `window` count (0: all).

    The result is cached: all layers of a step need the same plan, and making it takes about half as long as a launch.
    """
    config = config or choose_decode_config(head_dim, dtype.itemsize, seqs * kv_heads, sm_count)
    if window:  # and the keys before it in its first tile
        max_context_len = min(max_context_len, window + config.block_n - 1)
    wanted = max(sm_count * config.programs_per_sm // (seqs * kv_heads), config.min_splits)
    split_keys = max(config.split_keys, config.block_n)
    num_splits = max(1, min(wanted, MAX_SPLITS, -(-max_context_len // split_keys)))
    group = heads // kv_heads
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "GROUP_PAD": max(16, _power_of_2(group)),
        "ROWS": _power_of_2(group),
        "HEAD_DIM": head_dim,
        "HEAD_PAD": _power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "BLOCK_N": config.block_n,
        "SPLITS_PAD": MAX_SPLITS,
        "AHEAD": 16 if config.num_warps == 4 else 8,  # as many as one warp has registers for
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "WINDOW": window,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return DecodePlan(seqs * num_splits * kv_heads, num_splits, split_keys, seqs * heads * num_splits, constants)


def _power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
