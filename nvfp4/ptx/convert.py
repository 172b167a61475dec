"""Conversions to and from the element and scale types: e2m1, e4m3, e5m2, e8m0.

To a small type: round to nearest even and saturate to finite, as ``cvt.rn.satfinite`` does:
infinities give the largest value, the sign is kept (of zeros too), and every NaN gives the positive
code 0x7F, for e2m1 7 (which is 6). To a wider type: exact, and every NaN is the canonical one.
Pairs have `hi` in the upper half. Codes travel in the low bits of a u32. Source: PTX ISA, ``cvt``;
OCP Microscaling Formats, section 5.

Where an architecture has no such instruction a function stands in for it, with the same result for
every input; tests compare the two, and both with the golden model.
"""

from __future__ import annotations

import math

import numpy as np

from .arith import (
    abs_f32,
    add_rn,
    add_u32,
    and_u32,
    eq_u32,
    fma_rn,
    gt_u32,
    mad_u32,
    min_f32,
    min_u32,
    mul_rn,
    ne_u32,
    or_u32,
    select_f32,
    select_u32,
    shf_l,
    shl_u32,
    shr_u32,
    sub_u32,
)
from .bits import (
    bf16x2_of_f32,
    f16x2_of_f32,
    f32_of_f16,
    f32_of_f16_hi,
    float_as_uint,
    round_bf16,
    round_f16,
    uint_as_float,
)
from .instruction import instruction
from .rounding import NAN, bits_of, code_of, to_f32

# Models ------------------------------------------------------------------------------------------


def _code(a, mantissa, smallest, largest, nan):
    a = float(a)
    if a != a:
        return nan
    code = largest if math.isinf(a) else min(code_of(abs(a), mantissa, smallest), largest)
    sign = (nan + 1) if math.copysign(1.0, a) < 0.0 else 0
    return sign | code


def _e2m1(a):
    return _code(a, 1, 0, 7, 7)


def _e4m3(a):
    return _code(a, 3, -6, 0x7E, 0x7F)


def _e5m2(a):
    return _code(a, 2, -14, 0x7B, 0x7F)


def _value(code, mantissa, smallest, nan, infinity):
    """The value of the code of an eight-bit type."""
    magnitude = code & 0x7F
    if magnitude >= nan:
        return math.nan
    if magnitude == infinity:
        value = math.inf
    else:
        exponent, fraction = magnitude >> mantissa, magnitude & ((1 << mantissa) - 1)
        significand = fraction + (1 << mantissa if exponent else 0)
        value = math.ldexp(significand, max(exponent, 1) - 1 + smallest - mantissa)
    return -value if code & 0x80 else value


def _of_e4m3(code):
    return _value(code, 3, -6, 0x7F, None)


def _of_e5m2(code):
    return _value(code, 2, -14, 0x7D, 0x7C)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _of_e2m1(code):
    value = _E2M1[code & 7]
    return -value if code & 8 else value


def _pair(function, hi, lo, bits):
    return (function(hi) << bits) | function(lo)


# To e2m1 -----------------------------------------------------------------------------------------


@instruction(
    "u32(f32, f32)",
    asm="{ .reg .b8 b; .reg .b16 h; cvt.rn.satfinite.e2m1x2.f32 b, $1, $2;"
    " mov.b16 h, {b, 0}; cvt.u32.u16 $0, h; }",
    min_cc=(10, 0),
)
def e2m1x2_of_f32(hi, lo):
    """Two e2m1 codes: `hi` in bits 7..4, `lo` in bits 3..0."""
    return _pair(_e2m1, hi, lo, 4)


@instruction(
    "u32(f32, f32, f32, f32, f32, f32, f32, f32)",
    asm="{ .reg .b8 b0, b1, b2, b3;"
    " cvt.rn.satfinite.e2m1x2.f32 b0, $2, $1; cvt.rn.satfinite.e2m1x2.f32 b1, $4, $3;"
    " cvt.rn.satfinite.e2m1x2.f32 b2, $6, $5; cvt.rn.satfinite.e2m1x2.f32 b3, $8, $7;"
    " mov.b32 $0, {b0, b1, b2, b3}; }",
    min_cc=(10, 0),
)
def e2m1x8_of_f32(v0, v1, v2, v3, v4, v5, v6, v7):
    """Eight e2m1 codes: `v0` in bits 3..0, `v7` in bits 31..28, as columns are stored."""
    word = 0
    for value in (v7, v6, v5, v4, v3, v2, v1, v0):
        word = word << 4 | _e2m1(value)
    return word


