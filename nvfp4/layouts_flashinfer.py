"""Where FlashInfer has the scales of groups, and its 8x4 layout: index arithmetic.

Its 128x4 layout is ``layouts``' tcgen. The 8x4 one has tiles of 8 rows by 4 blocks, row-major, and
is row-major within a tile: row r and block b of KT tiles across at byte ``(r // 8 * KT + b // 4) *
32 + r % 8 * 4 + b % 4``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .layouts import TILE_ROWS

__all__ = [
    "SMALL_TILE_ROWS",
    "flashinfer_tile_starts",
    "flashinfer_tiles",
]

#: Rows of a tile of the 8x4 layout.
SMALL_TILE_ROWS = 8


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
