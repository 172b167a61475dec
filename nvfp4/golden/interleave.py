"""Linear scales to the tcgen layout and back.

Source: section 5 of the arithmetic definition.
"""

from __future__ import annotations

import numpy as np

from ..layouts import TILE_BLOCKS, TILE_ROWS, scale_k_tiles, scale_tiles

__all__ = ["deinterleave_scales", "interleave_scales"]


def interleave_scales(scales: np.ndarray) -> np.ndarray:
    """Linear scales in the tcgen layout, padding as byte 0.

    Parameters
    ----------
    scales : numpy.ndarray of uint8, [M, blocks] or [E, M, blocks]

    Returns
    -------
    numpy.ndarray of uint8, [ceil(M/128), ceil(blocks/4), 32, 4, 4], with a leading E if given
    """
    *lead, rows, blocks = scales.shape
    tiles, k_tiles = scale_tiles(rows), scale_k_tiles(blocks)
    padded = np.zeros((*lead, tiles * TILE_ROWS, k_tiles * TILE_BLOCKS), np.uint8)
    padded[..., :rows, :blocks] = scales
    # Row r is (tile, quarter, lane) = (r // 128, r % 128 // 32, r % 32).
    by_tile = padded.reshape(*lead, tiles, 4, 32, k_tiles, 4)
    n = len(lead)
    order = (*range(n), n, n + 3, n + 2, n + 1, n + 4)
    return np.ascontiguousarray(by_tile.transpose(order))


def deinterleave_scales(scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The linear scales that a tcgen buffer holds; its padding is not looked at.

    Parameters
    ----------
    scales : numpy.ndarray of uint8, [tiles, ceil(blocks/4), 32, 4, 4], with a leading E if any
    shape : (rows, blocks)
        What of it is wanted.

    Returns
    -------
    numpy.ndarray of uint8, [rows, blocks], with a leading E if given
    """
    rows, blocks = shape
    *lead, tiles, k_tiles, _, _, _ = scales.shape
    n = len(lead)
    order = (*range(n), n, n + 3, n + 2, n + 1, n + 4)
    linear = scales.transpose(order).reshape(*lead, tiles * TILE_ROWS, k_tiles * TILE_BLOCKS)
    return np.ascontiguousarray(linear[..., :rows, :blocks])