def _doubled(a):
    """Return 2 a, in which every NaN is the canonical one, which is positive."""
    return mul_rn(a, np.float32(2.0))


def _e2m1_magnitude(doubled):
    """Return the bits of the float32 2^23 + code of the magnitude: the code is the low three.

    e2m1 values are 0.5 apart up to 2, then 1, then 2. The code of |a| is therefore the smallest of
    RN(2 |a|), RN(|a|) + 2, RN(|a| / 2) + 4 and 7, with RN to the nearest integer, ties to even. A
    float32 from 2^23 on has the spacing 1: adding, or fused adding, to such a number is that one
    rounding. A minimum drops NaN: its code is 7.
    """
    magnitude = abs_f32(doubled)
    code = add_rn(magnitude, np.float32(8388608.0))
    code = min_f32(code, fma_rn(magnitude, np.float32(0.5), np.float32(8388610.0)))
    code = min_f32(code, fma_rn(magnitude, np.float32(0.25), np.float32(8388612.0)))
    return float_as_uint(min_f32(code, np.float32(8388615.0)))


@e2m1x2_of_f32.without_hardware
def _e2m1x2_software(hi, lo):
    hi, lo = _doubled(hi), _doubled(lo)
    codes = mad_u32(_e2m1_magnitude(hi), 16, _e2m1_magnitude(lo))
    signs = shf_l(float_as_uint(lo), shr_u32(float_as_uint(hi), 28), 4)
    return or_u32(and_u32(codes, 0x77), and_u32(signs, 0x88))


@e2m1x8_of_f32.without_hardware
def _e2m1x8_software(v0, v1, v2, v3, v4, v5, v6, v7):
    v0, v1, v2, v3 = _doubled(v0), _doubled(v1), _doubled(v2), _doubled(v3)
    v4, v5, v6, v7 = _doubled(v4), _doubled(v5), _doubled(v6), _doubled(v7)
    codes = mad_u32(_e2m1_magnitude(v7), 16, _e2m1_magnitude(v6))
    codes = mad_u32(codes, 16, _e2m1_magnitude(v5))
    codes = mad_u32(codes, 16, _e2m1_magnitude(v4))
    codes = mad_u32(codes, 16, _e2m1_magnitude(v3))
    codes = mad_u32(codes, 16, _e2m1_magnitude(v2))
    codes = mad_u32(codes, 16, _e2m1_magnitude(v1))
    codes = mad_u32(codes, 16, _e2m1_magnitude(v0))
    signs = shf_l(float_as_uint(v6), shr_u32(float_as_uint(v7), 28), 4)
    signs = shf_l(float_as_uint(v5), signs, 4)
    signs = shf_l(float_as_uint(v4), signs, 4)
    signs = shf_l(float_as_uint(v3), signs, 4)
    signs = shf_l(float_as_uint(v2), signs, 4)
    signs = shf_l(float_as_uint(v1), signs, 4)
    signs = shf_l(float_as_uint(v0), signs, 4)
    # What is left of the last two 2^23, 0x4B000000 and 0xB0000000, goes.
    return or_u32(add_u32(codes, 0x05000000), and_u32(signs, 0x88888888))


# To e4m3 and e5m2 --------------------------------------------------------------------------------


@instruction(
    "u32(f32, f32)",
    asm="{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $1, $2; cvt.u32.u16 $0, h; }",
    min_cc=(8, 9),
)
def e4m3x2_of_f32(hi, lo):
    """Two e4m3 codes: `hi` in bits 15..8, `lo` in bits 7..0."""
    return _pair(_e4m3, hi, lo, 8)


@instruction(
    "u32(f32, f32)",
    asm="{ .reg .b16 h; cvt.rn.satfinite.e5m2x2.f32 h, $1, $2; cvt.u32.u16 $0, h; }",
    min_cc=(8, 9),
)
def e5m2x2_of_f32(hi, lo):
    """Two e5m2 codes: `hi` in bits 15..8, `lo` in bits 7..0."""
    return _pair(_e5m2, hi, lo, 8)


