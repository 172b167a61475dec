"""Plans of what ``nvfp4.compat.flashinfer`` needs beside the public functions' own plans."""

from __future__ import annotations

import functools

from .kernels.flashinfer import FLASHINFER_TILE_STARTS, PAD_OFFSETS, SWIZZLE, UNSWIZZLE
from .launch import Launch
from .layouts import TILE_BLOCKS
from .tiling import THREADS, Launches, at_least_one, block_for, ceil_div, grid_for

__all__ = ["flashinfer_tile_starts", "pad_offsets", "swizzle", "unswizzle"]


@functools.lru_cache(maxsize=1024)
def flashinfer_tile_starts(arch: str, *, groups: int) -> Launches:
    """First scale tile of each range by FlashInfer's rule, and a 1.

    Buffers ``row_offsets`` (int32), ``tile_starts, one``.
    """
    program = FLASHINFER_TILE_STARTS.program(OFFSETS="int32")
    args = ("row_offsets", "tile_starts", "one", groups)
    grid = at_least_one((ceil_div(groups, THREADS), 1, 1))
    return (Launch(program, grid, (THREADS, 1, 1), 0, args),)


@functools.lru_cache(maxsize=1024)
def pad_offsets(arch: str, *, groups: int, rows: int) -> Launches:
    """Offsets of ranges of a multiple of four rows; ``row_offsets, padded, destinations``."""
    args = ("row_offsets", "padded", "destinations", groups, rows)
    grid = at_least_one((groups, 1, 1))
    return (Launch(PAD_OFFSETS.program(OFFSETS="int32"), grid, (32, 1, 1), 0, args),)


@functools.lru_cache(maxsize=1024)
def swizzle(
    arch: str, *, rows: int, blocks: int, batches: int, tile: int, itemsize: int
) -> Launches:
    """Scales [batches, rows, blocks] to tiles of `tile` rows by 4 blocks; ``scales, out``."""
    k_tiles, all_rows = ceil_div(blocks, TILE_BLOCKS), ceil_div(rows, tile) * tile
    block = block_for(k_tiles, all_rows)
    grid = grid_for(block, k_tiles, all_rows, batches)
    args = ("scales", "out", rows, blocks, batches)
    return (Launch(SWIZZLE.program(TILE=tile, ITEM=itemsize), grid, block, 0, args),)


@functools.lru_cache(maxsize=1024)
def unswizzle(arch: str, *, rows: int, blocks: int) -> Launches:
    """Scales in tiles of 8 rows by 4 blocks to rows [rows, blocks]; buffers ``scales, out``."""
    k_tiles = ceil_div(blocks, TILE_BLOCKS)
    block = block_for(k_tiles, rows)
    args = ("scales", "out", rows, blocks)
    return (Launch(UNSWIZZLE.program(TILE=8), grid_for(block, k_tiles, rows), block, 0, args),)
