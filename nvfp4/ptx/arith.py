"""Arithmetic that is exactly as wide, and rounded exactly as often, as it is written.

float32: IEEE, nearest even, subnormals kept, a product and a sum never contracted; a NaN result is
the canonical 0x7FFFFFFF (PTX leaves the payload open for ``abs`` and ``neg``; the models give the
canonical one there too). Integers wrap at 32 bits; operands are taken modulo 2^32. Source: PTX ISA,
sections on integer, floating-point, comparison and selection, logic and shift instructions.
"""

from __future__ import annotations

import math

import numpy as np

from . import lower
from .instruction import instruction
from .rounding import MASK, NAN, bits_of, float_of, signed, sum_to_odd, to_f32

# float32 -----------------------------------------------------------------------------------------


@instruction("f32(f32, f32)", asm="add.rn.f32 $0, $1, $2;")
def add_rn(a, b):
    """Return a + b, rounded once."""
    # In float64 the sum, and in the functions below the product, quotient and root, may be rounded;
    # rounding that again to float32 does no harm, because 53 >= 2 * 24 + 2.
    return to_f32(float(a) + float(b))


@instruction("f32(f32, f32)", asm="sub.rn.f32 $0, $1, $2;")
def sub_rn(a, b):
    """Return a - b, rounded once."""
    return to_f32(float(a) - float(b))


@instruction("f32(f32, f32)", asm="mul.rn.f32 $0, $1, $2;")
def mul_rn(a, b):
    """Return a * b, rounded once."""
    return to_f32(float(a) * float(b))


@instruction("f32(f32, f32, f32)", asm="fma.rn.f32 $0, $1, $2, $3;")
def fma_rn(a, b, c):
    """Return a * b + c, rounded once."""
    return to_f32(sum_to_odd(float(a) * float(b), float(c)))


@instruction("f32(f32, f32)", asm="div.rn.f32 $0, $1, $2;")
def div_rn(a, b):
    """Return a / b, rounded once."""
    a, b = float(a), float(b)
    if a != a or b != b or (a == 0.0 and b == 0.0):
        return NAN
    if b == 0.0:
        return np.float32(math.copysign(math.inf, a) * math.copysign(1.0, b))
    return to_f32(a / b)


@instruction("f32(f32)", asm="rcp.rn.f32 $0, $1;")
def rcp_rn(a):
    """Return 1 / a, rounded once."""
    return div_rn.model(1.0, a)


@instruction("f32(f32)", asm="sqrt.rn.f32 $0, $1;")
def sqrt_rn(a):
    """The square root, rounded once."""
    a = float(a)
    return to_f32(math.sqrt(a)) if a >= 0.0 else NAN


@instruction("f32(f32, f32)", asm="min.f32 $0, $1, $2;")
def min_f32(a, b):
    """The smaller one; a NaN is dropped where the other operand is a number; -0 < +0."""
    if a != a or b != b:
        return _number(a, b)
    if a == b:
        return a if bits_of(a) >> 31 else b
    return a if a < b else b


@instruction("f32(f32, f32)", asm="max.f32 $0, $1, $2;")
def max_f32(a, b):
    """The larger one; a NaN is dropped where the other operand is a number; -0 < +0."""
    if a != a or b != b:
        return _number(a, b)
    if a == b:
        return b if bits_of(a) >> 31 else a
    return a if a > b else b


def _number(a, b):
    """The operand that is a number, of two of which one at least is none."""
    if a == a:
        return a
    return b if b == b else NAN


@instruction("f32(f32, f32)", asm="max.NaN.f32 $0, $1, $2;")
def max_nan_f32(a, b):
    """The larger one; NaN where an operand is NaN."""
    return NAN if a != a or b != b else max_f32.model(a, b)


@instruction("f32(f32, f32)", asm="min.NaN.f32 $0, $1, $2;")
def min_nan_f32(a, b):
    """The smaller one; NaN where an operand is NaN."""
    return NAN if a != a or b != b else min_f32.model(a, b)


@instruction("f32(f32)", asm="abs.f32 $0, $1;")
def abs_f32(a):
    """The magnitude."""
    return float_of(bits_of(a) & 0x7FFFFFFF) if a == a else NAN


