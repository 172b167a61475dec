"""From codes and scales back to values.

Source: section 4 of the arithmetic definition: value = element * f32(scale) * decode_scale, where
the first product is exact (or overflows) and the second rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..formats import PREPARED, BlockFormat
from ..layouts import TILE_ROWS, block_count
from .casts import E2M1_TABLE, ELEMENT_TABLES, SCALE_TABLES, cast_float
from .grouped import Rows, assign_rows
from .interleave import deinterleave_scales
from .prepare import unprepare_weights

__all__ = ["dequantize", "element_scale_product"]

# Values of the two elements of a byte, the low nibble first.
_E2M1_PAIRS = np.stack([np.tile(E2M1_TABLE, 16), np.repeat(E2M1_TABLE, 16)], axis=1)
_PIECE = 1 << 17  # elements of a piece, so that it stays in the cache


def element_scale_product(
    codes: np.ndarray,
    scales: np.ndarray,
    fmt: BlockFormat,
    *,
    shape: Sequence[int],
    scale_layout: str,
    row_offsets: Any = None,
    tile_starts: Any = None,
) -> np.ndarray:
    """Element * f32(scale), the operand of the products; exact unless it overflows.

    Parameters are those of `dequantize`.

    Returns
    -------
    numpy.ndarray of float32, [..., K]
        0 in rows of a grouped result that no range covers.
    """
    where = _rows_of(shape, row_offsets, tile_starts)
    return _zero_uncovered(_products(codes, scales, fmt, tuple(shape), scale_layout, where), where)


def dequantize(
    codes: np.ndarray,
    scales: np.ndarray,
    decode_scale: Any,
    fmt: BlockFormat,
    *,
    shape: Sequence[int],
    scale_layout: str,
    dtype: Any = "float32",
    row_offsets: Any = None,
    tile_starts: Any = None,
) -> np.ndarray:
    """Values of a quantised array.

    Parameters
    ----------
    codes : numpy.ndarray of uint8, [..., K/2] or [..., K]
        Stripes, of prepared weights.
    scales : numpy.ndarray of uint8
        [..., K/V] linear, or tcgen tiles, or those of prepared weights.
    decode_scale : float32 of shape (), [M, 1] by row; [E] or [E, N, 1] for a stack of matrices;
        [G] or [R, 1] for a grouped result. A multiplier.
    fmt : BlockFormat
    shape : sequence of int
        Logical shape [..., K].
    scale_layout : {"linear", "tcgen", "sm90"}
    dtype : str or numpy.dtype
        "float32", "float16" or "bfloat16": rounded to nearest even, overflow to infinity.
    row_offsets : array_like of int, [G+1], optional
        Given for a grouped result. Rows that no range covers are 0.
    tile_starts : array_like of int, [G], optional
        First scale tile of each range, where it is not the usual one.

    Returns
    -------
    numpy.ndarray of ``dtype``, [..., K]
    """
    shape = tuple(shape)
    where = _rows_of(shape, row_offsets, tile_starts)
    values = _products(codes, scales, fmt, shape, scale_layout, where)
    factor = _row_factors(decode_scale, shape, where)
    if factor.ndim or factor != 1:
        with np.errstate(all="ignore"):
            np.multiply(values, factor, out=values)
    return cast_float(_zero_uncovered(values, where), dtype)


def _rows_of(shape: Sequence[int], row_offsets: Any, tile_starts: Any) -> Rows | None:
    if row_offsets is None:
        return None
    return assign_rows(shape[0], row_offsets, tile_starts=tile_starts)


def _products(
    codes: np.ndarray,
    scales: np.ndarray,
    fmt: BlockFormat,
    shape: tuple[int, ...],
    scale_layout: str,
    where: Rows | None,
) -> np.ndarray:
    """Element * f32(scale), anything in rows that no range covers."""
    out = np.empty(shape, np.float32)
    blocks = block_count(fmt, shape[-1])
    if not out.size:
        return out
    if scale_layout == PREPARED:
        codes, scales = unprepare_weights(codes, scales, fmt, shape=shape)
    elif scale_layout == "tcgen" and where is None:
        scales = deinterleave_scales(scales, (shape[-2], blocks))
    elif scale_layout == "tcgen" and where is not None:
        scales = deinterleave_scales(scales, (scales.shape[0] * TILE_ROWS, blocks))
        covered = where.scale_row >= 0
        linear = np.zeros((len(covered), blocks), np.uint8)
        linear[covered] = scales[where.scale_row[covered]]
        scales = linear
    by_row = out.reshape(-1, blocks, fmt.block)
    codes = codes.reshape(by_row.shape[0], -1)
    scales = scales.reshape(-1, blocks)
    elements = _E2M1_PAIRS if fmt.codes_per_byte == 2 else ELEMENT_TABLES[fmt.element]
    factors = SCALE_TABLES[fmt.scale]
    step = max(1, _PIECE // shape[-1])
    with np.errstate(all="ignore"):
        for row in range(0, by_row.shape[0], step):
            some = slice(row, row + step)
            values = elements[codes[some]].reshape(-1, blocks, fmt.block)
            np.multiply(values, factors[scales[some]][..., None], out=by_row[some])
    return out


def _zero_uncovered(values: np.ndarray, where: Rows | None) -> np.ndarray:
    if where is not None:
        values[where.range_of < 0] = 0
    return values


def _row_factors(decode_scale: Any, shape: tuple[int, ...], where: Rows | None) -> np.ndarray:
    """Decode scales in a shape that broadcasts against [..., K]."""
    factor = np.asarray(decode_scale, dtype=np.float32)
    if factor.ndim != 1:
        return factor
    if where is not None:
        covered = where.range_of >= 0
        by_row = np.ones((shape[0], 1), np.float32)
        by_row[covered, 0] = factor[where.range_of[covered]]
        return by_row
    return factor.reshape(-1, 1, 1) if len(shape) == 3 else factor.reshape(())
