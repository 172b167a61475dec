"""The scale of a block and the factor of its elements, operation by operation.

Source: section 3 of the arithmetic definition.

Compile-time constants: SCALE ("e4m3" or "e8m0"), ELEMENT, ROUNDING, and UNIT: the encode scale is 1
by definition.
"""

from __future__ import annotations

import numpy as np

from ..ptx.arith import (
    add_u32,
    and_u32,
    div_rn,
    eq_u32,
    gt_u32,
    lt_u32,
    min_u32,
    mul_rn,
    rcp_rn,
    select_f32,
    select_u32,
    shl_u32,
    shr_u32,
    sub_u32,
)
from ..ptx.bits import float_as_uint, uint_as_float
from ..ptx.convert import e4m3x2_of_f32, f32_of_e4m3, f32_of_e8m0, ue8m0x2_rp_of_f32

SCALE = "e8m0"
ELEMENT = "e2m1"
ROUNDING = "rceil"
UNIT = True

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
LARGEST = np.float32(np.finfo(np.float32).max)
SMALLEST_NORMAL = np.float32(2.0**-126)
SIXTH = np.float32(1.0) / np.float32(6.0)
RCP_448 = np.float32(1.0) / np.float32(448.0)
RCP_57344 = np.float32(1.0) / np.float32(57344.0)
ENCODE_TARGET = np.float32(2688.0)

INFINITY_BITS = 0x7F800000
NAN_BITS = 0x7FC00000


# Scale bytes -------------------------------------------------------------------------------------


def decode_scale_byte(byte, scale: str):
    """f32(byte) of a block scale; bit 7 of an e4m3 scale does not count."""
    if scale == "e4m3":
        return f32_of_e4m3(and_u32(byte, 0x7F))
    else:
        return f32_of_e8m0(byte)


def power_at_least(v):
    """e8m0 byte of the smallest power of two not below v >= 0, at most 254: "rceil"; NaN: 255."""
    return and_u32(ue8m0x2_rp_of_f32(ZERO, v), 0xFF)


def power_by_exponent(amax, add, emax):
    """e8m0 byte of the exponent of amax, `add` added to its pattern, less emax, in 0..254."""
    bits = float_as_uint(amax)
    exponent = shr_u32(add_u32(bits, add), 23)
    byte = select_u32(lt_u32(exponent, emax), 0, min_u32(sub_u32(exponent, emax), 254))
    byte = select_u32(eq_u32(bits, INFINITY_BITS), 254, byte)
    return select_u32(gt_u32(bits, INFINITY_BITS), 255, byte)


def rcp_qmax():
    """RN(1 / qmax)."""
    if ELEMENT == "e2m1":
        return SIXTH
    elif ELEMENT == "e4m3":
        return RCP_448
    else:
        return RCP_57344


def emax():
    """Exponent of the largest power of two that is an element."""
    if ELEMENT == "e2m1":
        return 2
    elif ELEMENT == "e4m3":
        return 8
    else:
        return 15


def half_of_last_bit():
    """Half a unit of an element's last bit, in a float32's pattern: what "even" adds."""
    if ELEMENT == "e2m1":
        return 1 << 21
    elif ELEMENT == "e4m3":
        return 1 << 19
    else:
        return 1 << 20


def power_for(amax):
    """e8m0 byte for a block whose largest magnitude is amax, without an encode scale."""
    if ROUNDING == "rceil":
        return power_at_least(mul_rn(amax, rcp_qmax()))
    elif ROUNDING == "floor":
        return power_by_exponent(amax, 0, emax())
    elif ROUNDING == "ceil":
        return power_by_exponent(amax, 0x7FFFFF, emax())
    else:
        return power_by_exponent(amax, half_of_last_bit(), emax())


def inverse_power(byte):
    """2^(127 - byte), exactly; NaN for 255."""
    bits = select_u32(eq_u32(byte, 254), 0x00400000, shl_u32(sub_u32(254, byte), 23))
    return uint_as_float(select_u32(eq_u32(byte, 255), NAN_BITS, bits))


def bounded_reciprocal(d):
    """min(RN(1/d), FLT_MAX), NaN kept."""
    q = rcp_rn(d)
    return select_f32(q > LARGEST, LARGEST, q)


def block_scale(amax, c, r):
    """Scale byte of a block and q, what its elements are multiplied by.

    amax is the block's largest magnitude, c = RN(g * RN(1/6)) and r = RN(1/g) for the encode scale
    g.
    """
    if SCALE == "e4m3":
        byte = and_u32(e4m3x2_of_f32(ZERO, mul_rn(amax, c)), 0xFF)
        d = decode_scale_byte(byte, SCALE)
        if not UNIT:
            d = mul_rn(d, r)
        return byte, select_f32(eq_u32(byte, 0), ZERO, bounded_reciprocal(d))
    elif UNIT:
        byte = power_for(amax)
        return byte, inverse_power(byte)
    else:
        byte = power_at_least(mul_rn(amax, c))
        return byte, bounded_reciprocal(mul_rn(decode_scale_byte(byte, SCALE), r))


# Encode scales -----------------------------------------------------------------------------------


def usable(g):
    """An encode scale that counts: what is not finite or is below 2^-126 counts as 1."""
    # Both comparisons are false for a NaN.
    return select_f32((g >= SMALLEST_NORMAL) and (g <= LARGEST), g, ONE)


def encode_scale_of_amax(amax):
    """min(RN(2688 / amax), FLT_MAX); 1 where amax is 0, infinite or NaN."""
    g = div_rn(ENCODE_TARGET, amax)
    g = select_f32(g > LARGEST, LARGEST, g)
    return select_f32((amax > ZERO) and (amax <= LARGEST), g, ONE)


# Where scales lie --------------------------------------------------------------------------------


def tcgen_place(row, block, k_tiles):
    """Byte of the scale of (row, block) in the tcgen layout."""
    # Shifts and masks of numbers that are not negative: the card divides slowly.
    tile = (row >> 7) * k_tiles + (block >> 2)
    return (tile << 9) + ((row & 31) << 4) + ((row & 127) >> 5 << 2) + (block & 3)
