"""Plans of values and of layouts of scales; ``nvfp4.plans`` has all plans."""

from __future__ import annotations

import functools

from .formats import FORMATS, PREPARED
from .kernels.dequantize import DEQUANTIZE, GROUPED_DEQUANTIZE
from .kernels.interleave import DEINTERLEAVE, INTERLEAVE
from .launch import Launch
from .layouts import TILE_BLOCKS, TILE_ROWS, allocated_tiles
from .tiling import PIECE, Launches, across, block_for, ceil_div, check_rows, grid_for

__all__ = ["deinterleave_scales", "dequantize", "interleave_scales"]


@functools.lru_cache(maxsize=1024)
def dequantize(
    arch: str,
    *,
    format: str,
    rows: int,
    columns: int,
    batches: int,
    scale_layout: str,
    dtype: str,
    decode: str,
    groups: int | None,
    tiles: int | None,
    offsets_dtype: str | None,
    starts_dtype: str | None,
    aligned: bool = False,
) -> Launches:
    """Values of a stack of matrices [batches, rows, columns], or of a grouped tensor.

    Parameters
    ----------
    arch, format, rows, columns, batches
        As in :func:`quantize`.
    scale_layout : {"linear", "tcgen", "sm90"}
    dtype : {"bfloat16", "float16", "float32"}
        Of ``out``.
    decode : {"scalar", "batch", "row", "batch_row", "group"}
        What ``decode_scale`` has one of; "row" and "batch_row" are the same.
    groups : int or None
        Ranges of a grouped tensor, None for a dense one.
    tiles : int or None
        Row tiles of a grouped tensor's tcgen scales.
    offsets_dtype, starts_dtype : {"int32", "int64", "uint32"} or None
    aligned : bool
        Whether ``codes``, ``out`` and the scales of prepared weights are multiples of 16 bytes.

    Returns
    -------
    tuple of Launch
        Buffers ``codes, scales, decode_scale, row_offsets, tile_starts, out``.

    Raises
    ------
    UnsupportedError
        A grouped tensor of 2^32 rows or more.
    """
    if scale_layout == PREPARED:
        from .plans_prepare import dequantize_prepared

        return dequantize_prepared(format, rows, columns, batches, dtype, decode, aligned)
    fmt = FORMATS[format]
    pieces = columns // PIECE
    constants = {
        "ELEMENT": fmt.element,
        "SCALE": fmt.scale,
        "LAYOUT": scale_layout,
        "OUTPUT": dtype,
        "ALIGNED": aligned,
        "DECODE": "row" if decode == "batch_row" else decode,
    }
    if groups is None:
        block = block_for(pieces, rows)
        program = DEQUANTIZE.program(**constants)
        args = ("codes", "scales", "decode_scale", "out", rows, columns, batches)
        return (Launch(program, grid_for(block, pieces, rows, batches), block, 0, args),)
    check_rows(rows)
    block = block_for(pieces, TILE_ROWS)
    down = allocated_tiles(rows, groups)
    program = GROUPED_DEQUANTIZE.program(
        **constants, OFFSETS=offsets_dtype or "int32", STARTS=starts_dtype or "none"
    )
    buffers = ("codes", "scales", "decode_scale", "row_offsets", "tile_starts", "out")
    grid = (down, across(down, ceil_div(pieces, block[0])), 1)
    return (Launch(program, grid, block, 0, (*buffers, rows, columns, groups, tiles or 0)),)


@functools.lru_cache(maxsize=1024)
def interleave_scales(arch: str, *, rows: int, blocks: int, batches: int) -> Launches:
    """Linear scales [batches, rows, blocks] to the tcgen layout; buffers ``scales, out``."""
    k_tiles, all_rows = ceil_div(blocks, TILE_BLOCKS), ceil_div(rows, TILE_ROWS) * TILE_ROWS
    block = block_for(k_tiles, all_rows)
    grid = grid_for(block, k_tiles, all_rows, batches)
    args = ("scales", "out", rows, blocks, batches)
    return (Launch(INTERLEAVE.program(), grid, block, 0, args),)


@functools.lru_cache(maxsize=1024)
def deinterleave_scales(arch: str, *, rows: int, blocks: int, batches: int) -> Launches:
    """Scales in the tcgen layout to linear ones [batches, rows, blocks]; ``scales, out``."""
    k_tiles = ceil_div(blocks, TILE_BLOCKS)
    block = block_for(k_tiles, rows)
    grid = grid_for(block, k_tiles, rows, batches)
    args = ("scales", "out", rows, blocks, batches)
    return (Launch(DEINTERLEAVE.program(), grid, block, 0, args),)