def _float8(a, shift, rebias, smallest_normal, anchor, anchor_bits, largest):
    """Return the code, 0..255, of `a` in a type with ``23 - shift`` stored bits of significand."""
    bits = float_as_uint(a)
    magnitude = and_u32(bits, 0x7FFFFFFF)
    half = sub_u32(shl_u32(1, shift - 1), 1)
    normal = add_u32(add_u32(magnitude, half), and_u32(shr_u32(magnitude, shift), 1))
    normal = min_u32(sub_u32(shr_u32(normal, shift), rebias), largest)
    # Below the smallest normal number: the anchor's last place is the spacing, so that adding
    # rounds.
    subnormal = sub_u32(float_as_uint(add_rn(uint_as_float(magnitude), anchor)), anchor_bits)
    code = select_u32(gt_u32(smallest_normal, magnitude), subnormal, normal)
    code = or_u32(code, and_u32(shr_u32(bits, 24), 0x80))
    return select_u32(gt_u32(magnitude, 0x7F800000), 0x7F, code)


@e4m3x2_of_f32.without_hardware
def _e4m3x2_software(hi, lo):
    upper = _float8(hi, 20, 960, 0x3C800000, np.float32(16384.0), 0x46800000, 0x7E)
    lower = _float8(lo, 20, 960, 0x3C800000, np.float32(16384.0), 0x46800000, 0x7E)
    return or_u32(shl_u32(upper, 8), lower)


@e5m2x2_of_f32.without_hardware
def _e5m2x2_software(hi, lo):
    upper = _float8(hi, 21, 448, 0x38800000, np.float32(128.0), 0x43000000, 0x7B)
    lower = _float8(lo, 21, 448, 0x38800000, np.float32(128.0), 0x43000000, 0x7B)
    return or_u32(shl_u32(upper, 8), lower)


# To e8m0 -----------------------------------------------------------------------------------------


def _e8m0(a, up):
    magnitude = bits_of(a) & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return 0xFF
    byte = magnitude >> 23
    if up and magnitude & 0x7FFFFF and magnitude > 0x00400000:
        byte += 1
    return min(byte, 0xFE)


@instruction(
    "u32(f32, f32)",
    asm="{ .reg .b16 h; cvt.rp.satfinite.ue8m0x2.f32 h, $1, $2; cvt.u32.u16 $0, h; }",
    min_cc=(10, 0),
)
def ue8m0x2_rp_of_f32(hi, lo):
    """Two e8m0 bytes of magnitudes, rounded up to a power of two, 2^-127 (0) to 2^127 (254)."""
    return _e8m0(hi, True) << 8 | _e8m0(lo, True)


@instruction(
    "u32(f32, f32)",
    asm="{ .reg .b16 h; cvt.rz.satfinite.ue8m0x2.f32 h, $1, $2; cvt.u32.u16 $0, h; }",
    min_cc=(10, 0),
)
def ue8m0x2_rz_of_f32(hi, lo):
    """Two e8m0 bytes of magnitudes, rounded down to a power of two, 2^-127 to 2^127 (254)."""
    return _e8m0(hi, False) << 8 | _e8m0(lo, False)


def _e8m0_up(a):
    magnitude = and_u32(float_as_uint(a), 0x7FFFFFFF)
    # 2^-127 and less: byte 0; with one less than a power of two added, the exponent's field is
    # rounded up.
    byte = shr_u32(add_u32(magnitude, 0x7FFFFF), 23)
    byte = min_u32(select_u32(gt_u32(magnitude, 0x00400000), byte, 0), 0xFE)
    return select_u32(gt_u32(magnitude, 0x7F800000), 0xFF, byte)


def _e8m0_down(a):
    magnitude = and_u32(float_as_uint(a), 0x7FFFFFFF)
    byte = min_u32(shr_u32(magnitude, 23), 0xFE)
    return select_u32(gt_u32(magnitude, 0x7F800000), 0xFF, byte)


