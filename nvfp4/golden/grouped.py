"""Quantisation by ranges of rows, one range an expert.

Source: section 6 of the arithmetic definition. The bytes of a range are those of quantising it
alone; only where its scale tiles lie depends on the other ranges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..formats import BlockFormat
from ..layouts import (
    TILE_ROWS,
    allocated_tiles,
    block_count,
    scale_tiles,
)
from ..layouts import tile_starts as default_tile_starts
from .interleave import interleave_scales
from .quantize import quantize_rows
from .scales import decode_scale_of, effective_encode_scale, row_amax_encode_scale

__all__ = ["Rows", "assign_rows", "gather_rows", "grouped_quantize"]


class Rows(NamedTuple):
    """Which range, expert and scale row each row belongs to; all arrays are int64 [R]."""

    range_of: np.ndarray  # -1 for rows that no range covers
    expert: np.ndarray  # -1 for rows that no range covers, or whose range is switched off
    scale_row: np.ndarray  # row of the tile buffer; -1 for rows that no range covers


def assign_rows(
    rows: int,
    row_offsets: Any,
    expert_ids: Any = None,
    experts: int | None = None,
    tile_starts: Any = None,
) -> Rows:
    """Range, expert and scale row of each of ``rows`` rows.

    Parameters
    ----------
    rows : int
        R, the rows of the result.
    row_offsets : array_like of int, [G+1]
        Non-decreasing, from 0.
    expert_ids : array_like of int, [G], optional
        Default: range i belongs to expert i. A negative id, or one from ``experts`` on, switches
        the range off.
    experts : int, optional
        E; without it every id from 0 on is an expert.
    tile_starts : array_like of int, [G], optional
        First scale tile of each range; default ``layouts.tile_starts``.
    """
    offsets = np.asarray(row_offsets, dtype=np.int64)
    ids = range_experts(offsets.size - 1, expert_ids, experts)
    starts = default_tile_starts(offsets) if tile_starts is None else np.asarray(tile_starts)
    row = np.arange(rows, dtype=np.int64)
    # Among ranges that begin at the same row only the last can have rows.
    range_of = np.searchsorted(offsets, row, side="right") - 1
    range_of[range_of >= ids.size] = -1
    covered = range_of >= 0
    within = row - offsets[range_of]
    if not ids.size:
        return Rows(range_of, range_of.copy(), range_of.copy())
    scale_row = TILE_ROWS * starts.astype(np.int64)[range_of] + within
    return Rows(range_of, np.where(covered, ids[range_of], -1), np.where(covered, scale_row, -1))


def range_experts(groups: int, expert_ids: Any, experts: int | None) -> np.ndarray:
    """Expert of each range, int64 [G], -1 where the range is switched off."""
    if expert_ids is None:
        ids = np.arange(groups, dtype=np.int64)
    else:
        ids = np.asarray(expert_ids, dtype=np.int64)
    off = ids < 0
    if experts is not None:
        off |= ids >= experts
    return np.where(off, -1, ids)


def gather_rows(x: np.ndarray, row_indices: Any, wanted: np.ndarray) -> np.ndarray:
    """Rows of x for the result, zero where not ``wanted`` or where the index is out of range.

    Parameters
    ----------
    x : numpy.ndarray, [M, K]
    row_indices : array_like of int, [R], or None
        None: row r of the result is row r of x.
    wanted : numpy.ndarray of bool, [R]

    Returns
    -------
    numpy.ndarray, [R, K], x itself where nothing is to be done
    """
    if row_indices is None:
        if wanted.all():
            return x
        source = np.arange(len(wanted))
    else:
        source = np.asarray(row_indices, dtype=np.int64)
        wanted = wanted & (source >= 0) & (source < x.shape[0])
    out = np.zeros((len(wanted), x.shape[1]), x.dtype)
    out[wanted] = x[source[wanted]]
    return out


def grouped_quantize(
    x: np.ndarray,
    fmt: BlockFormat,
    *,
    row_offsets: Any,
    expert_ids: Any = None,
    row_indices: Any = None,
    encode_scale: Any = None,
    scale_rounding: str = "rceil",
    scale_layout: str = "tcgen",
    tile_starts: Any = None,
    tiles: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, block scales and decode scales of ranges of rows.

    Parameters
    ----------
    x : numpy.ndarray of float32, float16 or bfloat16, [M, K]
    fmt : BlockFormat
    row_offsets : array_like of int, [G+1]
        Range i is rows row_offsets[i] to row_offsets[i+1] - 1 of the R rows of the result.
    expert_ids : array_like of int, [G], optional
        Expert of each range; negative, or not below len(encode_scale): switched off.
    row_indices : array_like of int, [R], optional
        Row r of the result reads row row_indices[r] of x; out of range gives zeros. Default R = M.
    encode_scale : None, "row_amax", or float32 of shape (), [E] by expert, [R, 1] by row
        What is not finite or is below 2^-126 counts as 1.
    scale_rounding : {"rceil", "floor", "ceil", "even"}
    scale_layout : {"linear", "tcgen"}
    tile_starts : array_like of int, [G], optional
        First scale tile of each range; default ``layouts.tile_starts(row_offsets)``.
    tiles : int, optional
        Row tiles of the tcgen buffer; default ``layouts.allocated_tiles``, or as many as
        ``tile_starts`` needs if that is more.

    Returns
    -------
    codes : numpy.ndarray of uint8, [R, K/2] or [R, K]
        Zero in rows of a switched-off range and in rows that no range covers.
    scales : numpy.ndarray of uint8, [tiles, ceil(K/(4V)), 32, 4, 4] or [R, K/V]
        Zero wherever no row has a scale.
    decode_scale : numpy.ndarray of float32, [G], or [R, 1] for encode scales by row
        1 for a switched-off range.
    """
    offsets = np.asarray(row_offsets, dtype=np.int64)
    rows = x.shape[0] if row_indices is None else len(row_indices)
    groups = offsets.size - 1
    g = None
    if encode_scale is not None and not isinstance(encode_scale, str):
        g = effective_encode_scale(encode_scale)
    experts = len(g) if g is not None and g.ndim == 1 else None
    ids = range_experts(groups, expert_ids, experts)
    where = assign_rows(rows, offsets, ids, None, tile_starts)
    live = where.expert >= 0
    routed = gather_rows(x, row_indices, live)

    row_g, decode = _row_encode_scales(routed, fmt, encode_scale, g, ids, where)

    # Rows of zeros have zero codes and zero scales in every format.
    codes, linear = quantize_rows(routed, fmt, row_g, scale_rounding)
    if scale_layout == "linear":
        return codes, linear, decode
    if tiles is None:
        tiles = _tiles_needed(rows, offsets, tile_starts)
    scale_rows = np.zeros((tiles * TILE_ROWS, block_count(fmt, x.shape[1])), np.uint8)
    scale_rows[where.scale_row[live]] = linear[live]
    return codes, interleave_scales(scale_rows), decode


