"""Matrix products, in the order of the naive kernel.

Source: section 7 of the arithmetic definition: k ascending, each term RN((a * sa) * (b * sb)),
added with one rounding; then the sum times alpha' = RN(RN(alpha * dA) * dB), the epilogue and
the cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .casts import cast_float, widen
from .grouped import assign_rows, range_experts

__all__ = ["grouped_matmul", "matmul"]

# A tile of sums and one of terms stay in the second-level cache.
_TILE = 1 << 15
_TILE_COLUMNS = 1 << 10


def matmul(
    a: np.ndarray,
    b: np.ndarray,
    *,
    alpha: Any = 1.0,
    decode_a: Any = None,
    decode_b: Any = None,
    out_dtype: Any = "float32",
    epilogue: Callable[..., Any] | None = None,
) -> np.ndarray:
    """A times b transposed.

    Parameters
    ----------
    a : numpy.ndarray, [M, K]
        float32 holding element * scale (``element_scale_product``), or plain bfloat16 or float16.
    b : numpy.ndarray, [N, K]
    alpha : float32 of shape ()
    decode_a, decode_b : float32 of shape (), [M, 1] and [N, 1] by row, or None for 1
    out_dtype : str or numpy.dtype
        "float32", "float16" or "bfloat16": rounded to nearest even, overflow to infinity.
    epilogue : callable, optional
        ``epilogue(values, rows, columns, expert)`` gets the float32 values [M, N] before the cast,
        the int64 index arrays [M, 1] and [1, N] and the expert 0, and returns values.

    Returns
    -------
    numpy.ndarray of ``out_dtype``, [M, N] (or what the epilogue makes of the columns)
    """
    with np.errstate(all="ignore"):
        factor = _factor(alpha, decode_a, decode_b)
        values = _sums(widen(a), widen(b))
        np.multiply(values, factor, out=values)
        if epilogue is not None:
            rows = np.arange(a.shape[0], dtype=np.int64)
            values = _apply(epilogue, values, rows, 0)
        return cast_float(values, out_dtype)


def grouped_matmul(
    a: np.ndarray,
    b: np.ndarray,
    *,
    row_offsets: Any = None,
    expert_ids: Any = None,
    row_indices: Any = None,
    row_counts: Any = None,
    alpha: Any = None,
    decode_a: Any = None,
    decode_b: Any = None,
    out_dtype: Any = "float32",
    epilogue: Callable[..., Any] | None = None,
) -> np.ndarray:
    """The product of each range of rows with the matrix of its expert.

    Parameters
    ----------
    a : numpy.ndarray, [R, K], or [M, K] with ``row_indices``, or [E, C, K] with ``row_counts``
        float32 holding element * scale, or plain bfloat16 or float16.
    b : numpy.ndarray, [E, N, K]
    row_offsets : array_like of int, [G+1], optional
        Missing with ``row_counts``.
    expert_ids : array_like of int, [G], optional
        Default: range i belongs to expert i. Negative, or not below E: switched off.
    row_indices : array_like of int, [R], optional
        Row r of the result reads row row_indices[r] of ``a``.
    row_counts : array_like of int, [E], optional
        Of matrix e of ``a`` only the first rows count, so many. Below 0 counts as 0, and beyond C
        as C.
    alpha : float32 of shape () or [E], or None for 1
    decode_a : float32 of shape (), [G] by range, [M, 1] by row of ``a``, or None for 1
        With ``row_counts`` [E] or [E, C, 1].
    decode_b : float32 of shape (), [E], [E, N, 1], or None for 1
    out_dtype : str or numpy.dtype
    epilogue : callable, optional
        ``epilogue(values, rows, columns, expert)`` as in `matmul`, called for each range with the
        rows of the whole result and the range's expert, an int. With ``row_counts`` row r of
        matrix e is row e * C + r.

    Returns
    -------
    numpy.ndarray of ``out_dtype``, [R, N] (or what the epilogue makes of the columns)
        Zero in rows of a switched-off range, rows that no range covers, and rows whose index is
        out of range; the epilogue does not see these. With ``row_counts`` [E, C, N], zero behind
        the counts.
    """
    if row_counts is not None:
        more = (alpha, decode_a, decode_b, out_dtype, epilogue)
        return _counted(a, b, np.asarray(row_counts).astype(np.int64), *more)
    rows = a.shape[0] if row_indices is None else len(row_indices)
    source = np.arange(rows) if row_indices is None else np.asarray(row_indices, dtype=np.int64)
    readable = (source >= 0) & (source < a.shape[0])
    groups = np.asarray(row_offsets).size - 1
    ids = range_experts(groups, expert_ids, b.shape[0])
    range_of = assign_rows(rows, row_offsets, ids).range_of
    alpha, decode_a, decode_b = (
        np.asarray(1 if s is None else s, dtype=np.float32) for s in (alpha, decode_a, decode_b)
    )
    out: np.ndarray | None = None
    with np.errstate(all="ignore"):
        for i, expert in enumerate(ids):
            mine = np.flatnonzero((range_of == i) & readable) if expert >= 0 else range_of[:0]
            if not mine.size:
                continue
            d_a = decode_a[source[mine]] if decode_a.ndim == 2 else _own(decode_a, i)
            factor = _factor(_own(alpha, expert), d_a, _own(decode_b, expert))
            values = _sums(widen(a[source[mine]]), widen(b[expert]))
            np.multiply(values, factor, out=values)
            if epilogue is not None:
                values = _apply(epilogue, values, mine, int(expert))
            if out is None:
                out = np.zeros((rows, values.shape[1]), np.float32)
            out[mine] = values
        if out is None:
            out = np.zeros((rows, _result_columns(epilogue, b.shape[1])), np.float32)
        return cast_float(out, out_dtype)


def _counted(
    a: np.ndarray,
    b: np.ndarray,
    counts: np.ndarray,
    alpha: Any,
    decode_a: Any,
    decode_b: Any,
    out_dtype: Any,
    epilogue: Callable[..., Any] | None,
) -> np.ndarray:
    """Two ranges of each matrix: the rows that count, and the others, which are switched off."""
    matrices, capacity, depth = a.shape
    first = np.arange(matrices, dtype=np.int64) * capacity
    last = first + np.clip(counts, 0, capacity)
    offsets = np.append(np.stack([first, last], axis=1), matrices * capacity)
    ids = np.stack([np.arange(matrices), np.full(matrices, -1)], 1).reshape(-1)
    by_range = None if decode_a is None else np.asarray(decode_a, dtype=np.float32)
    if by_range is not None and by_range.ndim:
        by_range = np.repeat(by_range, 2) if by_range.ndim == 1 else by_range.reshape(-1, 1)
    out = grouped_matmul(
        a.reshape(-1, depth),
        b,
        row_offsets=offsets,
        expert_ids=ids,
        alpha=alpha,
        decode_a=by_range,
        decode_b=decode_b,
        out_dtype=out_dtype,
        epilogue=epilogue,
    )
    return out.reshape(matrices, capacity, out.shape[1])


def _own(scale: np.ndarray, index: int) -> np.ndarray:
    return scale[index] if scale.ndim else scale


def _factor(alpha: Any, decode_a: Any, decode_b: Any) -> np.ndarray:
    """RN(RN(alpha * dA) * dB), broadcastable against [M, N]."""
    factor = np.asarray(alpha, dtype=np.float32)
    if decode_a is not None:
        factor = factor * np.asarray(decode_a, dtype=np.float32)
    if decode_b is not None:
        d_b = np.asarray(decode_b, dtype=np.float32)
        factor = factor * (d_b.reshape(1, -1) if d_b.ndim else d_b)
    return np.asarray(factor, dtype=np.float32)


def _apply(
    epilogue: Callable[..., Any], values: np.ndarray, rows: np.ndarray, expert: int
) -> np.ndarray:
    columns = np.arange(values.shape[1], dtype=np.int64)
    return np.asarray(epilogue(values, rows[:, None], columns[None, :], expert), dtype=np.float32)


def _result_columns(epilogue: Callable[..., Any] | None, columns: int) -> int:
    """Columns of a result without rows: what the epilogue makes of no rows."""
    if epilogue is None:
        return columns
    none = np.zeros((0, columns), np.float32)
    shape: tuple[int, ...] = _apply(epilogue, none, np.zeros(0, np.int64), 0).shape
    return shape[1]


def _sums(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """sum_k RN(a[m, k] * b[n, k]), k ascending, one rounding an addition; float32 [M, N]."""
    rows, columns = a.shape[0], b.shape[0]
    out = np.zeros((rows, columns), np.float32)
    b_by_k = np.ascontiguousarray(b.T)
    column_step = max(1, min(columns, _TILE_COLUMNS))
    row_step = _TILE // column_step
    for row in range(0, rows, row_step):
        a_by_k = np.ascontiguousarray(a[row : row + row_step].T)[:, :, None]
        for column in range(0, columns, column_step):
            b_part = b_by_k[:, column : column + column_step]
            total = np.zeros((a_by_k.shape[1], b_part.shape[1]), np.float32)
            term = np.empty_like(total)
            for a_k, b_k in zip(a_by_k, b_part, strict=True):
                np.multiply(a_k, b_k, out=term)
                np.add(total, term, out=total)
            out[row : row + row_step, column : column + column_step] = total
    return out
