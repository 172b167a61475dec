"""Linear scales to the tcgen layout and back, and to FlashInfer's layout of 8 rows.

Source: section 5 of the arithmetic definition.
"""

from __future__ import annotations

import numpy as np

from ..layouts import TILE_BLOCKS, TILE_ROWS, scale_k_tiles, scale_tiles
from ..layouts_flashinfer import SMALL_TILE_ROWS

__all__ = [
    "deinterleave_scales",
    "deinterleave_small_tiles",
    "interleave_scales",
    "interleave_small_tiles",
]


def interleave_scales(scales: np.ndarray) -> np.ndarray:
    """Linear scales in the tcgen layout, padding as byte 0.

    Parameters
    ----------
    scales : numpy.ndarray of uint8, [M, blocks] or [E, M, blocks]
        Elements of two bytes (FlashInfer's bfloat16) as uint16.

    Returns
    -------
    numpy.ndarray of the same dtype, [ceil(M/128), ceil(blocks/4), 32, 4, 4], with a leading E if
    given
    """
    *lead, rows, blocks = scales.shape
    tiles, k_tiles = scale_tiles(rows), scale_k_tiles(blocks)
    padded = np.zeros((*lead, tiles * TILE_ROWS, k_tiles * TILE_BLOCKS), scales.dtype)
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


def interleave_small_tiles(scales: np.ndarray) -> np.ndarray:
    """Linear scales in FlashInfer's 8x4 layout, padding as byte 0.

    Parameters
    ----------
    scales : numpy.ndarray of uint8, [M, blocks]

    Returns
    -------
    numpy.ndarray of uint8, [ceil(M/8), ceil(blocks/4), 8, 4]
    """
    rows, blocks = scales.shape
    tiles, k_tiles = -(-rows // SMALL_TILE_ROWS), scale_k_tiles(blocks)
    padded = np.zeros((tiles * SMALL_TILE_ROWS, k_tiles * TILE_BLOCKS), np.uint8)
    padded[:rows, :blocks] = scales
    by_tile = padded.reshape(tiles, SMALL_TILE_ROWS, k_tiles, TILE_BLOCKS)
    return np.ascontiguousarray(by_tile.transpose(0, 2, 1, 3))


def deinterleave_small_tiles(scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The linear scales [rows, blocks] that a buffer in the 8x4 layout holds.

    Parameters
    ----------
    scales : numpy.ndarray of uint8, [ceil(rows/8), ceil(blocks/4), 8, 4]
    shape : (rows, blocks)
    """
    rows, blocks = shape
    tiles, k_tiles, _, _ = scales.shape
    linear = scales.transpose(0, 2, 1, 3).reshape(tiles * SMALL_TILE_ROWS, k_tiles * TILE_BLOCKS)
    return np.ascontiguousarray(linear[:rows, :blocks])