@ue8m0x2_rp_of_f32.without_hardware
def _ue8m0x2_rp_software(hi, lo):
    return or_u32(shl_u32(_e8m0_up(hi), 8), _e8m0_up(lo))


@ue8m0x2_rz_of_f32.without_hardware
def _ue8m0x2_rz_software(hi, lo):
    return or_u32(shl_u32(_e8m0_down(hi), 8), _e8m0_down(lo))


# To float32 --------------------------------------------------------------------------------------


@instruction("f32(u32)")
def f32_of_e2m1(code):
    """The value of an e2m1 code (low four bits; others are ignored)."""
    return np.float32(_of_e2m1(code))


@f32_of_e2m1.without_hardware
def _f32_of_e2m1_software(code):
    # As a float32, the code's three bits below the exponent's field mean value * 2^-126, 0.5
    # included.
    bits = and_u32(shl_u32(code, 22), 0x01C00000)
    sign = and_u32(shl_u32(code, 28), 0x80000000)
    return mul_rn(uint_as_float(or_u32(bits, sign)), uint_as_float(0x7E800000))


@instruction("f32(u32)")
def f32_of_e4m3(code):
    """The value of an e4m3 code (low eight bits; others are ignored)."""
    return to_f32(_of_e4m3(code))


@f32_of_e4m3.without_hardware
def _f32_of_e4m3_software(code):
    bits = and_u32(shl_u32(code, 20), 0x07F00000)
    sign = and_u32(shl_u32(code, 24), 0x80000000)
    value = mul_rn(uint_as_float(or_u32(bits, sign)), uint_as_float(0x7B800000))
    return select_f32(eq_u32(bits, 0x07F00000), uint_as_float(0x7FFFFFFF), value)


@instruction("f32(u32)")
def f32_of_e5m2(code):
    """The value of an e5m2 code (low eight bits; others are ignored); infinities exist."""
    return to_f32(_of_e5m2(code))


@f32_of_e5m2.without_hardware
def _f32_of_e5m2_software(code):
    bits = and_u32(shl_u32(code, 21), 0x0FE00000)
    sign = and_u32(shl_u32(code, 24), 0x80000000)
    value = mul_rn(uint_as_float(or_u32(bits, sign)), uint_as_float(0x77800000))
    infinite = uint_as_float(or_u32(sign, 0x7F800000))
    value = select_f32(eq_u32(bits, 0x0F800000), infinite, value)
    return select_f32(gt_u32(bits, 0x0F800000), uint_as_float(0x7FFFFFFF), value)


@instruction("f32(u32)")
def f32_of_e8m0(code):
    """2^(code - 127), of the low eight bits; 255 is NaN."""
    code &= 0xFF
    return NAN if code == 0xFF else np.float32(math.ldexp(1.0, code - 127))


@f32_of_e8m0.without_hardware
def _f32_of_e8m0_software(code):
    exponent = and_u32(shl_u32(code, 23), 0x7F800000)
    bits = select_u32(ne_u32(exponent, 0), exponent, 0x00400000)
    return uint_as_float(select_u32(eq_u32(exponent, 0x7F800000), 0x7FFFFFFF, bits))


# To pairs of 16-bit types ------------------------------------------------------------------------


@instruction(
    "u32(u32)",
    asm="{ .reg .b8 b, c; .reg .b16 h; cvt.u16.u32 h, $1; mov.b16 {b, c}, h;"
    " cvt.rn.f16x2.e2m1x2 $0, b; }",
    min_cc=(10, 0),
)
def f16x2_of_e2m1x2(codes):
    """Two e2m1 codes (bits 7..0) as float16s: that of bits 7..4 in the upper half."""
    return round_f16(_of_e2m1(codes >> 4)) << 16 | round_f16(_of_e2m1(codes))


@f16x2_of_e2m1x2.without_hardware
def _f16x2_of_e2m1x2_software(codes):
    return f16x2_of_f32(f32_of_e2m1(shr_u32(codes, 4)), f32_of_e2m1(codes))


