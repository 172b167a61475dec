"""Rows of e4m3 with one scale each: the activations of products on FP8 tensor cores.

Source: docs/decisions.md, D25. Every written operation rounds once in float32.
"""

from __future__ import annotations

import numpy as np

from .casts import encode_e4m3, widen
from .scales import decode_scale_of, magnitude_max

__all__ = ["quantize_rows"]

#: The largest scale, so that its reciprocal is a normal float32.
_LARGEST = np.float32(2.0**126)


def quantize_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and row scales of a matrix.

    Parameters
    ----------
    x : numpy.ndarray of float32, float16 or bfloat16, [M, K]

    Returns
    -------
    codes : numpy.ndarray of uint8, [M, K]
        e4m3 of RN(x * g), to nearest even, saturating; g = min(RN(448 / amax), 2^126) of the row, 1
        where amax is 0, infinite or NaN.
    scales : numpy.ndarray of float32, [M, 1]
        RN(1 / g): what codes are multiplied by.
    """
    amax = magnitude_max(x, axis=-1, keepdims=True)
    with np.errstate(all="ignore"):
        g = np.minimum(np.float32(448) / amax, _LARGEST)
        g = np.where((amax > 0) & (amax < np.inf), g, np.float32(1)).astype(np.float32)
        return encode_e4m3(widen(x) * g), decode_scale_of(g)
