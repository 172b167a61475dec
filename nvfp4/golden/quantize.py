"""Quantisation of dense arrays.

Source: section 3 of the arithmetic definition. The work is done on pieces of some thousand blocks
that stay in the cache, transposed to ``[V, blocks]``: then the maximum over a block and the product
with its factor run along contiguous memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats import BlockFormat
from ..layouts import block_count, codes_shape, scale_shape
from .casts import magnitude_e2m1, magnitude_float8, widen
from .interleave import interleave_scales
from .scales import (
    amax_encode_scale,
    block_scale,
    decode_scale_of,
    effective_encode_scale,
    row_amax_encode_scale,
)

__all__ = ["quantize"]

_ABS = np.uint32(0x7FFFFFFF)
_INF = np.uint32(0x7F800000)
_PIECE = 1 << 16  # elements of a piece: a few arrays of 4 bytes each fit the second-level cache


def quantize(
    x: np.ndarray,
    fmt: BlockFormat,
    *,
    encode_scale: Any = None,
    scale_rounding: str = "rceil",
    scale_layout: str = "tcgen",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, block scales and decode scale of an array.

    Parameters
    ----------
    x : numpy.ndarray of float32, float16 or bfloat16, [..., K]
        K a multiple of the block; ``[M, K]`` or ``[E, M, K]`` for the tcgen layout.
    fmt : BlockFormat
    encode_scale : None, "amax", "row_amax" or float32 of shape (), [..., 1] by row, [E]
        What is not finite or is below 2^-126 counts as 1. [E] takes x of [E, M, K].
    scale_rounding : {"rceil", "floor", "ceil", "even"}
        Of MX scales without an encode scale.
    scale_layout : {"linear", "tcgen"}

    Returns
    -------
    codes : numpy.ndarray of uint8, [..., K/2] or [..., K]
    scales : numpy.ndarray of uint8, as ``layouts.scale_shape`` says
    decode_scale : numpy.ndarray of float32, of the shape of the encode scale
        1 for mxfp8, whatever the encode scale.

    Raises
    ------
    ValueError
        K is not a multiple of the block, or the layout does not take this number of axes.
    """
    scale_shape(fmt, x.shape, scale_layout)
    *lead, columns = x.shape
    g, decode_scale = resolve_encode_scale(x, fmt, encode_scale)
    by_row = None
    if g is not None and g.ndim:
        wide = g if g.ndim == x.ndim else g.reshape(-1, 1, 1)
        by_row = np.broadcast_to(wide, (*lead, 1)).reshape(-1)
    rows = int(np.prod(lead, dtype=np.int64))
    codes, scales = quantize_rows(
        x.reshape(rows, columns), fmt, g if by_row is None else by_row, scale_rounding
    )
    codes = codes.reshape(codes_shape(fmt, x.shape))
    scales = scales.reshape(scale_shape(fmt, x.shape, "linear"))
    if scale_layout == "tcgen":
        scales = interleave_scales(scales)
    return codes, scales, decode_scale


def resolve_encode_scale(
    x: np.ndarray, fmt: BlockFormat, encode_scale: Any
) -> tuple[np.ndarray | None, np.ndarray]:
    """Effective encode scales (None for 1) and the decode scale that belongs to them."""
    if encode_scale is None:
        return None, np.asarray(np.float32(1))
    if isinstance(encode_scale, str):
        if fmt.scale == "e8m0":
            shape = () if encode_scale == "amax" else (*x.shape[:-1], 1)
            return None, np.ones(shape, np.float32)
        of = amax_encode_scale if encode_scale == "amax" else row_amax_encode_scale
        g = of(x, fmt)
    else:
        g = effective_encode_scale(encode_scale)
        if g.size == 1 and g.ndim == 1 and x.ndim != 3:
            g = g.reshape(())
    if fmt.scale == "e8m0" and fmt.element != "e2m1":
        return None, np.ones(g.shape, np.float32)
    return g, decode_scale_of(g)


