"""Block scales and encode scales.

Source: section 3 of the arithmetic definition. Every written operation rounds once in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats import SCALE_ROUNDINGS, BlockFormat
from .casts import E4M3_TABLE, E8M0_TABLE, encode_e4m3, widen

__all__ = [
    "amax_encode_scale",
    "decode_scale_of",
    "e8m0_scale",
    "effective_encode_scale",
    "magnitude_max",
    "row_amax_encode_scale",
]

FLT_MAX = np.finfo(np.float32).max
_ONE = np.float32(1)
_SIXTH = np.float32(1) / np.float32(6)
_SMALLEST_NORMAL = np.float32(2.0**-126)
_INF = np.uint32(0x7F800000)


def _mx_quotients() -> np.ndarray:
    """2^(127 - s) for every scale byte s; NaN for 255."""
    s = np.arange(256, dtype=np.uint32)
    patterns = (np.uint32(254) - np.minimum(s, np.uint32(254))) << np.uint32(23)
    patterns[254] = 0x00400000
    patterns[255] = 0x7FC00000
    return patterns.view(np.float32)


_MX_QUOTIENTS = _mx_quotients()


def effective_encode_scale(encode_scale: Any) -> np.ndarray:
    """The encode scales that count: what is not finite or is below 2^-126 counts as 1."""
    g = np.asarray(encode_scale, dtype=np.float32)
    with np.errstate(invalid="ignore"):
        usable = (g >= _SMALLEST_NORMAL) & (g <= FLT_MAX)
    return np.where(usable, g, _ONE)


def decode_scale_of(g: np.ndarray) -> np.ndarray:
    """RN(1/g) of effective encode scales, float32 of the same shape."""
    return np.asarray(_ONE / g, dtype=np.float32)


def magnitude_max(x: np.ndarray, axis: int | None = None, keepdims: bool = False) -> np.ndarray:
    """Max |x| in float32, NaN if there is a NaN, 0 of nothing."""
    unsigned: Any
    unsigned, sign = (np.uint32, 1 << 31) if x.dtype.itemsize == 4 else (np.uint16, 1 << 15)
    # The patterns of magnitudes are ordered as the values, NaN above infinity.
    patterns = x.view(unsigned) & unsigned(sign - 1)
    largest = np.max(patterns, axis=axis, keepdims=keepdims, initial=unsigned(0))
    return widen(np.asarray(largest, dtype=unsigned).view(x.dtype))


def amax_encode_scale(x: np.ndarray, fmt: BlockFormat) -> np.ndarray:
    """The encode scale that ``encode_scale="amax"`` stands for.

    Parameters
    ----------
    x : numpy.ndarray of float32, float16 or bfloat16, any shape
    fmt : BlockFormat

    Returns
    -------
    numpy.ndarray of float32, shape ()
        ``min(RN(2688 / amax), FLT_MAX)`` for nvfp4, 1 where amax is 0, infinite or NaN, and 1 for
        the MX formats.
    """
    if fmt.scale != "e4m3":
        return np.asarray(_ONE)
    return _from_amax(magnitude_max(x))


def row_amax_encode_scale(x: np.ndarray, fmt: BlockFormat) -> np.ndarray:
    """The encode scales of ``encode_scale="row_amax"``: the same formula by row.

    Parameters
    ----------
    x : numpy.ndarray of float32, float16 or bfloat16, [..., K]
    fmt : BlockFormat

    Returns
    -------
    numpy.ndarray of float32, [..., 1]
    """
    if fmt.scale != "e4m3":
        return np.ones((*x.shape[:-1], 1), np.float32)
    return _from_amax(magnitude_max(x, axis=-1, keepdims=True))


def _from_amax(amax: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        g = np.minimum(np.float32(2688) / amax, FLT_MAX)
    usable = (amax > 0) & (amax <= FLT_MAX)
    return np.asarray(np.where(usable, g, _ONE), dtype=np.float32)


def e8m0_scale(amax: Any, fmt: BlockFormat, rounding: str = "rceil") -> np.ndarray:
    """Scale bytes of MX blocks without an encode scale.

    Parameters
    ----------
    amax : array_like of float32, any shape
        Largest magnitude of each block, NaN where the block has a NaN.
    fmt : BlockFormat
        Its element decides ``qmax``, ``emax`` and, for ``"even"``, the mantissa bits.
    rounding : {"rceil", "floor", "ceil", "even"}

    Returns
    -------
    numpy.ndarray of uint8, same shape
        0 for 0, 254 for infinity, 255 for NaN in every mode.

    Raises
    ------
    ValueError
        Unknown rounding.
    """
    amax = np.asarray(amax, dtype=np.float32)
    if rounding == "rceil":
        with np.errstate(all="ignore"):
            return _round_up_to_power(amax * (_ONE / np.float32(fmt.qmax)))
    patterns = np.ascontiguousarray(amax).view(np.uint32).reshape(amax.shape)
    if rounding == "floor":
        exponents = patterns >> np.uint32(23)
    elif rounding == "ceil":
        exponents = (patterns + np.uint32(0x7FFFFF)) >> np.uint32(23)
    elif rounding == "even":
        half = np.uint32(1 << (22 - fmt.mantissa_bits))
        exponents = (patterns + half) >> np.uint32(23)
    else:
        allowed = ", ".join(repr(name) for name in SCALE_ROUNDINGS)
        raise ValueError(f"scale_rounding must be one of {allowed}; got {rounding!r}")
    s = np.clip(exponents.astype(np.int32) - fmt.emax, 0, 254).astype(np.uint8)
    return np.where(patterns > _INF, 255, np.where(patterns == _INF, 254, s)).astype(np.uint8)


def _round_up_to_power(v: np.ndarray) -> np.ndarray:
    """e8m0 byte of the smallest power of two that is not below v: the rule of ``rceil``."""
    patterns = np.ascontiguousarray(v).view(np.uint32).reshape(v.shape)
    s = (patterns + np.uint32(0x7FFFFF)) >> np.uint32(23)
    s = np.where(patterns <= np.uint32(0x00400000), 0, np.minimum(s, 254))
    return np.where(patterns > _INF, 255, s).astype(np.uint8)


def block_scale(
    amax: np.ndarray, fmt: BlockFormat, g: np.ndarray | None, rounding: str
) -> tuple[np.ndarray, np.ndarray]:
    """Scale byte of each block and q, the factor that its elements are multiplied by.

    Parameters
    ----------
    amax : numpy.ndarray of float32, [n]
    fmt : BlockFormat
    g : numpy.ndarray of float32, () or [n], or None
        Effective encode scales; None (and any g for mxfp8) means 1.
    rounding : str
        Of MX scales without an encode scale.

    Returns
    -------
    s : numpy.ndarray of uint8, [n]
    q : numpy.ndarray of float32, [n]
    """
    if fmt.scale == "e8m0" and (g is None or fmt.element != "e2m1"):
        s = e8m0_scale(amax, fmt, rounding)
        return s, _MX_QUOTIENTS[s]
    if g is None:
        g = np.asarray(_ONE)
    scaled = amax * (g * _SIXTH)
    if fmt.scale == "e4m3":
        s = encode_e4m3(scaled)
        q = _reciprocal(E4M3_TABLE[s] * (_ONE / g))
        q[s == 0] = 0
    else:
        s = _round_up_to_power(scaled)
        q = _reciprocal(E8M0_TABLE[s] * (_ONE / g))
    return s, q


def _reciprocal(d: np.ndarray) -> np.ndarray:
    return np.minimum(_ONE / d, FLT_MAX)