@instruction("f32(f32)", asm="neg.f32 $0, $1;")
def neg_f32(a):
    """Return -a."""
    return float_of(bits_of(a) ^ 0x80000000) if a == a else NAN


# 32-bit integers ---------------------------------------------------------------------------------


@instruction("u32(u32, u32)", build=lower.op("add"))
def add_u32(a, b):
    """Return a + b."""
    return (a + b) & MASK


@instruction("u32(u32, u32)", build=lower.op("sub"))
def sub_u32(a, b):
    """Return a - b."""
    return (a - b) & MASK


@instruction("u32(u32, u32)", build=lower.op("mul"))
def mul_u32(a, b):
    """The low 32 bits of a * b."""
    return (a * b) & MASK


@instruction("u32(u32, u32, u32)", asm="mad.lo.u32 $0, $1, $2, $3;")
def mad_u32(a, b, c):
    """The low 32 bits of a * b + c, as one instruction of the multiplier's pipe."""
    return (a * b + c) & MASK


@instruction("u32(u32, u32)", asm="mul.hi.u32 $0, $1, $2;")
def mulhi_u32(a, b):
    """The high 32 bits of the 64-bit product."""
    return ((a & MASK) * (b & MASK)) >> 32


@instruction("u32(u32, u32)", build=lower.op("udiv"))
def div_u32(a, b):
    """Return a / b, rounded down; b must not be 0."""
    return (a & MASK) // (b & MASK)


@instruction("u32(u32, u32)", build=lower.op("urem"))
def rem_u32(a, b):
    """Return a modulo b; b must not be 0."""
    return (a & MASK) % (b & MASK)


@instruction("u32(u32, u32)", build=lower.op("and_"))
def and_u32(a, b):
    """Bitwise and."""
    return a & b & MASK


@instruction("u32(u32, u32)", build=lower.op("or_"))
def or_u32(a, b):
    """Bitwise or."""
    return (a | b) & MASK


@instruction("u32(u32, u32)", build=lower.op("xor"))
def xor_u32(a, b):
    """Bitwise exclusive or."""
    return (a ^ b) & MASK


@instruction("u32(u32)", build=lower.op("not_"))
def not_u32(a):
    """Bitwise not."""
    return ~a & MASK


@instruction("u32(u32, u32)", build=lower.shift("shl"))
def shl_u32(a, amount):
    """Shift left; by 32 or more gives 0."""
    amount &= MASK
    return (a << amount) & MASK if amount < 32 else 0


@instruction("u32(u32, u32)", build=lower.shift("lshr"))
def shr_u32(a, amount):
    """Shift right, zeros in; by 32 or more gives 0."""
    amount &= MASK
    return (a & MASK) >> amount if amount < 32 else 0


@instruction("u32(u32, u32)", build=lower.smaller(signed=False))
def min_u32(a, b):
    """The smaller one."""
    return min(a & MASK, b & MASK)


@instruction("u32(u32, u32)", build=lower.larger(signed=False))
def max_u32(a, b):
    """The larger one."""
    return max(a & MASK, b & MASK)


@instruction("i32(i32, i32)", build=lower.op("add"))
def add_i32(a, b):
    """Return a + b."""
    return signed(a + b)


@instruction("i32(i32, i32)", build=lower.op("sub"))
def sub_i32(a, b):
    """Return a - b."""
    return signed(a - b)


@instruction("i32(i32, i32)", build=lower.op("mul"))
def mul_i32(a, b):
    """The low 32 bits of a * b."""
    return signed(a * b)


@instruction("i32(i32, u32)")
def sar_i32(a, amount):
    """Shift right, copies of the sign in; by 32 or more leaves the sign."""
    return signed(a) >> min(amount & MASK, 31)


@sar_i32.lowering()
def _sar(builder, ir, arguments):
    last = ir.Constant(ir.IntType(32), 31)
    inside = builder.icmp_unsigned("<", arguments[1], last)
    return builder.ashr(arguments[0], builder.select(inside, arguments[1], last))


@instruction("i32(i32, i32)", build=lower.smaller(signed=True))
def min_i32(a, b):
    """The smaller one."""
    return min(signed(a), signed(b))


@instruction("i32(i32, i32)", build=lower.larger(signed=True))
def max_i32(a, b):
    """The larger one."""
    return max(signed(a), signed(b))


