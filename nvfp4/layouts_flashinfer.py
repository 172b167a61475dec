"""FlashInfer's 8x4 layout of block scales, and where it has the scales of groups: index arithmetic.

Its 128x4 layout is ``layouts``' tcgen.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .layouts import TILE_BLOCKS, TILE_ROWS

__all__ = [
    "SMALL_TILE_ROWS",
    "flashinfer_tile_starts",
    "flashinfer_tiles",
    "small_tile_offset",
]

SMALL_TILE_ROWS = 8


def small_tile_offset(row: Any, block: Any, k_tiles: Any) -> Any:
    """Byte offset of the scale of (``row``, ``block``) in the 8x4 layout.

    Tiles of 8 rows by 4 blocks, row-major, and row-major within: ``((row // 8) * k_tiles + block //
    4) * 32 + (row % 8) * 4 + block % 4``. Parameters as in :func:`nvfp4.layouts.tcgen_offset`.
    """
    tile = (row // SMALL_TILE_ROWS) * k_tiles + block // TILE_BLOCKS
    return tile * SMALL_TILE_ROWS * TILE_BLOCKS + row % SMALL_TILE_ROWS * TILE_BLOCKS + block % 4


def flashinfer_tile_starts(row_offsets: Any) -> np.ndarray:
    """First scale tile of each range where FlashInfer's grouped products look for it.

    Range i has the scale rows from ``floor((row_offsets[i] + 127 * i) / 128) * 128`` on: no sum
    over the ranges before it, and at least ``ceil(n_i / 128)`` tiles of its own.

    Parameters
    ----------
    row_offsets : array_like of int, [G+1]

    Returns
    -------
    numpy.ndarray of int32, [G]
    """
    starts = np.asarray(row_offsets, dtype=np.int64)[:-1]
    return ((starts + 127 * np.arange(starts.size)) // TILE_ROWS).astype(np.int32)


def flashinfer_tiles(rows: int, groups: int) -> int:
    """Row tiles that FlashInfer's callers allocate for ``rows`` rows in ``groups`` ranges."""
    return (rows + 127 * groups) // TILE_ROWS