@instruction(
    "u32(u32)",
    asm="{ .reg .b8 b, c; .reg .b16 h; cvt.u16.u32 h, $1; mov.b16 {b, c}, h;"
    " cvt.rn.bf16x2.e2m1x2 $0, b; }",
    min_cc=(10, 0),
)
def bf16x2_of_e2m1x2(codes):
    """Two e2m1 codes (bits 7..0) as bfloat16s: that of bits 7..4 in the upper half."""
    return round_bf16(_of_e2m1(codes >> 4)) << 16 | round_bf16(_of_e2m1(codes))


@bf16x2_of_e2m1x2.without_hardware
def _bf16x2_of_e2m1x2_software(codes):
    return bf16x2_of_f32(f32_of_e2m1(shr_u32(codes, 4)), f32_of_e2m1(codes))


@instruction(
    "u32(u32)", asm="{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 $0, h; }", min_cc=(8, 9)
)
def f16x2_of_e4m3x2(codes):
    """Two e4m3 codes (bits 15..0) as float16s, in the same order."""
    return round_f16(_of_e4m3(codes >> 8)) << 16 | round_f16(_of_e4m3(codes))


@f16x2_of_e4m3x2.without_hardware
def _f16x2_of_e4m3x2_software(codes):
    return f16x2_of_f32(f32_of_e4m3(shr_u32(codes, 8)), f32_of_e4m3(codes))


@instruction(
    "u32(u32)", asm="{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.rn.f16x2.e5m2x2 $0, h; }", min_cc=(8, 9)
)
def f16x2_of_e5m2x2(codes):
    """Two e5m2 codes (bits 15..0) as float16s, in the same order."""
    return round_f16(_of_e5m2(codes >> 8)) << 16 | round_f16(_of_e5m2(codes))


@f16x2_of_e5m2x2.without_hardware
def _f16x2_of_e5m2x2_software(codes):
    # An e5m2 code is the upper byte of a float16.
    hi, lo = and_u32(codes, 0xFF00), and_u32(shl_u32(codes, 8), 0xFF00)
    hi = select_u32(gt_u32(and_u32(hi, 0x7FFF), 0x7C00), 0x7FFF, hi)
    lo = select_u32(gt_u32(and_u32(lo, 0x7FFF), 0x7C00), 0x7FFF, lo)
    return or_u32(shl_u32(hi, 16), lo)


@instruction(
    "u32(u32)",
    asm="{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.rn.bf16x2.e4m3x2 $0, h; }",
    min_cc=(10, 0),
    min_release=(13, 1),
)
def bf16x2_of_e4m3x2(codes):
    """Two e4m3 codes (bits 15..0) as bfloat16s, in the same order."""
    return round_bf16(_of_e4m3(codes >> 8)) << 16 | round_bf16(_of_e4m3(codes))


@bf16x2_of_e4m3x2.without_hardware
def _bf16x2_of_e4m3x2_software(codes):
    halves = f16x2_of_e4m3x2(codes)
    return bf16x2_of_f32(f32_of_f16_hi(halves), f32_of_f16(halves))


@instruction(
    "u32(u32)",
    asm="{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.rn.bf16x2.e5m2x2 $0, h; }",
    min_cc=(10, 0),
    min_release=(13, 1),
)
def bf16x2_of_e5m2x2(codes):
    """Two e5m2 codes (bits 15..0) as bfloat16s, in the same order."""
    return round_bf16(_of_e5m2(codes >> 8)) << 16 | round_bf16(_of_e5m2(codes))


@bf16x2_of_e5m2x2.without_hardware
def _bf16x2_of_e5m2x2_software(codes):
    halves = f16x2_of_e5m2x2(codes)
    return bf16x2_of_f32(f32_of_f16_hi(halves), f32_of_f16(halves))


@instruction(
    "u32(u32)",
    asm="{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.rn.bf16x2.ue8m0x2 $0, h; }",
    min_cc=(10, 0),
)
def bf16x2_of_ue8m0x2(codes):
    """Two e8m0 bytes (bits 15..0) as bfloat16s, in the same order."""
    return round_bf16(f32_of_e8m0.model(codes >> 8)) << 16 | round_bf16(f32_of_e8m0.model(codes))


@bf16x2_of_ue8m0x2.without_hardware
def _bf16x2_of_ue8m0x2_software(codes):
    return bf16x2_of_f32(f32_of_e8m0(shr_u32(codes, 8)), f32_of_e8m0(codes))
