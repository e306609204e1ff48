"""Skinny GEMM: matrix products for few tokens, fused with the kernels before and after them.

For a few dozen tokens, a matrix product takes as long as reading its weights, a few microseconds. The small kernels
around it take a microsecond or two each, plus the gaps between launches. So here each product also does the work of its
neighbours:

    qkv_rotate       norm of the rows · QKV · norm of the heads (Qwen3) · rotation · store into the blocks
    gate_up_silu     norm of the rows · gate and up · silu(gate) * up
    product_add      product · sum with the residual · squares for the next norm

**The norm comes after the product.** As in `elementwise.py`, the norm's weight is in the matrix, and a scale per row
remains. The kernel that writes the residual stream `x` also sums the squares of its values. The next product multiplies
at once and scales its finished sums. So no kernel has to see a whole row before it can begin (`Stream`).

**Weights are the left operand.** A tile is `[weight rows, tokens]`: its many rows are weights and its few columns are
tokens, because the tensor cores' tiles are at least 16 high (64 for Hopper's largest) and at least 8 wide.

**Pairs are computed together.** Rotation mixes columns i and i + head_dim/2 of a head, SwiGLU mixes gate i and up i. A
program computes both columns of a pair, so the rest is element-wise.

**Split-K.** A weight with few rows and many columns (`down`) has fewer tiles than there are multiprocessors, so the
columns are split as well. An arrival counter shows which program of a tile finishes last. That program adds the parts
up, always in the same order, so the sum is the same in every run.

**Programmatic dependent launch** (`pdl.py`). When the previous kernel ends, a product's programs have already started
and have loaded their positions, slots and rotations.

With more tokens the library's large tiles are faster; `skinny_limit` returns the measured limit.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stage_f_graph_tp.kernels.pdl import pdl_settings
from stage_f_graph_tp.kernels.rank_sum import PROGRAMS, SLOT, Peers
from stage_f_graph_tp.kernels.skinny_gemm_kernels import (
    gate_up_silu_kernel,
    product_add_kernel,
    qkv_rotate_kernel,
    sum_squares_kernel,
)

_COLUMNS = 128  # of 16-bit weights, loaded together; half as many where fewer than _LOADS such tiles fit into memory
_LOADS = 4
_LARGE_HIDDEN = 3584  # from this hidden size on, other tiles were measured faster


class Stream(NamedTuple):
    """The residual stream and the sums of squares for its next norm."""

    x: Tensor  # [tokens, hidden]
    squares: Tensor  # float32 [parts, tokens]: sums of x², over parts of the row


@dataclass(frozen=True)
class Tiles:
    """The division of a product into programs.

    Attributes:
        rows: weight rows in a program's tile; pairs of rows if the kernel works on pairs.
        splits: split-K, the number of parts that the weight's columns are cut into.
        stages: loads in flight, shared memory permitting.
        tokens: tokens in a program's tile, at most.
    """

    rows: int
    splits: int = 1
    stages: int = 6
    tokens: int = 64

    def block(self, tokens: int) -> int:
        """Return the tokens per tile for `tokens` in all: a power of two that tensor cores accept."""
        return max(16, min(self.tokens, _power_of_2(tokens)))


def skinny_limit(hidden: int, ranks: int = 1) -> int:
    """Return the largest number of tokens for which these kernels were measured faster than the library's products.

    With several ranks the mailboxes set the limit: 64 rows and 32 tokens are the largest tile summed in the kernel.
    """
    if hidden >= _LARGE_HIDDEN or ranks > 1:
        return 32
    return 128 if hidden <= 1024 else 64


def sum_squares(x: Tensor, pdl: bool = True) -> Stream:
    """Sum the squares of each row of `x [tokens, hidden]`."""
    tokens, hidden = x.shape
    squares = torch.empty(1, tokens, dtype=torch.float32, device=x.device)
    pad = _power_of_2(hidden)
    sum_squares_kernel[(tokens,)](
        x,
        x.stride(0),
        squares,
        SIZE=hidden,
        SIZE_PAD=pad,
        num_warps=min(8, max(1, pad // 512)),
        **pdl_settings(x.device, pdl),
    )
    return Stream(x, squares)


def qkv_rotate(
    stream: Stream,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    num_heads: int,
    rotary: tuple[Tensor, Tensor],
    positions: Tensor,
    layer_cache: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    head_norm: tuple[Tensor, float] | None = None,
    tiles: Tiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """Compute attention's input from the residual stream: rotated queries, and keys and values in their blocks.

    Args:
        stream: `[tokens, hidden]`, not yet normalised.
        eps: the norm's epsilon.
        weight, bias: the packed product, `[(heads + 2 kv_heads) * head_dim, hidden]`, with the norm's weight in it, and
            its bias or None.
        num_heads: query heads.
        rotary: the tables of stage D's `RotaryEmbedding`: cos and signed sin, each `[positions, 2, head_dim / 2]`.
        positions: int64 `[tokens]`.
        layer_cache: keys and values, each `[blocks, block_size, kv_heads, head_dim]`.
        slot_mapping: int64 `[tokens]`; -1 stores nothing.
        head_norm: weight `[heads + kv_heads, head_dim]` and epsilon of the heads' RMSNorm; a program then computes
            whole heads.
        tiles: how to cut the product; None is what was measured fastest.
        pdl: launch by PDL, where the GPU can.

    Returns:
        The rotated queries, `[tokens, heads, head_dim]`. Sums are float32, rounded once at the end.
    """
    tokens, hidden = stream.x.shape
    k_cache, v_cache = layer_cache
    kv_heads, head_dim = k_cache.shape[2:]
    heads, half = num_heads + 2 * kv_heads, head_dim // 2
    whole = _power_of_2(half)
    heights = (whole,) if head_norm is not None else ()
    tiles = tiles or choose_tiles(heads * half, hidden, tokens, weight.device, heights)
    pairs = max(16, whole if head_norm is not None else min(tiles.rows, whole))
    block = tiles.block(tokens)
    query = torch.empty(tokens, num_heads, head_dim, dtype=stream.x.dtype, device=stream.x.device)
    head_weight, head_eps = head_norm if head_norm is not None else (weight, 0.0)
    parts = len(stream.squares)
    grid = heads * ceil_div(half, pairs), ceil_div(tokens, block)
    qkv_rotate_kernel[grid](
        stream.x,
        stream.x.stride(0),
        stream.squares,
        parts,
        tokens,
        eps,
        weight,
        weight if bias is None else bias,
        query,
        k_cache,
        v_cache,
        k_cache.stride(1),
        *rotary,
        positions,
        slot_mapping,
        head_weight,
        head_eps,
        SIZE=hidden,
        PARTS=_power_of_2(parts),
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HALF=half,
        PAIRS=pairs,
        HAS_BIAS=bias is not None,
        HAS_NORM=head_norm is not None,
        **_settings(block, stream.x.dtype, stream.x.device, 2 * pairs, hidden, tiles.stages, pdl),
    )
    return query


def gate_up_silu(stream: Stream, eps: float, weight: Tensor, tiles: Tiles | None = None, pdl: bool = True) -> Tensor:
    """Compute `silu(gate) * up` of the normalised rows.

    Args:
        stream: `[tokens, hidden]`, not yet normalised.
        eps: the norm's epsilon.
        weight: `[2 * intermediate, hidden]`, gate rows first, with the norm's weight in it.
        tiles: how to cut the product; None is what was measured fastest.
        pdl: launch by PDL, where the GPU can.

    Returns:
        `[tokens, intermediate]`.
    """
    tokens, hidden = stream.x.shape
    intermediate = weight.shape[0] // 2
    tiles = tiles or choose_tiles(intermediate, hidden, tokens, weight.device)
    out = torch.empty(tokens, intermediate, dtype=stream.x.dtype, device=stream.x.device)
    parts, block = len(stream.squares), tiles.block(tokens)
    gate_up_silu_kernel[ceil_div(intermediate, tiles.rows), ceil_div(tokens, block)](
        stream.x,
        stream.x.stride(0),
        stream.squares,
        parts,
        tokens,
        eps,
        weight,
        out,
        SIZE=hidden,
        PARTS=_power_of_2(parts),
        INTERMEDIATE=intermediate,
        BLOCK_N=tiles.rows,
        **_settings(block, stream.x.dtype, stream.x.device, 2 * tiles.rows, hidden, tiles.stages, pdl),
    )
    return out


def product_add(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    arrival_counters: Tensor,
    tiles: Tiles | None = None,
    peers: Peers | None = None,
    pdl: bool = True,
) -> Stream:
    """Compute `residual + x Wᵀ`, written over `residual`, and the squares for its norm.

    Args:
        x, weight, residual: `[tokens, in_features]`, `[out_features, in_features]`, `[tokens, out_features]`.
        arrival_counters: int32 zeros, one per tile; zeros again afterwards. Calls that share them must not overlap.
        tiles: how to cut the product; None is what was measured fastest.
        pdl: launch by PDL, where the GPU can.
        peers: the ranks whose products are summed in float32, if each rank has some of the columns. For more than 16
            tokens a rank sends its products in `x`'s dtype.

    Raises:
        ValueError: more tiles than arrival counters, or more or larger tiles than fit into a mailbox.
    """
    tokens, in_features = x.shape
    out_features = weight.shape[0]
    ranks = peers.size if peers else 1
    tiles = tiles or choose_tiles(out_features, in_features, tokens, weight.device, splits=True, ranks=ranks)
    block_m = tiles.block(tokens)
    blocks = ceil_div(out_features, tiles.rows), ceil_div(tokens, block_m)
    num_tiles = blocks[0] * blocks[1]
    if peers is not None and (num_tiles > PROGRAMS.value or 4 * tiles.rows * block_m > SLOT.value):
        tile = f"{tiles.rows} x {block_m}"
        raise ValueError(f"{num_tiles} tiles of {tile} do not fit into a mailbox; pass fewer tokens or other tiles")
    if tiles.splits > 1 and num_tiles > len(arrival_counters):
        raise ValueError(f"{num_tiles} tiles need as many arrival counters, got {len(arrival_counters)}; pass more")
    num_squares, num_partial = blocks[0] * tokens, num_tiles * tiles.splits * tiles.rows * block_m
    length = num_squares + (num_partial if tiles.splits > 1 else 0)
    space = torch.empty(length, dtype=torch.float32, device=x.device)  # one allocation for both
    squares, partial = space[:num_squares].view(blocks[0], tokens), space[num_squares:]
    product_add_kernel[*blocks, tiles.splits](
        x,
        x.stride(0),
        tokens,
        weight,
        residual,
        residual.stride(0),
        squares,
        partial,
        arrival_counters,
        arrival_counters if peers is None else peers.addresses,
        SIZE=in_features,
        OUT_SIZE=out_features,
        SPLITS=tiles.splits,
        BLOCK_N=tiles.rows,
        RANK=peers.rank if peers else 0,
        RANKS=ranks,
        **_settings(block_m, x.dtype, x.device, tiles.rows, ceil_div(in_features, tiles.splits), tiles.stages, pdl),
    )
    return Stream(residual, squares)


@lru_cache(maxsize=256)
def choose_tiles(
    rows: int,
    columns: int,
    tokens: int,
    device: torch.device,
    heights: tuple[int, ...] = (),
    splits: bool = False,
    ranks: int = 1,
) -> Tiles:
    """Choose the tiles that were measured fastest on an H200.

    Small models: the smallest tile whose programs all run at once, one per multiprocessor. Above 16 tokens a tile has
    at least 64 weight rows (or 32 pairs), which Hopper's tensor cores multiply in one instruction straight from
    shared memory; only a product without split-K has smaller tiles up to 32 tokens. Above 32 tokens a tile of such a
    product may have 16 tokens, except with whole heads. Large models: 64 weight rows. Two splits of 3,584 or 4,096 rows
    fill the chip. A program with fewer loads in flight needs less memory and leaves room for other programs: of the
    same product, so that one multiplies while another waits, or of the next product, which can start earlier. Two run
    together, too, if few would be left for a second round. For up to 16 tokens on more than two ranks a product that is
    summed over them has 32 weight rows and no splits; the output's short rows leave room for gate-up beside them.

    Args:
        rows: weight rows, or pairs of rows.
        heights: rows of a tile, to fix them.
        splits: whether the product can split the columns (`product_add`).
        ranks: over which the product is summed.
    """
    sm_count = _chip(device)[0]
    if (rows if splits else columns) >= _LARGE_HIDDEN:
        if splits and ranks > 2 and tokens <= 16:
            return Tiles(32, stages=min(12, columns // _COLUMNS + 1))
        if splits:
            return Tiles(64, splits=2, stages=5 if tokens > 16 else 8)
        programs = ceil_div(rows, 32 * sm_count)  # per multiprocessor
        if programs > 4 or (programs == 3 and tokens > 16):
            return Tiles(32, stages=3)  # three run together
        few_left = programs == 2 and ceil_div(rows, 32) <= 1.25 * sm_count
        return Tiles(32, stages=4 if programs == 4 or few_left else 8)  # two, or one
    parts = min(8, _power_of_2(ceil_div(columns, rows))) if splits else 1
    fewer = parts  # splits that leave each program enough columns
    blocks = (16, 32, 64, 128)[tokens <= 32 or parts > 1 or bool(heights) :]
    if tokens > 16:
        fewer = max(1, parts // 2)
        heights = heights or ((32, 64) if not splits else (64,) if parts > 1 or tokens > 32 else ())
    for height in heights or (16, 32, 64):
        for block in blocks:
            for count in dict.fromkeys((parts, fewer)):
                programs = ceil_div(rows, height) * ceil_div(tokens, block) * count
                if programs <= sm_count:
                    return Tiles(height, count, tokens=block)
    return Tiles(64, parts)


@lru_cache(maxsize=256)
def _settings(
    block_m: int, dtype: torch.dtype, device: torch.device, height: int, size: int, stages: int, pdl: bool
) -> dict[str, Any]:
    """Return launch settings for tiles of `height` weight rows and `block_m` tokens, over `size` columns."""
    columns, memory = _COLUMNS * 2 // dtype.itemsize, _chip(device)[1]
    stage_bytes = (height + block_m) * columns * dtype.itemsize
    if memory // stage_bytes < _LOADS:
        columns, stage_bytes = columns // 2, stage_bytes // 2
    return {
        "BLOCK_M": block_m,
        "BLOCK_K": max(16, min(columns, _power_of_2(size))),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": 8 if height * block_m > 4096 else 4,  # sums in registers: 32 per thread at 4096 and 4 warps
        "num_stages": max(2, min(stages, memory // stage_bytes)),
    } | pdl_settings(device, pdl)


def _power_of_2(number: int) -> int:
    """Round up to a power of two. Triton has this and `cdiv` too, but they are slower when called from Python."""
    return 1 << (number - 1).bit_length()


def ceil_div(number: int, by: int) -> int:
    """Divide and round up."""
    return -(-number // by)


@cache
def _chip(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors, and the bytes of shared memory that a program can fill with loads."""
    if device.type != "cuda":  # Triton's interpreter
        return 1, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin - 16 * 1024