def quantize_rows(
    x: np.ndarray, fmt: BlockFormat, g: np.ndarray | None, rounding: str
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and linear scales of a matrix.

    Parameters
    ----------
    x : numpy.ndarray of float32, float16 or bfloat16, [M, K], any strides
    fmt : BlockFormat
    g : numpy.ndarray of float32, () or [M], or None
        Effective encode scales.
    rounding : str

    Returns
    -------
    codes : numpy.ndarray of uint8, [M, K/2] or [M, K]
    scales : numpy.ndarray of uint8, [M, K/V]
    """
    rows, columns = x.shape
    blocks = block_count(fmt, columns)
    codes = np.empty((rows, columns // fmt.codes_per_byte), np.uint8)
    scales = np.empty((rows, blocks), np.uint8)
    if not codes.size:
        return codes, scales
    x3 = x.reshape(rows, blocks, fmt.block)
    codes3 = codes.reshape(rows, blocks, -1)
    piece = max(1, _PIECE // fmt.block)
    row_step, block_step = max(1, piece // blocks), min(piece, blocks)
    work = _Workspace(fmt, min(row_step, rows) * block_step)
    with np.errstate(all="ignore"):
        for row in range(0, rows, row_step):
            some = slice(row, row + row_step)
            for block in range(0, blocks, block_step):
                here = some, slice(block, block + block_step)
                own = g if g is None or not g.ndim else g[some]
                work.quantize(x3[here], codes3[here], scales[here], own, rounding)
    return codes, scales


class _Workspace:
    """Buffers for one piece, used again for the next."""

    def __init__(self, fmt: BlockFormat, blocks: int) -> None:
        self.fmt = fmt
        elements = blocks * fmt.block
        self.words = np.empty(elements, np.uint32)
        self.negative = np.empty(elements, np.bool_)
        self.reached = np.empty(elements, np.bool_)
        self.codes = np.empty(elements, np.uint8)
        if fmt.element != "e2m1":
            self.low = np.empty(elements, np.uint32)
            self.high = np.empty(elements, np.uint32)

    def quantize(
        self,
        x: np.ndarray,
        codes: np.ndarray,
        scales: np.ndarray,
        g: np.ndarray | None,
        rounding: str,
    ) -> None:
        """Write the codes and scales of x [rows, blocks, V]; g is (), [rows] or None."""
        fmt, (rows, blocks, block) = self.fmt, x.shape
        n = rows * blocks
        words = self._transposed(x)
        negative = self.negative[: block * n].reshape(block, n)
        np.greater(words, _ABS, out=negative)
        np.bitwise_and(words, _ABS, out=words)
        # The patterns of magnitudes are ordered as the values, NaN above infinity.
        amax = words.max(axis=0)
        if g is not None and g.ndim:
            g = np.repeat(g, blocks)
        s, q = block_scale(amax.view(np.float32), fmt, g, rounding)
        scales[...] = s.reshape(rows, blocks)
        np.multiply(words.view(np.float32), q, out=words.view(np.float32))
        out = self.codes[: block * n].reshape(block, n)
        nan = None
        if amax.max() >= _INF:
            nan = (words & _ABS) > _INF
            negative[nan] = False
        reached = self.reached[: block * n].reshape(block, n)
        if fmt.element == "e2m1":
            magnitude_e2m1(words, out, reached)
            sign = reached.view(np.uint8)
            np.left_shift(negative.view(np.uint8), 3, out=sign)
            np.bitwise_or(out, sign, out=out)
            packed = sign[: block // 2]
            np.left_shift(out[1::2], 4, out=packed)
            np.bitwise_or(packed, out[0::2], out=packed)
        else:
            low = self.low[: block * n].reshape(block, n)
            high = self.high[: block * n].reshape(block, n)
            magnitude_float8(words, fmt.element, out, low, high)
            sign = reached.view(np.uint8)
            np.left_shift(negative.view(np.uint8), 7, out=sign)
            np.bitwise_or(out, sign, out=out)
            if nan is not None:
                out[nan] = 0x7F
            packed = out
        codes[...] = packed.reshape(-1, rows, blocks).transpose(1, 2, 0)

    def _transposed(self, x: np.ndarray) -> np.ndarray:
        """The float32 patterns of x as [V, rows * blocks]."""
        rows, blocks, block = x.shape
        words = self.words[: x.size].reshape(block, rows, blocks)
        across = x.transpose(2, 0, 1)
        if x.dtype.name == "bfloat16":
            np.copyto(words, across.view(np.uint16))
            np.left_shift(words, np.uint32(16), out=words)
        else:
            np.copyto(words.view(np.float32), across if x.dtype == np.float32 else widen(across))
        return words.reshape(block, rows * blocks)
