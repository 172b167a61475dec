"""Element conversions, by arithmetic on bit patterns.

Source: section 2 of the arithmetic definition. Every conversion rounds to nearest with ties to the
even code and saturates to the largest finite element; ``cast_float`` is the exception: it rounds
results of products, where overflow becomes an infinity.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats import BlockFormat

__all__ = [
    "cast_float",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e5m2",
    "decode_e8m0",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e5m2",
    "encode_element",
    "widen",
]

_ABS = np.uint32(0x7FFFFFFF)
_INF = np.uint32(0x7F800000)
_NAN_FP8 = np.uint8(0x7F)
_PIECE = 1 << 15  # elements that are worked on at a time, so that they stay in the cache

# Bit patterns of the midpoints .25, .75, 1.25, 1.75, 2.5, 3.5, 5 between neighbouring e2m1 values,
# raised by one where a tie goes to the lower (even) code: a magnitude has as code the number of
# thresholds that its pattern reaches. A NaN reaches all seven, which is the code it must have.
_E2M1_THRESHOLDS = tuple(
    np.uint32(pattern)
    for pattern in (
        0x3E800001,
        0x3F400000,
        0x3FA00001,
        0x3FE00000,
        0x40200001,
        0x40600000,
        0x40A00001,
    )
)
_E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


def magnitude_e2m1(patterns: np.ndarray, out: np.ndarray, reached: np.ndarray) -> None:
    """Write the codes 0..7 of float32 magnitudes, given as uint32 patterns, into uint8 ``out``.

    ``reached`` is bool scratch of the same shape. The sign bit of the patterns must be clear,
    except in a NaN.
    """
    np.greater_equal(patterns, _E2M1_THRESHOLDS[0], out=out.view(np.bool_))
    counted = reached.view(np.uint8)
    for threshold in _E2M1_THRESHOLDS[1:]:
        np.greater_equal(patterns, threshold, out=reached)
        np.add(out, counted, out=out)


class _Float8:
    """Constants of an eight-bit element type with ``mantissa`` bits and exponent ``bias``."""

    def __init__(self, mantissa: int, bias: int, largest: int) -> None:
        self.shift = np.uint32(23 - mantissa)
        self.half_less_one = np.uint32((1 << (22 - mantissa)) - 1)
        # A float32 pattern shifted to this mantissa exceeds the code by the difference of biases.
        self.rebias = np.uint32((127 - bias) << mantissa)
        self.smallest_normal = np.uint32((128 - bias) << 23)
        # A sum with this number has an ulp of one subnormal step: the addition itself rounds to
        # nearest even.
        self.anchor = np.float32(2.0 ** (24 - bias - mantissa))
        self.anchor_pattern = np.array(self.anchor).view(np.uint32)[()]
        self.first_normal_code = np.uint32(1 << mantissa)
        self.largest = np.uint32(largest)


_E4M3 = _Float8(mantissa=3, bias=7, largest=0x7E)
_E5M2 = _Float8(mantissa=2, bias=15, largest=0x7B)
_FLOAT8 = {"e4m3": _E4M3, "e5m2": _E5M2}


def magnitude_float8(
    patterns: np.ndarray, element: str, out: np.ndarray, low: np.ndarray, high: np.ndarray
) -> None:
    """Write the codes of float32 magnitudes, given as uint32 patterns, into uint8 ``out``.

    ``low`` and ``high`` are uint32 scratch of the same shape. A NaN is treated as an infinity:
    the caller puts its code in.
    """
    t = _FLOAT8[element]
    # A code is that of the part below the smallest normal (linear) plus that of the part above it
    # (rounded in the pattern); each is constant where the other one varies.
    np.minimum(patterns, t.smallest_normal, out=low)
    np.add(low.view(np.float32), t.anchor, out=low.view(np.float32))
    np.subtract(low, t.anchor_pattern + t.first_normal_code + t.rebias, out=low)
    np.maximum(patterns, t.smallest_normal, out=high)
    np.minimum(high, _INF, out=high)
    np.right_shift(high, t.shift, out=out, casting="unsafe")
    np.bitwise_and(out, 1, out=out)
    np.add(high, t.half_less_one, out=high)
    np.add(high, out, out=high)
    np.right_shift(high, t.shift, out=high)
    np.add(high, low, out=high)
    np.minimum(high, t.largest, out=high)
    np.copyto(out, high, casting="unsafe")


def encode_e2m1(values: Any) -> np.ndarray:
    """e2m1 codes 0..15 of float32 values, one a byte; NaN gives 7, infinities +-6.

    Parameters
    ----------
    values : array_like of float32, any shape

    Returns
    -------
    numpy.ndarray of uint8, same shape
    """
    patterns = _patterns(values)
    magnitudes = patterns & _ABS
    codes = np.empty(patterns.shape, np.uint8)
    magnitude_e2m1(magnitudes, codes, np.empty(patterns.shape, np.bool_))
    negative = (patterns > _ABS) & (magnitudes <= _INF)
    codes |= negative.view(np.uint8) << 3
    return codes


def encode_e4m3(values: Any) -> np.ndarray:
    """e4m3fn codes of float32 values, saturated to +-448; NaN gives 0x7F.

    Parameters
    ----------
    values : array_like of float32, any shape

    Returns
    -------
    numpy.ndarray of uint8, same shape
    """
    return _encode_float8(values, "e4m3")


def encode_e5m2(values: Any) -> np.ndarray:
    """e5m2 codes of float32 values, saturated to +-57344; NaN gives 0x7F.

    Parameters
    ----------
    values : array_like of float32, any shape

    Returns
    -------
    numpy.ndarray of uint8, same shape
    """
    return _encode_float8(values, "e5m2")


def _encode_float8(values: Any, element: str) -> np.ndarray:
    patterns = _patterns(values)
    magnitudes = patterns & _ABS
    codes = np.empty(patterns.shape, np.uint8)
    magnitude_float8(magnitudes, element, codes, np.empty_like(patterns), np.empty_like(patterns))
    codes |= (patterns > _ABS).view(np.uint8) << 7
    codes[magnitudes > _INF] = _NAN_FP8
    return codes


def encode_element(values: Any, fmt: BlockFormat) -> np.ndarray:
    """Codes of float32 values in the element type of ``fmt``, one a byte, unpacked."""
    return encode_e2m1(values) if fmt.element == "e2m1" else _encode_float8(values, fmt.element)


def _float_table(mantissa: int, bias: int, first_special: int) -> np.ndarray:
    """Values of the 256 codes of an eight-bit type; magnitudes from ``first_special`` are NaN."""
    code = np.arange(128)
    exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
    significand = np.where(exponent > 0, fraction + (1 << mantissa), fraction)
    power = np.maximum(exponent, 1) - bias - mantissa
    magnitude = np.ldexp(significand.astype(np.float32), power)
    magnitude[first_special:] = np.nan
    return np.concatenate([magnitude, -magnitude]).astype(np.float32)


def _e5m2_table() -> np.ndarray:
    table = _float_table(mantissa=2, bias=15, first_special=0x7D)
    table[[0x7C, 0xFC]] = [np.inf, -np.inf]
    return table


def _e8m0_table() -> np.ndarray:
    patterns = np.arange(256, dtype=np.uint32) << np.uint32(23)
    patterns[0] = 0x00400000
    patterns[255] = 0x7FC00000
    return patterns.view(np.float32)


def _frozen(table: np.ndarray) -> np.ndarray:
    table.flags.writeable = False
    return table


E2M1_TABLE = _frozen(np.concatenate([_E2M1_VALUES, -_E2M1_VALUES]))
E4M3_TABLE = _frozen(_float_table(mantissa=3, bias=7, first_special=0x7F))
E5M2_TABLE = _frozen(_e5m2_table())
E8M0_TABLE = _frozen(_e8m0_table())
SCALE_TABLES = {"e4m3": E4M3_TABLE, "e8m0": E8M0_TABLE}
ELEMENT_TABLES = {"e2m1": E2M1_TABLE, "e4m3": E4M3_TABLE, "e5m2": E5M2_TABLE}


def decode_e2m1(codes: Any) -> np.ndarray:
    """float32 values of e2m1 codes 0..15, one a byte (the upper four bits must be 0)."""
    return E2M1_TABLE[np.asarray(codes, np.uint8)]


def decode_e4m3(codes: Any) -> np.ndarray:
    """float32 values of e4m3fn codes; 0x7F and 0xFF are NaN."""
    return E4M3_TABLE[np.asarray(codes, np.uint8)]


def decode_e5m2(codes: Any) -> np.ndarray:
    """float32 values of e5m2 codes; magnitude 0x7C is an infinity, those above are NaN."""
    return E5M2_TABLE[np.asarray(codes, np.uint8)]


def decode_e8m0(codes: Any) -> np.ndarray:
    """float32 values of e8m0 scale bytes: 2^(s - 127); byte 0 is 2^-127, 255 is NaN."""
    return E8M0_TABLE[np.asarray(codes, np.uint8)]


def widen(x: np.ndarray) -> np.ndarray:
    """A float32, float16 or bfloat16 array as float32, exactly; float32 is returned as it is.

    Raises
    ------
    TypeError
        Another dtype.
    """
    name = x.dtype.name
    if name == "float32":
        return x
    if name == "float16":
        return x.astype(np.float32)
    if name == "bfloat16":
        return (x.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    raise TypeError(f"x must be float32, float16 or bfloat16; got {name}")


def cast_float(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Round float32 values to a result type: nearest even, overflow to infinity, NaN kept.

    Parameters
    ----------
    values : numpy.ndarray of float32, any shape
    dtype : str or numpy.dtype
        ``"float32"`` (returned as it is), ``"float16"`` or ``"bfloat16"``.

    Returns
    -------
    numpy.ndarray of ``dtype``, same shape

    Raises
    ------
    ValueError
        Another dtype.

    Notes
    -----
    Source: section 7 of the arithmetic definition.
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name == "float32":
        return values
    if name == "float16":
        with np.errstate(all="ignore"):
            return values.astype(np.float16)
    if name != "bfloat16":
        raise ValueError(f"dtype must be 'float32', 'float16' or 'bfloat16'; got {name!r}")
    flat = np.ascontiguousarray(values).view(np.uint32).reshape(-1)
    out = np.empty(flat.size, np.uint16)
    for start in range(0, flat.size, _PIECE):
        some = slice(start, start + _PIECE)
        out[some] = _bfloat16_patterns(flat[some])
    return out.view(bfloat16()).reshape(values.shape)


def _bfloat16_patterns(patterns: np.ndarray) -> np.ndarray:
    upper = patterns >> np.uint32(16)
    rounded = upper & np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += patterns
    rounded >>= np.uint32(16)
    # In a NaN the rounding could carry into the exponent or leave an empty mantissa.
    nan = (patterns & _ABS) > _INF
    if nan.any():
        rounded[nan] = upper[nan] | np.uint32(0x40)
    return rounded


def bfloat16() -> np.dtype[Any]:
    """The NumPy dtype of bfloat16; imported late, because only bfloat16 results need ml_dtypes."""
    from ml_dtypes import bfloat16 as scalar_type

    dtype: np.dtype[Any] = np.dtype(scalar_type)
    return dtype


def _patterns(values: Any) -> np.ndarray:
    values = np.asarray(values, dtype=np.float32)
    return np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
