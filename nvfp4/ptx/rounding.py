"""What the models share: one rounding, the canonical NaN, bit patterns, exact sums."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any

import numpy as np

MASK = 0xFFFFFFFF

#: The NaN that PTX arithmetic on float32 gives, whatever NaN went in.
NAN = np.uint32(0x7FFFFFFF).view(np.float32)

_FLOAT = struct.Struct("<f")
_WORD = struct.Struct("<I")


def signed(value: int) -> int:
    """The low 32 bits of an integer as a signed number."""
    return ((value + 0x80000000) & MASK) - 0x80000000


def bits_of(value: Any) -> int:
    """The bit pattern of a float32, a NaN's payload included."""
    if value == value:
        return int(_WORD.unpack(_FLOAT.pack(value))[0])
    # Through a Python float, a signalling NaN would become a quiet one.
    return int(np.float32(value).view(np.uint32))


def float_of(bits: int) -> np.float32:
    """The float32 of a bit pattern, a NaN's payload included."""
    bits &= MASK
    if bits & 0x7FFFFFFF > 0x7F800000:
        return np.uint32(bits).view(np.float32)
    return np.float32(_FLOAT.unpack(_WORD.pack(bits))[0])


def to_f32(value: float) -> np.float32:
    """Round a Python float to float32, nearest even; overflow gives infinity; NaN is canonical."""
    if value != value:
        return NAN
    # NumPy's own conversion warns on overflow.
    return np.float32(ctypes.c_float(value).value)


def sum_to_odd(a: float, b: float) -> float:
    """Return a + b, or where that is not exact, the neighbour of it whose last bit is set.

    Rounding that again, to a format at least two bits narrower, gives what rounding the exact sum
    once would. Source: S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums: proved
    algorithms using rounding to odd", IEEE Transactions on Computers 57 (2008).
    """
    total = a + b
    if not math.isfinite(total):
        return total
    part = total - a
    error = (a - (total - part)) + (b - part)
    if error != 0.0 and not struct.unpack("<q", struct.pack("<d", total))[0] & 1:
        total = math.nextafter(total, math.copysign(math.inf, error))
    return total


def code_of(magnitude: float, mantissa: int, smallest: int) -> int:
    """Code of a finite magnitude in a format without limit upwards, nearest, ties to the even code.

    Parameters
    ----------
    magnitude
        Not negative.
    mantissa
        Stored bits of the significand.
    smallest
        Exponent of the smallest normal number; below it the spacing stays the same.
    """
    if magnitude == 0.0:
        return 0
    exponent = max(math.frexp(magnitude)[1] - 1, smallest)
    # Exact: a power of two times a float that does not get smaller than its own last place.
    steps = round(math.ldexp(magnitude, mantissa - exponent))
    return ((exponent - smallest) << mantissa) + steps
