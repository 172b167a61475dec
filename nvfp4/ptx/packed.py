"""Arithmetic on pairs of 16-bit floats in one register.

Rounded once, to nearest even; subnormals kept; a NaN result is the canonical 0x7FFF. Source: PTX
ISA, half precision floating-point instructions.
"""

from __future__ import annotations

from . import lower
from .bits import f32_of_bf16, f32_of_f16, round_bf16, round_f16
from .instruction import instruction
from .rounding import sum_to_odd

_BF16 = (f32_of_bf16.model, round_bf16)
_F16 = (f32_of_f16.model, round_f16)


def _map(kind, function, *words):
    """Apply a function of Python floats to the upper and to the lower halves."""
    widen, narrow = kind
    hi = narrow(function(*(float(widen((word >> 16) & 0xFFFF)) for word in words)))
    lo = narrow(function(*(float(widen(word & 0xFFFF)) for word in words)))
    return (hi << 16) | lo


def _add(a, b):
    return sum_to_odd(a, b)


def _subtract(a, b):
    return sum_to_odd(a, -b)


def _multiply(a, b):
    return a * b


def _fused(a, b, c):
    return sum_to_odd(a * b, c)


def _magnitude_order(code):
    """A number that orders 16-bit floats as their values do, -0 below +0."""
    return -(code & 0x7FFF) - 1 if code & 0x8000 else code


def _extreme(choose, is_nan, propagate, *words):
    """The larger or smaller of each pair of halves."""
    result = 0
    for shift in (16, 0):
        codes = [(word >> shift) & 0xFFFF for word in words]
        numbers = [code for code in codes if not is_nan(code)]
        if not numbers or (propagate and len(numbers) < len(codes)):
            code = 0x7FFF
        else:
            code = choose(numbers, key=_magnitude_order)
        result |= code << shift
    return result


def _nan_bf16(code):
    return code & 0x7FFF > 0x7F80


def _nan_f16(code):
    return code & 0x7FFF > 0x7C00


# Where max has no xorsign (sm_80): the maximum of the magnitudes, then the signs.
_XORSIGN = (
    "{{ .reg .b32 a, b, s; and.b32 a, $1, 0x7FFF7FFF; and.b32 b, $2, 0x7FFF7FFF;"
    " max.NaN.{kind} a, a, b; xor.b32 s, $1, $2; and.b32 s, s, 0x80008000; or.b32 $0, a, s; }}"
)


def _xorsign(maximum, is_nan, a, b):
    result = maximum(a & 0x7FFF7FFF, b & 0x7FFF7FFF)
    for shift in (16, 0):
        if not is_nan((result >> shift) & 0xFFFF):
            result |= (a ^ b) & (0x8000 << shift)
    return result


# bfloat16 ----------------------------------------------------------------------------------------


@instruction("u32(u32, u32)", asm="add.rn.bf16x2 $0, $1, $2;", min_cc=(9, 0))
def add_bf16x2(a, b):
    """Return a + b."""
    return _map(_BF16, _add, a, b)


add_bf16x2.lowering(
    asm="{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }"
)


@instruction("u32(u32, u32)", asm="sub.rn.bf16x2 $0, $1, $2;", min_cc=(9, 0))
def sub_bf16x2(a, b):
    """Return a - b."""
    return _map(_BF16, _subtract, a, b)


sub_bf16x2.lowering(
    asm="{ .reg .b32 one; mov.b32 one, 0xBF80BF80; fma.rn.bf16x2 $0, $2, one, $1; }"
)


@instruction("u32(u32, u32)", asm="mul.rn.bf16x2 $0, $1, $2;", min_cc=(9, 0))
def mul_bf16x2(a, b):
    """Return a * b."""
    return _map(_BF16, _multiply, a, b)


mul_bf16x2.lowering(
    asm="{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }"
)


def _by_one(text):
    """Multiplication by `d`, both halves of which are one half of $2."""
    return (
        "{ .reg .b16 l, h; .reg .b32 d, zero; mov.b32 zero, 0x80008000; mov.b32 {l, h}, $2; "
        f"{text} }}"
    )


@instruction(
    "u32(u32, u32)", asm=_by_one("mov.b32 d, {l, l}; mul.rn.bf16x2 $0, $1, d;"), min_cc=(9, 0)
)
def mul_bf16x2_low(a, b):
    """Return both halves of a times the lower half of b."""
    return _map(_BF16, _multiply, a, (b & 0xFFFF) * 0x10001)


mul_bf16x2_low.lowering(asm=_by_one("mov.b32 d, {l, l}; fma.rn.bf16x2 $0, $1, d, zero;"))


@instruction(
    "u32(u32, u32)", asm=_by_one("mov.b32 d, {h, h}; mul.rn.bf16x2 $0, $1, d;"), min_cc=(9, 0)
)
def mul_bf16x2_high(a, b):
    """Return both halves of a times the upper half of b."""
    return _map(_BF16, _multiply, a, (b >> 16 & 0xFFFF) * 0x10001)