# Bits of 32-bit integers -------------------------------------------------------------------------


@instruction("u32(u32)", asm="clz.b32 $0, $1;")
def clz(a):
    """How many zeros are above the highest set bit; 32 for 0."""
    return 32 - (a & MASK).bit_length()


@instruction("u32(u32)", asm="popc.b32 $0, $1;")
def popc(a):
    """How many bits are set."""
    return (a & MASK).bit_count()


@instruction("u32(u32)", asm="brev.b32 $0, $1;")
def brev(a):
    """The bits in reverse order."""
    return int(f"{a & MASK:032b}"[::-1], 2)


@instruction(
    "u32(u32)",
    asm="{ .reg .b32 n; neg.s32 n, $1; and.b32 n, n, $1; clz.b32 n, n; sub.u32 $0, 32, n; }",
)
def ffs(a):
    """One more than the number of the lowest set bit; 0 for 0."""
    return (a & -a & MASK).bit_length()


@instruction("u32(u32, u32, u32)", asm="prmt.b32 $0, $1, $2, $3;")
def prmt(a, b, selector):
    """Pick four bytes of eight.

    Byte i of the result is chosen by nibble i of `selector`: its low three bits number a byte, 0..3
    of a, 4..7 of b; where its top bit is set, the byte is eight copies of that byte's sign bit.
    """
    both = ((b & MASK) << 32) | (a & MASK)
    result = 0
    for i in range(4):
        choice = (selector >> (4 * i)) & 15
        byte = (both >> (8 * (choice & 7))) & 0xFF
        if choice & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << (8 * i)
    return result


@instruction("u32(u32, u32, u32, imm)", asm="lop3.b32 $0, $1, $2, $3, {table};")
def lop3(a, b, c, table):
    """Any bitwise function of three words.

    Bit ``4 * a + 2 * b + c`` of `table` is the function's value: it is the function of the bytes
    0xF0, 0xCC, 0xAA.
    """
    result = 0
    for term in range(8):
        if table >> term & 1:
            result |= (a if term & 4 else ~a) & (b if term & 2 else ~b) & (c if term & 1 else ~c)
    return result & MASK


@instruction("u32(u32, u32, u32)", asm="shf.l.wrap.b32 $0, $1, $2, $3;")
def shf_l(low, high, amount):
    """The high word of ``high:low`` shifted left by `amount` modulo 32."""
    return ((((high & MASK) << 32) | (low & MASK)) << (amount & 31) >> 32) & MASK


@instruction("u32(u32, u32, u32)", asm="shf.r.wrap.b32 $0, $1, $2, $3;")
def shf_r(low, high, amount):
    """The low word of ``high:low`` shifted right by `amount` modulo 32."""
    return ((((high & MASK) << 32) | (low & MASK)) >> (amount & 31)) & MASK


# Comparisons and selection -----------------------------------------------------------------------


@instruction("bool(u32, u32)", build=lower.compare_unsigned("<"))
def lt_u32(a, b):
    """Return a < b."""
    return a & MASK < b & MASK


@instruction("bool(u32, u32)", build=lower.compare_unsigned("<="))
def le_u32(a, b):
    """Return a <= b."""
    return a & MASK <= b & MASK


@instruction("bool(u32, u32)", build=lower.compare_unsigned(">"))
def gt_u32(a, b):
    """Return a > b."""
    return a & MASK > b & MASK


@instruction("bool(u32, u32)", build=lower.compare_unsigned(">="))
def ge_u32(a, b):
    """Return a >= b."""
    return a & MASK >= b & MASK


@instruction("bool(u32, u32)", build=lower.compare_unsigned("=="))
def eq_u32(a, b):
    """Return a == b."""
    return a & MASK == b & MASK


@instruction("bool(u32, u32)", build=lower.compare_unsigned("!="))
def ne_u32(a, b):
    """Return a != b."""
    return a & MASK != b & MASK


@instruction("bool(i32, i32)", build=lower.compare_signed("<"))
def lt_i32(a, b):
    """Return a < b."""
    return signed(a) < signed(b)


@instruction("bool(i32, i32)", build=lower.compare_signed("<="))
def le_i32(a, b):
    """Return a <= b."""
    return signed(a) <= signed(b)


