"""Bit patterns, and conversions between float32 and the 16-bit types.

A 16-bit value travels in the low half of a u32, a pair of them as both halves. Conversions round to
nearest even, keep subnormals, overflow to infinity, and make every NaN the canonical one:
0x7FFFFFFF, 0x7FFF. Source: PTX ISA, ``cvt``.
"""

from __future__ import annotations

import math

from . import lower
from .instruction import instruction
from .rounding import MASK, bits_of, code_of, float_of, to_f32


@instruction("u32(f32)", build=lower.bitcast("u32"))
def float_as_uint(a):
    """The bits of a float32."""
    return bits_of(a)


@instruction("f32(u32)", build=lower.bitcast("f32"))
def uint_as_float(a):
    """The float32 of these bits."""
    return float_of(a)


# Halves ------------------------------------------------------------------------------------------


@instruction("u32(u32)", build=lower.with_constant("and_", 0xFFFF))
def lo_u16(a):
    """The low half."""
    return a & 0xFFFF


@instruction("u32(u32)", build=lower.with_constant("lshr", 16))
def hi_u16(a):
    """The high half."""
    return (a & MASK) >> 16


@instruction("u32(u32, u32)", asm="prmt.b32 $0, $2, $1, 0x5410;")
def pack_u16(hi, lo):
    """The low halves of both: `hi` above `lo`."""
    return ((hi & 0xFFFF) << 16) | (lo & 0xFFFF)


# To float32, exactly -----------------------------------------------------------------------------


@instruction("f32(u32)")
def f32_of_bf16(a):
    """A bfloat16 (low half) as float32; a NaN keeps its payload."""
    return float_of((a & 0xFFFF) << 16)


@f32_of_bf16.lowering()
def _f32_of_bf16(builder, ir, arguments):
    return builder.bitcast(
        builder.shl(arguments[0], ir.Constant(ir.IntType(32), 16)), ir.FloatType()
    )


@instruction("f32(u32)")
def f32_of_bf16_hi(a):
    """The bfloat16 in the high half as float32; a NaN keeps its payload."""
    return float_of(a & 0xFFFF0000)


@f32_of_bf16_hi.lowering()
def _f32_of_bf16_hi(builder, ir, arguments):
    return builder.bitcast(
        builder.and_(arguments[0], ir.Constant(ir.IntType(32), 0xFFFF0000)), ir.FloatType()
    )


@instruction("f32(u32)", asm="{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }")
def f32_of_f16(a):
    """A float16 (low half) as float32."""
    return _f16(a & 0xFFFF)


@instruction("f32(u32)", asm="{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }")
def f32_of_f16_hi(a):
    """The float16 in the high half as float32."""
    return _f16((a & MASK) >> 16)


def _f16(code):
    exponent, fraction = code >> 10 & 31, code & 1023
    if exponent == 31:
        magnitude = math.nan if fraction else math.inf
    elif exponent:
        magnitude = math.ldexp(1024 + fraction, exponent - 25)
    else:
        magnitude = math.ldexp(fraction, -24)
    return to_f32(-magnitude if code >> 15 else magnitude)


# From float32 ------------------------------------------------------------------------------------


def _half(a, mantissa, smallest, infinity):
    a = float(a)
    if a != a:
        return 0x7FFF
    code = infinity if math.isinf(a) else min(code_of(abs(a), mantissa, smallest), infinity)
    return code | (0x8000 if math.copysign(1.0, a) < 0.0 else 0)


def round_bf16(a):
    """Return the bfloat16 code of a Python float, rounded once: for models."""
    return _half(a, 7, -126, 0x7F80)


def round_f16(a):
    """Return the float16 code of a Python float, rounded once: for models."""
    return _half(a, 10, -14, 0x7C00)


@instruction("u32(f32)", asm="{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; cvt.u32.u16 $0, h; }")
def bf16_of_f32(a):
    """The bfloat16 nearest to a."""
    return round_bf16(a)


@instruction("u32(f32)", asm="{ .reg .b16 h; cvt.rn.f16.f32 h, $1; cvt.u32.u16 $0, h; }")
def f16_of_f32(a):
    """The float16 nearest to a."""
    return round_f16(a)


@instruction("u32(f32, f32)", asm="cvt.rn.bf16x2.f32 $0, $1, $2;")
def bf16x2_of_f32(hi, lo):
    """The nearest bfloat16s, `hi` in the high half."""
    return (round_bf16(hi) << 16) | round_bf16(lo)


@instruction("u32(f32, f32)", asm="cvt.rn.f16x2.f32 $0, $1, $2;")
def f16x2_of_f32(hi, lo):
    """The nearest float16s, `hi` in the high half."""
    return (round_f16(hi) << 16) | round_f16(lo)