mul_bf16x2_high.lowering(asm=_by_one("mov.b32 d, {h, h}; fma.rn.bf16x2 $0, $1, d, zero;"))


@instruction("u32(u32, u32, u32)", asm="fma.rn.bf16x2 $0, $1, $2, $3;")
def fma_bf16x2(a, b, c):
    """Return a * b + c."""
    return _map(_BF16, _fused, a, b, c)


@instruction("u32(u32, u32)", asm="max.bf16x2 $0, $1, $2;")
def max_bf16x2(a, b):
    """The larger; a NaN is dropped where the other is a number."""
    return _extreme(max, _nan_bf16, False, a, b)


@instruction("u32(u32, u32)", asm="min.bf16x2 $0, $1, $2;")
def min_bf16x2(a, b):
    """The smaller; a NaN is dropped where the other is a number."""
    return _extreme(min, _nan_bf16, False, a, b)


@instruction("u32(u32, u32)", asm="max.NaN.bf16x2 $0, $1, $2;")
def max_nan_bf16x2(a, b):
    """The larger; NaN where an operand is NaN."""
    return _extreme(max, _nan_bf16, True, a, b)


@instruction("u32(u32, u32)", asm="max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", min_cc=(8, 6))
def amax_bf16x2(a, b):
    """The larger magnitude, with the product of the signs; NaN, of any sign, for a NaN."""
    return _xorsign(max_nan_bf16x2.model, _nan_bf16, a, b)


amax_bf16x2.lowering(asm=_XORSIGN.format(kind="bf16x2"))


@instruction("u32(u32, u32)", asm="min.NaN.bf16x2 $0, $1, $2;")
def min_nan_bf16x2(a, b):
    """The smaller; NaN where an operand is NaN."""
    return _extreme(min, _nan_bf16, True, a, b)


# float16 -----------------------------------------------------------------------------------------


@instruction("u32(u32, u32)", asm="add.rn.f16x2 $0, $1, $2;")
def add_f16x2(a, b):
    """Return a + b."""
    return _map(_F16, _add, a, b)


@instruction("u32(u32, u32)", asm="sub.rn.f16x2 $0, $1, $2;")
def sub_f16x2(a, b):
    """Return a - b."""
    return _map(_F16, _subtract, a, b)


@instruction("u32(u32, u32)", asm="mul.rn.f16x2 $0, $1, $2;")
def mul_f16x2(a, b):
    """Return a * b."""
    return _map(_F16, _multiply, a, b)


@instruction("u32(u32, u32, u32)", asm="fma.rn.f16x2 $0, $1, $2, $3;")
def fma_f16x2(a, b, c):
    """Return a * b + c."""
    return _map(_F16, _fused, a, b, c)


@instruction("u32(u32, u32)", asm="max.f16x2 $0, $1, $2;")
def max_f16x2(a, b):
    """The larger; a NaN is dropped where the other is a number."""
    return _extreme(max, _nan_f16, False, a, b)


@instruction("u32(u32, u32)", asm="min.f16x2 $0, $1, $2;")
def min_f16x2(a, b):
    """The smaller; a NaN is dropped where the other is a number."""
    return _extreme(min, _nan_f16, False, a, b)


@instruction("u32(u32, u32)", asm="max.NaN.f16x2 $0, $1, $2;")
def max_nan_f16x2(a, b):
    """The larger; NaN where an operand is NaN."""
    return _extreme(max, _nan_f16, True, a, b)


@instruction("u32(u32, u32)", asm="max.NaN.xorsign.abs.f16x2 $0, $1, $2;", min_cc=(8, 6))
def amax_f16x2(a, b):
    """The larger magnitude, with the product of the signs; NaN, of any sign, for a NaN."""
    return _xorsign(max_nan_f16x2.model, _nan_f16, a, b)


amax_f16x2.lowering(asm=_XORSIGN.format(kind="f16x2"))


@instruction("u32(u32, u32)", asm="min.NaN.f16x2 $0, $1, $2;")
def min_nan_f16x2(a, b):
    """The smaller; NaN where an operand is NaN."""
    return _extreme(min, _nan_f16, True, a, b)


# Both --------------------------------------------------------------------------------------------


@instruction("u32(u32)", build=lower.with_constant("and_", 0x7FFF7FFF))
def abs_16x2(a):
    """Clear the sign bits of two 16-bit floats of either type; a NaN keeps its payload."""
    return a & 0x7FFF7FFF


@instruction("u32(u32)", build=lower.with_constant("xor", 0x80008000))
def neg_16x2(a):
    """Flip the sign bits of two 16-bit floats of either type."""
    return (a ^ 0x80008000) & 0xFFFFFFFF
