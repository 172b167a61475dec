"""Scales chosen by the error they leave (``--method mse``) instead of by the largest element.

Each block keeps the best of a few scales. nvfp4: its largest element becomes 6, or 4 (a scale half
as large again: e2m1 is finer below 4 than between 4 and 6), or the scale is a neighbour of the
former on the grid of e4m3. MX formats: the power of two that saturates nothing, or the one below
it. For nvfp4 the encode scale is searched first, over most of an octave below the usual one: a
smaller one leaves room for larger block scales (448 / 1.5 = 299).

What comes out are codes and scales like any others; nothing but their choice is new.
"""

from __future__ import annotations

import numpy as np

from ..formats import BlockFormat
from ..golden.casts import (
    E4M3_TABLE,
    E8M0_TABLE,
    ELEMENT_TABLES,
    encode_e4m3,
    encode_element,
    widen,
)
from ..golden.scales import e8m0_scale
from .numeric import encode_scale_of, pieces

__all__ = ["quantize_mse", "search_encode_scale"]

# Parts of the usual encode scale that are tried; 4/7 makes 448 reachable by a block whose largest
# element becomes 4 wherever 256 was enough for 6 (256 * 1.5 = 384).
_FACTORS = (1.0, 15 / 16, 7 / 8, 13 / 16, 3 / 4, 11 / 16, 5 / 8, 4 / 7)
_SAMPLE = 1 << 18
_SIXTH = np.float32(1) / np.float32(6)
_FLT_MAX = np.finfo(np.float32).max


def search_encode_scale(matrix: np.ndarray, fmt: BlockFormat, amax: np.float32) -> np.float32:
    """The encode scale of a matrix, by the squared error on a part of its rows.

    Parameters
    ----------
    matrix : numpy.ndarray of float32, float16 or bfloat16, [M, K]
    fmt : BlockFormat
        nvfp4.
    amax : float32
        Largest magnitude of the whole tensor.

    Returns
    -------
    float32
        At most the usual scale: a larger one would saturate the largest block.
    """
    usual = encode_scale_of(amax)
    rows, columns = matrix.shape
    wanted = max(1, _SAMPLE // max(1, columns))
    sample = widen(np.ascontiguousarray(matrix[:: max(1, rows // wanted)][:wanted]))
    best, least = usual, np.inf
    for factor in _FACTORS:
        g = np.float32(usual * np.float32(factor))
        if not g >= 2.0**-126:
            continue
        _, _, error = quantize_mse(sample, fmt, g)
        if error < least:
            best, least = g, error
    return best


def quantize_mse(
    x: np.ndarray, fmt: BlockFormat, encode_scale: np.float32 | None
) -> tuple[np.ndarray, np.ndarray, float]:
    """Codes and linear scales of a matrix, each block with the best of a few scales.

    Parameters
    ----------
    x : numpy.ndarray of float32, float16 or bfloat16, [M, K]
    fmt : BlockFormat
    encode_scale : float32 or None
        Of nvfp4 only.

    Returns
    -------
    codes : numpy.ndarray of uint8, [M, K/2] or [M, K]
    scales : numpy.ndarray of uint8, [M, K/V]
    error : float
        Sum of the squared errors, blocks with NaN or infinity left out.
    """
    rows, columns = x.shape
    codes = np.empty((rows, columns // fmt.codes_per_byte), np.uint8)
    scales = np.empty((rows, columns // fmt.block), np.uint8)
    total = 0.0
    for start, stop, piece in pieces(x, 1 << 17):
        codes[start:stop], scales[start:stop], error = _piece(widen(piece), fmt, encode_scale)
        total += error
    return codes, scales, total


def _piece(
    x: np.ndarray, fmt: BlockFormat, g: np.float32 | None
) -> tuple[np.ndarray, np.ndarray, float]:
    rows = x.shape[0]
    blocks = np.ascontiguousarray(x).reshape(-1, fmt.block)
    with np.errstate(all="ignore"):
        amax = np.max(np.abs(blocks), axis=1, initial=0)  # a NaN stays one
        scales, *others = _candidates(amax, fmt, g)
        codes, least = _with_scale(blocks, scales, fmt, g)
        for other in others:
            other_codes, error = _with_scale(blocks, other, fmt, g)
            better = error < least  # False for NaN
            codes[better] = other_codes[better]
            scales[better] = other[better]
            least[better] = error[better]
    if fmt.codes_per_byte == 2:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return (
        codes.reshape(rows, -1),
        scales.reshape(rows, -1),
        float(np.sum(least[np.isfinite(least)], dtype=np.float64)),
    )


def _candidates(amax: np.ndarray, fmt: BlockFormat, g: np.float32 | None) -> list[np.ndarray]:
    """Scale bytes for each block, the usual one first."""
    if fmt.scale == "e4m3":
        product = amax * ((g or np.float32(1)) * _SIXTH)
        usual = encode_e4m3(product)
        # Of a block with NaN, and of one whose scale is 0, every choice is the usual one.
        changeable = (usual > 1) & (usual < 0x7E)
        lower = np.where(changeable, usual - np.uint8(1), usual)
        upper = np.where(changeable, usual + np.uint8(1), usual)
        return [usual, encode_e4m3(product * np.float32(1.5)), lower, upper]
    usual = e8m0_scale(amax, fmt)
    # 0 has none below it; 254 and 255 are infinity and NaN.
    lower = np.where((usual > 0) & (usual < 254), usual - np.uint8(1), usual)
    return [usual, lower]


def _with_scale(
    blocks: np.ndarray, scales: np.ndarray, fmt: BlockFormat, g: np.float32 | None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes, one a byte, under these scales, and the squared error of each block."""
    table = E4M3_TABLE if fmt.scale == "e4m3" else E8M0_TABLE
    scale = table[scales]
    decode = np.float32(1) / (g or np.float32(1))
    quotient = np.minimum(np.float32(1) / (scale * decode), _FLT_MAX)
    if fmt.scale == "e4m3":
        quotient[scales == 0] = 0
    codes = encode_element(blocks * quotient[:, None], fmt)
    values = ELEMENT_TABLES[fmt.element][codes] * scale[:, None] * decode
    difference = values - blocks
    return codes, np.einsum("ij,ij->i", difference, difference)
