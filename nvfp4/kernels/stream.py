"""What quantisers at the speed of memory share: pieces as they lie in memory, short scales.

A *half piece* is eight elements in the form in which they lie in memory: four words of pairs of
16-bit floats, or eight float32. Maxima are taken of pairs, and only what is multiplied is widened.

Compile-time constants: INPUT, ELEMENT, SCALE, ROUNDING and UNIT, as in ``elements`` and ``scales``.
"""

from __future__ import annotations

import numpy as np

from ..ptx.arith import (
    add_u32,
    and_u32,
    gt_u32,
    lt_f32,
    lt_u32,
    max_nan_f32,
    mul_rn,
    rcp_rn,
    select_f32,
    shl_u32,
    shr_u32,
    sub_u32,
)
from ..ptx.bits import (
    f32_of_bf16,
    f32_of_bf16_hi,
    f32_of_f16,
    f32_of_f16_hi,
    float_as_uint,
    uint_as_float,
)
from ..ptx.convert import e4m3x2_of_f32
from ..ptx.memory import ld_global_v4_u32
from ..ptx.packed import amax_bf16x2, amax_f16x2
from ..ptx.scaled import e2m1x8_scaled, rcp_rn_normal, rcp_rn_or_zero
from .elements import amax8
from .scales import SIXTH, block_scale, usable

INPUT = "bfloat16"
ELEMENT = "e2m1"
SCALE = "e4m3"
ROUNDING = "rceil"
UNIT = True

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
SEVEN = np.float32(7.0)
E4M3_OF_FLOAT = np.float32(2.0**120)  # moves the exponent of a float32 that has an e4m3's bits


def load_half_piece(x, at):
    """Eight elements from byte `at` on, as they lie there: four words of pairs, or float32."""
    if INPUT == "float32":
        return floats_of(ld_global_v4_u32(x, at, "nc"), ld_global_v4_u32(x, at + 16, "nc"))
    else:
        return ld_global_v4_u32(x, at, "nc")


def load_half_piece_early(x, at):
    """As ``load_half_piece``, but the compiler does not move it behind a ``syncwarp``."""
    if INPUT == "float32":
        return floats_of(ld_global_v4_u32(x, at, ""), ld_global_v4_u32(x, at + 16, ""))
    else:
        return ld_global_v4_u32(x, at, "")


def floats_of(a, b):
    """Eight float32 of eight words."""
    return (
        uint_as_float(a[0]),
        uint_as_float(a[1]),
        uint_as_float(a[2]),
        uint_as_float(a[3]),
        uint_as_float(b[0]),
        uint_as_float(b[1]),
        uint_as_float(b[2]),
        uint_as_float(b[3]),
    )


def widen(raw):
    """Eight float32 of a half piece."""
    if INPUT == "float32":
        return raw
    elif INPUT == "bfloat16":
        return (
            f32_of_bf16(raw[0]),
            f32_of_bf16_hi(raw[0]),
            f32_of_bf16(raw[1]),
            f32_of_bf16_hi(raw[1]),
            f32_of_bf16(raw[2]),
            f32_of_bf16_hi(raw[2]),
            f32_of_bf16(raw[3]),
            f32_of_bf16_hi(raw[3]),
        )
    else:
        return (
            f32_of_f16(raw[0]),
            f32_of_f16_hi(raw[0]),
            f32_of_f16(raw[1]),
            f32_of_f16_hi(raw[1]),
            f32_of_f16(raw[2]),
            f32_of_f16_hi(raw[2]),
            f32_of_f16(raw[3]),
            f32_of_f16_hi(raw[3]),
        )


def larger_words(a, b):
    """The larger magnitudes, of any sign, in two words of pairs of 16-bit floats; NaN for NaN."""
    if INPUT == "bfloat16":
        return amax_bf16x2(a, b)
    else:
        return amax_f16x2(a, b)


def largest_word(v):
    """The same of four words."""
    return larger_words(larger_words(v[0], v[1]), larger_words(v[2], v[3]))


def amax_piece(a, b):
    """Largest magnitude of a piece, NaN if there is one."""
    if INPUT == "float32":
        return max_nan_f32(amax8(a), amax8(b))
    else:
        m = larger_words(largest_word(a), largest_word(b))
        if INPUT == "bfloat16":
            return uint_as_float(and_u32(larger_words(m, shl_u32(m, 16)), 0x7FFF0000))
        else:
            return f32_of_f16(and_u32(larger_words(m, shr_u32(m, 16)), 0x7FFF))


def exact_factors(g):
    """RN(g * RN(1/6)) and RN(1/g), c and r, of an encode scale as it was given, usable or not."""
    if UNIT:
        return SIXTH, ONE
    else:
        g = usable(g)
        return mul_rn(g, SIXTH), rcp_rn(g)


def quick_factors(g):
    """The same, and whether they hold: for ``quick_scale``, and of e4m3 without a branch.

    Scales of e4m3 need a usual encode scale, 2^-60 <= g < 2^60: any block's decode scale is then
    far from the ends of float32. Where g is not, c and r are those of 1: a block of zeros keeps the
    scale 0.
    """
    if UNIT or SCALE != "e4m3":
        c, r = exact_factors(g)
        return c, r, True
    else:
        usual = lt_u32(sub_u32(float_as_uint(g), 0x21800000), 0x3C000000)
        g = select_f32(usual, g, ONE)
        return mul_rn(g, SIXTH), rcp_rn_normal(g), usual


def usual_factor(c):
    """Whether ``quick_scale`` may have c of ``exact_factors``, as ``quick_factors`` says it."""
    if UNIT or SCALE != "e4m3":
        return True
    else:
        return lt_u32(sub_u32(float_as_uint(c), 0x20800000), 0x3C000000)


def quick_scale(amax, c, r):
    """Scale byte of a block, q, and whether they hold and the short conversion takes its elements.

    c and r are of a usual encode scale (``quick_factors``, ``usual_factor``). Where they do not
    hold, ``block_scale`` and the general conversion must do it. Zero blocks hold: that is what
    lanes without work have.
    """
    if SCALE == "e8m0" and ELEMENT == "e2m1" and ROUNDING == "rceil" and UNIT:
        # Not below 2^-127, where the byte is 0 though v is not, and q a power; A * q is at most 6.
        v = float_as_uint(mul_rn(amax, SIXTH))
        byte = shr_u32(add_u32(v, 0x7FFFFF), 23)
        q = uint_as_float(shl_u32(sub_u32(254, byte), 23))
        return byte, q, lt_u32(byte, 254) & gt_u32(sub_u32(v, 1), 0x3FFFFF)
    elif SCALE == "e4m3":
        # The byte has no sign. That of a NaN counts as 480 here: amax * q then is a NaN.
        byte = e4m3x2_of_f32(ZERO, mul_rn(amax, c))
        d = mul_rn(uint_as_float(shl_u32(byte, 20)), E4M3_OF_FLOAT)
        if not UNIT:
            d = mul_rn(d, r)
        q = rcp_rn_or_zero(d)
        return byte, q, lt_f32(mul_rn(amax, q), SEVEN)
    else:
        byte, q = block_scale(amax, c, r)
        if ELEMENT != "e2m1":
            return byte, q, True
        else:
            return byte, q, lt_f32(mul_rn(amax, q), SEVEN)


def scaled_codes(raw, q):
    """Codes of half a piece times q, one word, for values that are in range."""
    v = widen(raw)
    return e2m1x8_scaled(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], q)
