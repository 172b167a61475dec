"""A second, slow definition of the arithmetic in exact rational numbers, to test the first with.

Nothing here is shared with the package but the format descriptors: elements are found by looking
at all of them, scales by comparing fractions, and every rounding to float32 is that of a fraction.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import numpy as np

from nvfp4.formats import BlockFormat

FLT_MAX = float(np.finfo(np.float32).max)
TWO = Fraction(2)


def rn32(value: Fraction) -> float:
    """A fraction rounded to float32, to nearest even, with subnormals; overflow is infinite."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = floor_log2(magnitude)
    quantum = TWO ** (max(exponent, -126) - 23)
    rounded = round(magnitude / quantum) * quantum  # Python rounds fractions half to even
    result = math.inf if rounded >= TWO**128 else float(rounded)
    return math.copysign(result, value)


def floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if TWO**exponent <= value else exponent - 1


def ceil_log2(value: Fraction) -> int:
    exponent = floor_log2(value)
    return exponent if TWO**exponent == value else exponent + 1


def mul(a: float, b: float) -> float:
    """a * b in float32. Both are float32 values, held as Python floats."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b
    if a == 0 or b == 0:
        return a * b
    return rn32(Fraction(a) * Fraction(b))


def div(a: float, b: float) -> float:
    """a / b in float32, a finite and not zero."""
    if math.isnan(b):
        return b
    if b == 0:
        return math.inf
    return 0.0 if math.isinf(b) else rn32(Fraction(a) / Fraction(b))


@functools.cache
def magnitudes(element: str) -> tuple[Fraction, ...]:
    """The finite magnitudes of an element type, by code."""
    mantissa, bias, count = {"e2m1": (1, 1, 8), "e4m3": (3, 7, 127), "e5m2": (2, 15, 124)}[element]
    values = []
    for code in range(count):
        exponent, fraction = divmod(code, 1 << mantissa)
        significand = fraction + (1 << mantissa) * (exponent > 0)
        values.append(significand * TWO ** (max(exponent, 1) - bias - mantissa))
    return tuple(values)


SIGN_BIT = {"e2m1": 0x8, "e4m3": 0x80, "e5m2": 0x80}
NAN_CODE = {"e2m1": 0x7, "e4m3": 0x7F, "e5m2": 0x7F}


def encode(value: float, element: str) -> int:
    """The code of a float32 value: nearest, ties to the even code, saturated; NaN as listed."""
    if math.isnan(value):
        return NAN_CODE[element]
    table = magnitudes(element)
    sign = SIGN_BIT[element] if math.copysign(1, value) < 0 else 0
    if math.isinf(value) or abs(Fraction(value)) >= table[-1]:
        return sign | (len(table) - 1)
    exact = abs(Fraction(value))
    low, high = 0, len(table) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if table[middle] <= exact else (low, middle)
    below, above = exact - table[low], table[high] - exact
    if below == above:
        return sign | (low if low % 2 == 0 else high)
    return sign | (low if below < above else high)


def scale_value(s: int, scale: str) -> float:
    if scale == "e8m0":
        return math.nan if s == 255 else math.ldexp(1.0, s - 127)
    return math.nan if s & 0x7F == 0x7F else float(magnitudes("e4m3")[s])


def e8m0(amax: float, fmt: BlockFormat, rounding: str) -> int:
    """Scale byte of an MX block without an encode scale."""
    if math.isnan(amax):
        return 255
    if math.isinf(amax):
        return 254
    if amax == 0:
        return 0
    if rounding == "rceil":
        return power_at_least(mul(amax, div(1.0, fmt.qmax)))
    exact = Fraction(amax)
    if rounding == "floor":
        exponent = floor_log2(exact)
    elif rounding == "ceil":
        exponent = ceil_log2(exact)
    else:
        # Round to the mantissa bits of the element, half up; subnormals are below every clamp.
        exponent = floor_log2(exact)
        half = TWO ** (exponent - fmt.mantissa_bits - 1)
        exponent = floor_log2(exact + half)
    return min(max(exponent - fmt.emax + 127, 0), 254)


def power_at_least(v: float) -> int:
    """The smallest s with 2^(s-127) >= v; infinity counts as the largest."""
    if math.isnan(v):
        return 255
    if math.isinf(v):
        return 254
    if v == 0:
        return 0
    return min(max(ceil_log2(Fraction(v)) + 127, 0), 254)


def quantize_block(
    block: Any, fmt: BlockFormat, g: float | None = None, rounding: str = "rceil"
) -> tuple[list[int], int]:
    """Unpacked codes and scale byte of one block; g is an encode scale, None for 1."""
    x = [float(v) for v in block]
    amax = math.nan if any(map(math.isnan, x)) else max(map(abs, x))
    if fmt.scale == "e8m0" and (g is None or fmt.codes_per_byte == 1):
        s = e8m0(amax, fmt, rounding)
        q = math.nan if s == 255 else math.ldexp(1.0, 127 - s)
        return [encode(mul(v, q), fmt.element) for v in x], s
    g = 1.0 if g is None else float(g)
    scaled = mul(amax, mul(g, div(1.0, 6.0)))
    s = encode(scaled, "e4m3") if fmt.scale == "e4m3" else power_at_least(scaled)
    d = mul(scale_value(s, fmt.scale), div(1.0, g))
    if fmt.scale == "e4m3" and s == 0:
        q = 0.0
    else:
        q = div(1.0, d)
        q = q if math.isnan(q) else min(q, FLT_MAX)
    return [encode(mul(v, q), fmt.element) for v in x], s


def pack(codes: list[int], fmt: BlockFormat) -> list[int]:
    """Codes of a row as bytes: in fp4, column 2i is the low nibble of byte i."""
    if fmt.codes_per_byte == 1:
        return codes
    return [low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True)]


def quantize(
    x: np.ndarray, fmt: BlockFormat, g: Any = None, rounding: str = "rceil"
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and linear scales of a matrix [M, K]; g is None, a number, or [M]."""
    rows, columns = x.shape
    codes = np.zeros((rows, columns // fmt.codes_per_byte), np.uint8)
    scales = np.zeros((rows, columns // fmt.block), np.uint8)
    for r in range(rows):
        row_codes: list[int] = []
        own = g if g is None or np.ndim(g) == 0 else g[r]
        for b in range(columns // fmt.block):
            block = x[r, b * fmt.block : (b + 1) * fmt.block]
            block_codes, scales[r, b] = quantize_block(block, fmt, own, rounding)
            row_codes += block_codes
        codes[r] = pack(row_codes, fmt)
    return codes, scales