def _row_encode_scales(
    routed: np.ndarray,
    fmt: BlockFormat,
    encode_scale: Any,
    g: np.ndarray | None,
    ids: np.ndarray,
    where: Rows,
) -> tuple[np.ndarray | None, np.ndarray]:
    """Encode scale of each row [R] (None for 1), and the decode scale [G] or [R, 1]."""
    one, live = np.float32(1), where.expert >= 0
    by_row_shape = (len(live), 1)
    by_row = isinstance(encode_scale, str) or (g is not None and g.ndim == 2)
    without = encode_scale is None or isinstance(encode_scale, str)
    if fmt.scale == "e8m0" and (without or fmt.element != "e2m1"):
        return None, np.ones(by_row_shape if by_row else len(ids), np.float32)
    if isinstance(encode_scale, str):
        rows = row_amax_encode_scale(routed, fmt)
        return rows.reshape(-1), decode_scale_of(rows)
    if g is None:
        return None, np.ones(len(ids), np.float32)
    if by_row:
        rows = np.where(live[:, None], g, one)
        return rows.reshape(-1), decode_scale_of(rows)
    ranges, on = np.ones(len(ids), np.float32), ids >= 0
    ranges[on] = g[ids[on]] if g.ndim else g  # of no experts there may be none to look at
    row_g = np.ones(len(live), np.float32)
    row_g[live] = ranges[where.range_of[live]]
    return row_g, decode_scale_of(ranges)


def _tiles_needed(rows: int, offsets: np.ndarray, tile_starts: Any) -> int:
    tiles: int = allocated_tiles(rows, offsets.size - 1)
    if tile_starts is not None and offsets.size > 1:
        ends = np.asarray(tile_starts, np.int64) + scale_tiles(np.diff(offsets))
        tiles = max(tiles, int(ends.max()))
    return tiles