@instruction("bool(i32, i32)", build=lower.compare_signed(">"))
def gt_i32(a, b):
    """Return a > b."""
    return signed(a) > signed(b)


@instruction("bool(i32, i32)", build=lower.compare_signed(">="))
def ge_i32(a, b):
    """Return a >= b."""
    return signed(a) >= signed(b)


@instruction("bool(i32, i32)", build=lower.compare_signed("=="))
def eq_i32(a, b):
    """Return a == b."""
    return signed(a) == signed(b)


@instruction("bool(i32, i32)", build=lower.compare_signed("!="))
def ne_i32(a, b):
    """Return a != b."""
    return signed(a) != signed(b)


@instruction("bool(f32, f32)", build=lower.compare_float("<"))
def lt_f32(a, b):
    """Return a < b; False with a NaN."""
    return bool(a < b)


@instruction("bool(f32, f32)", build=lower.compare_float("<="))
def le_f32(a, b):
    """Return a <= b; False with a NaN."""
    return bool(a <= b)


@instruction("bool(f32, f32)", build=lower.compare_float(">"))
def gt_f32(a, b):
    """Return a > b; False with a NaN."""
    return bool(a > b)


@instruction("bool(f32, f32)", build=lower.compare_float(">="))
def ge_f32(a, b):
    """Return a >= b; False with a NaN."""
    return bool(a >= b)


@instruction("bool(f32, f32)", build=lower.compare_float("=="))
def eq_f32(a, b):
    """Return a == b; False with a NaN."""
    return bool(a == b)


@instruction("bool(f32, f32)", build=lower.compare_float("!=", nan=True))
def ne_f32(a, b):
    """Return a != b; True with a NaN."""
    return bool(a != b)


@instruction("u32(bool, u32, u32)", build=lower.op("select"))
def select_u32(condition, a, b):
    """Return a if condition else b, without a branch."""
    return (a if condition else b) & MASK


@instruction("i32(bool, i32, i32)", build=lower.op("select"))
def select_i32(condition, a, b):
    """Return a if condition else b, without a branch."""
    return signed(a if condition else b)


@instruction("f32(bool, f32, f32)", build=lower.op("select"))
def select_f32(condition, a, b):
    """Return a if condition else b, without a branch."""
    return a if condition else b


# Widths and kinds --------------------------------------------------------------------------------


@instruction("i64(u32)", build=lower.convert("zext", 64))
def i64_of_u32(a):
    """A word as a number, for index arithmetic."""
    return a & MASK


@instruction("i64(i32)", build=lower.convert("sext", 64))
def i64_of_i32(a):
    """A signed word as a number, for index arithmetic."""
    return signed(a)


@instruction("u32(i64)", build=lower.convert("trunc", 32))
def u32_of_i64(a):
    """The low 32 bits."""
    return a & MASK


@instruction("i32(i64)", build=lower.convert("trunc", 32))
def i32_of_i64(a):
    """The low 32 bits, signed."""
    return signed(a)


@instruction("f32(u32)", asm="cvt.rn.f32.u32 $0, $1;")
def f32_of_u32(a):
    """An unsigned integer as float32, to nearest even."""
    return to_f32(float(a & MASK))


@instruction("f32(i32)", asm="cvt.rn.f32.s32 $0, $1;")
def f32_of_i32(a):
    """A signed integer as float32, to nearest even."""
    return to_f32(float(signed(a)))


@instruction("u32(f32)", asm="cvt.rzi.u32.f32 $0, $1;")
def u32_of_f32(a):
    """The integer part, clamped to the range of u32; 0 for NaN."""
    return _integer(a, math.trunc, 0, MASK)


@instruction("i32(f32)", asm="cvt.rzi.s32.f32 $0, $1;")
def i32_of_f32(a):
    """The integer part, clamped to the range of i32; 0 for NaN."""
    return _integer(a, math.trunc, -0x80000000, 0x7FFFFFFF)


@instruction("i32(f32)", asm="cvt.rni.s32.f32 $0, $1;")
def i32_of_f32_rn(a):
    """The nearest integer, ties to even, clamped to the range of i32; 0 for NaN."""
    return _integer(a, round, -0x80000000, 0x7FFFFFFF)


def _integer(a, rounding, low, high):
    if a != a:
        return 0
    return rounding(float(min(max(float(a), low), high)))
