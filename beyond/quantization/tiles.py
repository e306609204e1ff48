"""Choose how matrix products with 8-bit weights are divided into programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import triton

from stage_f_graph_tp.kernels.skinny_gemm import ceil_div

_LARGE_COLUMNS = 3584  # from here on, tiles for more than 8 tokens were measured (Qwen2.5-7B)


@dataclass(frozen=True)
class Tiles:
    """The division of a product into programs.

    Attributes:
        rows: weight rows in a program's tile; pairs of rows if the kernel works on pairs.
        columns: of a tile; with a scale per group, a group's columns per slice.
        warps, stages: of a program; stages are the tiles with loads in flight.
        splits: split-K, the number of parts that the weight's columns are cut into (only `product_add`).
        slices: 1, or the number of warps, if each warp takes a part of a tile's columns.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    splits: int = 1
    slices: int = 1


@lru_cache(maxsize=256)
def choose_tiles(
    rows: int,
    columns: int,
    tokens: int,
    element_size: int,
    group: int,
    device: torch.device,
    height: int = 1,
    splits: bool = False,
) -> Tiles:
    """Choose how to divide a product of `rows` × `height` weight rows (`height` is 2 for pairs).

    Converting a weight takes two instructions, and every warp that multiplies a weight converts it. With 4 warps on a
    tile of 16 rows, all four convert the whole tile: the compiled loop has 11.8 instructions per weight, and issuing
    them takes longer than the memory does. With 2 warps on 64 rows no weight is shared: 3.0 instructions. (From 33
    tokens on a program takes four warps, Hopper's warp group.) Beyond that, the goal is to fill the chip: lower tiles,
    or split-K if the kernel supports it (`splits`), until every multiprocessor has a program, and as many loads in
    flight as fit.

    A single warp on a quarter of a multiprocessor leaves most cycles unused, because each instruction waits for the one
    before. So with few tokens many warps are needed to keep up with the memory, each with a part of the columns
    (`slices`, or one warp per split).
    """
    sm_count, shared_bytes = _chip(device)
    block_m = token_block(tokens)
    if element_size == 4:  # tensor cores do not multiply float32 at full precision: small tiles
        return Tiles(16, group or 128, 4, 2)
    tiles = None if group else _measured_tiles(rows, columns, block_m, height, splits, sm_count)
    if tiles and tiles.stages * (tiles.rows * height + 2 * block_m) * tiles.columns <= (shared_bytes or math.inf):
        return tiles
    token_blocks = ceil_div(tokens, block_m)
    tall, width, warps = (64, 128, 2) if block_m <= 32 else (128, 128 if block_m == 64 else 64, 4)
    programs = ceil_div(rows * height, tall) * token_blocks
    if programs < sm_count and (block_m > 64 or not splits or 4 * programs < sm_count):
        tall, width = tall // 2, width if block_m > 16 or splits else 2 * width  # more tokens were faster without
        warps = 1 if block_m == 32 else warps  # two warps would split the tokens, and both would convert all weights
        programs = ceil_div(rows * height, tall) * token_blocks
    width = group or width
    parts = 1
    while splits and parts < 8 and programs * parts < sm_count and columns // (width * parts) >= 4:
        parts *= 2
    if block_m == 8:
        tall = 32
        programs = ceil_div(rows * height, tall) * token_blocks
    resident = max(1, min(4, ceil_div(programs * parts, sm_count)))  # programs that share a multiprocessor's memory
    stages = shared_bytes // resident // ((tall + 2 * block_m) * width)
    return Tiles(tall // height, width, warps, max(2, min(6, stages)), parts)


def _measured_tiles(rows: int, columns: int, block_m: int, height: int, splits: bool, sm_count: int) -> Tiles | None:
    """Return the fastest tiles for a matrix with enough rows and even columns, if they were measured.

    Measured on an H200. Up to 8 tokens: in a chain of layers of Qwen2.5-7B, because the fastest tiles of a single
    product need not be the fastest after another product whose last programs still run. More tokens: single products.
    """
    if columns % 512 or rows * height < 16 * sm_count:
        return None
    is_wide = not splits and rows * height >= 128 * sm_count  # gate and up, LM head
    is_small = rows * height < 64 * sm_count  # the others
    if block_m == 8 and splits and is_small:
        return Tiles(16, 128, warps=1, stages=8, splits=4)
    if block_m == 8 and is_wide:
        return Tiles(32 // height, 256, warps=2, stages=4, slices=2)
    if block_m == 8 and not splits and height == 1:
        return Tiles(16, 512, warps=2, stages=4, slices=2)
    if block_m == 32 and height == 1 and not splits and is_small:
        return Tiles(16 if columns >= _LARGE_COLUMNS else 32, 512, warps=4, stages=3, slices=4)
    if columns < _LARGE_COLUMNS:
        return None
    if block_m == 32 and is_wide:
        return Tiles(64 // height, 128, warps=2, stages=4)
    if block_m == 16 and is_small:
        return Tiles(32 // height, 512, warps=4, stages=4, splits=2 if splits else 1, slices=4)
    if block_m == 64 and is_wide:
        return Tiles(64 // height, 128, warps=4, stages=3)
    if block_m == 128:
        parts = (4 if columns > 2 * rows else 2) if splits and is_small else 1
        programs = ceil_div(rows * height, 64) * parts
        return Tiles(64 // height, 128, warps=4, stages=3 if programs > sm_count else 4, splits=parts)
    return None


def token_block(tokens: int) -> int:
    """Return the tokens of a program's tile."""
    return max(8, min(128, int(triton.next_power_of_2(tokens))))


@cache
def _chip(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors, and the bytes of shared memory of one."""
    if device.type != "cuda":  # Triton's interpreter
        return 1, 0  # no limit
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_multiprocessor
