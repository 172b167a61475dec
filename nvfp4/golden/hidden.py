"""Hidden values that are quantised where they are made: gated activations and normalised rows.

Every operation is a float32 operation rounded once, in the order that is written here: so h is
unique, and the kernels have the same bits. The exponential function is a polynomial, of as many
terms as the dtype of the input can show. For up = 1, h lies within 0.7 last places of the true
value in the 16-bit types (every value was tried, subnormal results too), in float32 within 3 as
long as the result is not below 1e-36.

Sources: J. Muller, "Elementary Functions", on reduction of the argument; N. Shazeer, "GLU Variants
Improve Transformer" (2020); B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization" (2019).
The gated activation of gpt-oss is that of its published model code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .casts import cast_float, widen

__all__ = ["KINDS", "rmsnorm", "row_sums", "swiglu"]

_F32 = np.float32
_PIECE = 16
#: Pieces of which a chunk's sum is a tree; 32 of them are a group.
_GROUP, _CHUNK = 32, 1024
_WORK = 1 << 16  # elements that are worked on at a time

#: RN(x + MAGIC) - MAGIC is x rounded to an integer; 64 less, so that 2^n fits whatever n is here.
_MAGIC = _F32(1.5 * 2**23 - 64)
_SCALE = _F32(2.0**-64)

#: 2^f = 1 + f * (c1 + f * (c2 + ...)) for |f| <= 1/2: smallest largest relative error.
_SHORT = (0.6932829022407532, 0.2422109693288803, 0.05500893294811249)
_LONG = (
    0.6931471824645996,
    0.24022647738456726,
    0.055503323674201965,
    0.00961843691766262,
    0.0013398875016719103,
    0.00015353361959569156,
)


class _Kind(NamedTuple):
    """A gated activation: its constants."""

    #: -alpha * log2(e) as a float32, and what that leaves over.
    factor: np.float32
    rest: np.float32
    #: Bounds of the gate; below `low` the result is 0 by then.
    low: np.float32
    high: np.float32
    #: Bound of the magnitude of up, and what is added to it.
    limit: np.float32 | None
    shift: np.float32 | None


KINDS = {
    "silu": _Kind(
        _F32(-1.4426950216293335),
        _F32(-1.925963033500011e-08),
        _F32(-105.0),
        _F32(np.inf),
        None,
        None,
    ),
    "gpt-oss": _Kind(
        _F32(-2.4554669857025146),
        _F32(2.6109498563187117e-08),
        _F32(-62.0),
        _F32(7.0),
        _F32(7.0),
        _F32(1.0),
    ),
}
#: What the gate counts as at most in the exponent: the sigmoid is 1 there.
_FLAT = _F32(40.0)


def fma(a: np.ndarray, b: Any, c: Any) -> np.ndarray:
    """The sum a * b + c, rounded once to float32.

    The product is exact in float64; the sum is rounded to odd, so that rounding it again does no
    harm (``nvfp4.ptx.rounding.sum_to_odd`` has the source).
    """
    product = np.multiply(a, b, dtype=np.float64)
    other = np.asarray(c, np.float64)
    total = product + other
    part = total - product
    error = (product - (total - part)) + (other - part)
    patterns = total.view(np.int64)
    away = (error > 0) == (total > 0)
    inexact = (error != 0) & np.isfinite(total) & (patterns & 1 == 0)
    patterns += np.where(inexact, np.where(away, 1, -1), 0)
    return total.astype(np.float32)


def swiglu(gate_up: np.ndarray, *, halves: str = "split", kind: str = "silu") -> np.ndarray:
    """Gated activations, rounded to the dtype of the input.

    Parameters
    ----------
    gate_up : numpy.ndarray of float32, float16 or bfloat16, [..., 2K]
    halves : {"split", "interleaved"}
        Gates in the first half of the columns, or in the even ones.
    kind : {"silu", "gpt-oss"}
        "silu": gate * sigmoid(gate) * up. "gpt-oss": gate at most 7, up within -7..7, then
        gate * sigmoid(1.702 * gate) * (up + 1).

    Returns
    -------
    numpy.ndarray of the dtype of `gate_up`, [..., K]
    """
    columns = gate_up.shape[-1] // 2
    rows = _matrix(gate_up)[:, : 2 * columns]
    out = np.empty((len(rows), columns), gate_up.dtype)
    short = gate_up.dtype.itemsize == 2
    with np.errstate(all="ignore"):
        for some in _some_rows(len(rows), 2 * columns):
            values = widen(rows[some])
            if halves == "split":
                gate, up = values[:, :columns], values[:, columns:]
            else:
                gate, up = values[:, 0::2], values[:, 1::2]
            out[some] = cast_float(_gated(gate, up, KINDS[kind], short), out.dtype)
    return out.reshape(*gate_up.shape[:-1], columns)


def _gated(gate: np.ndarray, up: np.ndarray, kind: _Kind, short: bool) -> np.ndarray:
    gate = np.minimum(np.maximum(gate, kind.low), kind.high)
    reciprocal = _scaled_sigmoid(np.fmin(gate, _FLAT), kind, short)
    if kind.limit is not None:
        up = np.minimum(np.maximum(up, -kind.limit), kind.limit)
    if kind.shift is None:
        result: np.ndarray = (gate * (reciprocal * _SCALE)) * up
    else:
        # The scale goes to the other factor: one operation for it and the shift.
        result = (gate * reciprocal) * fma(up, _SCALE, kind.shift * _SCALE)
    return result


def _scaled_sigmoid(x: np.ndarray, kind: _Kind, short: bool) -> np.ndarray:
    """2^64 / (1 + 2^(factor * x)), of numbers that do not overflow."""
    shifted = fma(x, kind.factor, _MAGIC)
    whole = shifted - _MAGIC
    fraction = fma(x, kind.factor, -whole)
    if not short:
        fraction = fma(x, kind.rest, fraction)
    first, *others = (_SHORT if short else _LONG)[::-1]
    power = np.full_like(fraction, first)
    for coefficient in others:
        power = fma(power, fraction, _F32(coefficient))
    power = fma(power, fraction, _F32(1))
    # The low bits of `shifted` are n - 64: added to the exponent.
    patterns = power.view(np.uint32) + (shifted.view(np.uint32) << np.uint32(23))
    result: np.ndarray = _F32(1) / (patterns.view(np.float32) + _SCALE)
    return result


def rmsnorm(
    x: np.ndarray, weight: np.ndarray, eps: float, *, residual: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Rows divided by their root mean square, times a weight by column; rounded to the dtype of x.

    Parameters
    ----------
    x : numpy.ndarray of float32, float16 or bfloat16, [..., K]
        K a multiple of 16.
    weight : numpy.ndarray of the dtype of x, or of float32, [K]
    eps : float
    residual : numpy.ndarray of the dtype of x, [..., K], optional
        Added to x, and the sum rounded to the dtype, before anything else.

    Returns
    -------
    h : numpy.ndarray of the dtype of x, [..., K]
        RN(RN(s * r) * weight), s the sum, r = RN(1 / RN(sqrt(RN(mean + eps)))), the mean that of
        the squares of s.
    s : numpy.ndarray of the dtype of x, [..., K]
        x itself without a residual.
    """
    columns = x.shape[-1]
    rows = _matrix(x)
    others = None if residual is None else _matrix(residual)
    added = rows if others is None else np.empty_like(rows)
    out = np.empty_like(rows)
    wide = widen(weight)
    with np.errstate(all="ignore"):
        for some in _some_rows(len(rows), columns):
            if others is not None:
                sums = widen(rows[some]) + widen(others[some])
                added[some] = cast_float(sums, x.dtype)
            values = widen(added[some])
            mean = row_sums(values) / _F32(columns)
            inverse = _F32(1) / np.sqrt(mean + _F32(eps))
            out[some] = cast_float((values * inverse[:, None]) * wide, x.dtype)
    return out.reshape(x.shape), added.reshape(x.shape)


