"""Shapes and byte offsets of codes, scales and group tiles: index arithmetic, nothing else.

Source: sections 1, 5 and 6 of the arithmetic definition. The functions take Python ints; those
that say so take NumPy arrays too, element by element.

The ``"tcgen"`` layout stores the scales of 128 rows by 4 blocks as one tile of 512 bytes, row r and
block b at byte ``(r % 32) * 16 + (r % 128) // 32 * 4 + b % 4`` of its tile, tiles row-major.

The ``"sm90"`` layout of prepared weights stores stripes of 16 rows by 64 columns; it is described
in docs/decisions.md, D13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .formats import PREPARED, TENSOR_LAYOUTS, BlockFormat

__all__ = [
    "PREPARED_BIAS",
    "PREPARED_COLUMNS",
    "PREPARED_HEADER",
    "PREPARED_ROWS",
    "TILE_BLOCKS",
    "TILE_BYTES",
    "TILE_ROWS",
    "allocated_tiles",
    "block_count",
    "codes_shape",
    "prepared_grid",
    "prepared_record",
    "scale_k_tiles",
    "scale_shape",
    "scale_tiles",
    "tcgen_offset",
    "tile_starts",
]

TILE_ROWS = 128
TILE_BLOCKS = 4
TILE_BYTES = 512

#: Rows and columns of a stripe of prepared weights.
PREPARED_ROWS = 16
PREPARED_COLUMNS = 64
#: Bytes before the scales of each prepared matrix.
PREPARED_HEADER = 16
#: Element type -> what is added to an e8m0 scale: a prepared code, read as a bfloat16, is the
#: element times 2^-bias.
PREPARED_BIAS = {"e2m1": 126, "e4m3": 120, "e5m2": 112}


def block_count(format: BlockFormat, columns: int) -> int:
    """Blocks in a row of ``columns`` elements.

    Raises
    ------
    ValueError
        ``columns`` is not a multiple of the format's block: the last block may not be partial.
    """
    if columns % format.block:
        raise ValueError(
            f"the last axis (K) must be a multiple of {format.block} for {format.name}, "
            f"whose blocks have {format.block} elements; got K = {columns}"
        )
    return columns // format.block


def scale_tiles(rows: Any) -> Any:
    """Tiles of 128 rows that ``rows`` rows (an int or an integer array) take."""
    return (rows + TILE_ROWS - 1) // TILE_ROWS


def scale_k_tiles(blocks: Any) -> Any:
    """Tiles of 4 blocks that ``blocks`` blocks (an int or an integer array) take."""
    return (blocks + TILE_BLOCKS - 1) // TILE_BLOCKS


def tcgen_offset(row: Any, block: Any, k_tiles: Any) -> Any:
    """Byte offset of the scale of (``row``, ``block``) in the tcgen layout.

    Parameters
    ----------
    row, block : int or integer array
        Row of the matrix and block of 16 or 32 columns in it.
    k_tiles : int
        Tiles of 4 blocks in a row: ``ceil(K / (4 * V))``.

    Returns
    -------
    int or integer array
        ``((row // 128) * k_tiles + block // 4) * 512 + (row % 32) * 16
        + (row % 128) // 32 * 4 + block % 4``
    """
    tile = (row // TILE_ROWS) * k_tiles + block // TILE_BLOCKS
    within = (row % 32) * 16 + (row % TILE_ROWS) // 32 * 4 + block % TILE_BLOCKS
    return tile * TILE_BYTES + within


def prepared_grid(shape: Sequence[int]) -> tuple[int, int]:
    """Stripes of 16 rows, and of 64 columns, of a matrix (of a stack) in the sm90 layout."""
    rows, columns = shape[-2:]
    return -(-rows // PREPARED_ROWS), -(-columns // PREPARED_COLUMNS)


def prepared_record(format: BlockFormat) -> int:
    """Bytes of the scales of a stripe: 32 for blocks of 32 elements, 64 for blocks of 16."""
    return PREPARED_ROWS * (PREPARED_COLUMNS // format.block)


def codes_shape(
    format: BlockFormat, shape: Sequence[int], layout: str = "linear"
) -> tuple[int, ...]:
    """Shape of the uint8 codes of a tensor of logical ``shape`` ``[..., K]``.

    Parameters
    ----------
    format : BlockFormat
    shape : sequence of int
        ``[..., K]``; ``[N, K]`` or ``[E, N, K]`` for ``"sm90"``.
    layout : {"linear", "tcgen", "sm90"}
        Only the last one has codes of another shape: ``[ceil(N/16), ceil(K/64), 512 or 1024]``,
        with a leading E if there is one.

    Raises
    ------
    ValueError
        ``shape`` has no axis, or a number of axes that the layout does not take, or K is not a
        multiple of the block.
    """
    shape = _at_least_one_axis(shape)
    block_count(format, shape[-1])
    if layout == PREPARED:
        _check_matrices(shape, layout)
        stripe = PREPARED_ROWS * PREPARED_COLUMNS // format.codes_per_byte
        return (*shape[:-2], *prepared_grid(shape), stripe)
    return (*shape[:-1], shape[-1] // format.codes_per_byte)


def scale_shape(format: BlockFormat, shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Shape of the uint8 scales of a tensor of logical ``shape`` ``[..., K]``.

    Parameters
    ----------
    format : BlockFormat
    shape : sequence of int
        ``[..., K]`` for ``"linear"``; ``[M, K]`` or ``[E, M, K]`` for the others.
    layout : {"linear", "tcgen", "sm90"}

    Returns
    -------
    tuple of int
        ``[..., K/V]``, or ``[ceil(M/128), ceil(K/(4V)), 32, 4, 4]`` with a leading E if there is
        one (each matrix is laid out by itself). A grouped result has ``allocated_tiles`` row
        tiles instead. For ``"sm90"`` one axis of ``16 + ceil(M/16) * ceil(K/64) * 1024/V`` bytes,
        with a leading E if there is one.

    Raises
    ------
    ValueError
        Unknown layout, a number of axes that it does not take, or K not a multiple of the block.
    """
    shape = _at_least_one_axis(shape)
    blocks = block_count(format, shape[-1])
    if layout == "linear":
        return (*shape[:-1], blocks)
    if layout not in TENSOR_LAYOUTS:
        allowed = ", ".join(repr(name) for name in TENSOR_LAYOUTS)
        raise ValueError(f"scale_layout must be one of {allowed}; got {layout!r}")
    _check_matrices(shape, layout)
    if layout == PREPARED:
        down, across = prepared_grid(shape)
        return (*shape[:-2], PREPARED_HEADER + down * across * prepared_record(format))
    return (*shape[:-2], scale_tiles(shape[-2]), scale_k_tiles(blocks), 32, 4, 4)


def allocated_tiles(rows: int, groups: int) -> int:
    """Row tiles that always suffice for ``rows`` rows in ``groups`` ranges.

    Each range starts on a fresh tile, so its last one may be partly used; this bound,
    ``ceil(rows / 128) + min(groups, rows)``, needs no look at the offsets.
    """
    tiles: int = scale_tiles(rows) + min(groups, rows)
    return tiles


def tile_starts(row_offsets: Any) -> np.ndarray:
    """First scale tile of each range.

    Parameters
    ----------
    row_offsets : array_like of int, [G+1]

    Returns
    -------
    numpy.ndarray of int32, [G]
        The sum of ``ceil(n_j / 128)`` over the ranges j before it.
    """
    offsets = np.asarray(row_offsets, dtype=np.int64)
    ends = np.cumsum(scale_tiles(np.diff(offsets)))
    starts = np.zeros(max(offsets.size - 1, 0), dtype=np.int32)
    starts[1:] = ends[:-1]
    return starts


def _check_matrices(shape: tuple[int, ...], layout: str) -> None:
    if len(shape) not in (2, 3):
        raise ValueError(
            f"scale_layout {layout!r} takes [M, K] or [E, M, K] (scale_layout 'linear' takes any "
            f"number of axes); got shape {tuple(shape)}"
        )


def _at_least_one_axis(shape: Sequence[int]) -> tuple[int, ...]:
    shape = tuple(int(n) for n in shape)
    if not shape:
        raise ValueError("an array with at least one axis is needed; got a scalar (shape ())")
    return shape