def row_sums(values: np.ndarray) -> np.ndarray:
    """Sums of squares of float32 rows, in the order that the kernels have.

    Within 16 columns one after the other, by fma; these sums by trees, 32 in a group and 32 groups
    in a chunk, the halves of what there is added to each other; chunks one after the other. What
    is missing at the end counts as 0.
    """
    rows, columns = values.shape
    pieces = np.zeros((rows, -(-columns // (_PIECE * _CHUNK)) * _CHUNK), np.float32)
    by_piece = values.reshape(rows, columns // _PIECE, _PIECE)
    sums = np.zeros(by_piece.shape[:2], np.float32)
    for i in range(_PIECE):
        sums = fma(by_piece[:, :, i], by_piece[:, :, i], sums)
    pieces[:, : sums.shape[1]] = sums
    groups = _tree(pieces.reshape(rows, -1, _GROUP))
    chunks = _tree(groups.reshape(rows, -1, _CHUNK // _GROUP))
    total = np.zeros(rows, np.float32)
    for i in range(chunks.shape[1]):
        total = total + chunks[:, i]
    return total


def _tree(values: np.ndarray) -> np.ndarray:
    """Sums along the last axis, whose size is a power of two: halves added to each other."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def _matrix(x: np.ndarray) -> np.ndarray:
    """All rows of an array, of which there may be none, or of no columns."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _some_rows(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _WORK // max(1, columns))
    return (slice(start, start + step) for start in range(0, rows, step))
