"""Sixteen neighbouring elements in the hands of one thread: reading, writing, largest magnitude.

A *piece* is 16 consecutive elements, held as two tuples of 8 float32. Every block is one piece
(nvfp4) or two (the MX formats), so that a piece has one scale. With ALIGNED, addresses are
multiples of 16 bytes and a piece moves in vectors.

Plain arrays and codes are reached through byte pointers, so that one kernel takes every dtype.

Compile-time constants: INPUT and OUTPUT (dtypes of plain arrays), ELEMENT (element type of codes),
ALIGNED.
"""

from __future__ import annotations

import numpy as np

from ..ptx.arith import abs_f32, max_nan_f32, mul_rn, or_u32, shl_u32, shr_u32
from ..ptx.bits import (
    bf16_of_f32,
    bf16x2_of_f32,
    f16_of_f32,
    f16x2_of_f32,
    f32_of_bf16,
    f32_of_bf16_hi,
    f32_of_f16,
    f32_of_f16_hi,
    float_as_uint,
    uint_as_float,
)
from ..ptx.convert import (
    e2m1x8_of_f32,
    e4m3x2_of_f32,
    e5m2x2_of_f32,
    f32_of_e2m1,
    f32_of_e4m3,
    f32_of_e5m2,
)
from ..ptx.memory import (
    ld_global_f32,
    ld_global_u8,
    ld_global_u16,
    ld_global_u32,
    ld_global_v2_u32,
    ld_global_v4_u32,
    st_global_f32,
    st_global_u8,
    st_global_u16,
    st_global_v2_u32,
    st_global_v4_u32,
)

INPUT = "bfloat16"
OUTPUT = "float32"
ELEMENT = "e2m1"
ALIGNED = True

ZERO = np.float32(0.0)
ZEROS = (ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO)


# Plain arrays ------------------------------------------------------------------------------------


def load_one(x, at):
    """Element `at` of an array of type INPUT, as float32."""
    if INPUT == "float32":
        return ld_global_f32(x, at * 4, "")
    elif INPUT == "bfloat16":
        return f32_of_bf16(ld_global_u16(x, at * 2, ""))
    else:
        return f32_of_f16(ld_global_u16(x, at * 2, ""))


def load8(x, at):
    """Elements `at` to `at` + 7 as float32."""
    if ALIGNED and INPUT == "float32":
        a = ld_global_v4_u32(x, at * 4, "")
        b = ld_global_v4_u32(x, at * 4 + 16, "")
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
    elif ALIGNED and INPUT == "bfloat16":
        a = ld_global_v4_u32(x, at * 2, "")
        return (
            f32_of_bf16(a[0]),
            f32_of_bf16_hi(a[0]),
            f32_of_bf16(a[1]),
            f32_of_bf16_hi(a[1]),
            f32_of_bf16(a[2]),
            f32_of_bf16_hi(a[2]),
            f32_of_bf16(a[3]),
            f32_of_bf16_hi(a[3]),
        )
    elif ALIGNED:
        a = ld_global_v4_u32(x, at * 2, "")
        return (
            f32_of_f16(a[0]),
            f32_of_f16_hi(a[0]),
            f32_of_f16(a[1]),
            f32_of_f16_hi(a[1]),
            f32_of_f16(a[2]),
            f32_of_f16_hi(a[2]),
            f32_of_f16(a[3]),
            f32_of_f16_hi(a[3]),
        )
    else:
        return (
            load_one(x, at),
            load_one(x, at + 1),
            load_one(x, at + 2),
            load_one(x, at + 3),
            load_one(x, at + 4),
            load_one(x, at + 5),
            load_one(x, at + 6),
            load_one(x, at + 7),
        )


def store_one(out, at, value):
    """Element `at` of an array of type OUTPUT, rounded once."""
    if OUTPUT == "float32":
        st_global_f32(out, at * 4, value, "")
    elif OUTPUT == "bfloat16":
        st_global_u16(out, at * 2, bf16_of_f32(value), "")
    else:
        st_global_u16(out, at * 2, f16_of_f32(value), "")


def store8(out, at, v):
    """Elements `at` to `at` + 7."""
    if ALIGNED and OUTPUT == "float32":
        st_global_v4_u32(
            out,
            at * 4,
            float_as_uint(v[0]),
            float_as_uint(v[1]),
            float_as_uint(v[2]),
            float_as_uint(v[3]),
            "",
        )
        st_global_v4_u32(
            out,
            at * 4 + 16,
            float_as_uint(v[4]),
            float_as_uint(v[5]),
            float_as_uint(v[6]),
            float_as_uint(v[7]),
            "",
        )
    elif ALIGNED and OUTPUT == "bfloat16":
        st_global_v4_u32(
            out,
            at * 2,
            bf16x2_of_f32(v[1], v[0]),
            bf16x2_of_f32(v[3], v[2]),
            bf16x2_of_f32(v[5], v[4]),
            bf16x2_of_f32(v[7], v[6]),
            "",
        )
    elif ALIGNED:
        st_global_v4_u32(
            out,
            at * 2,
            f16x2_of_f32(v[1], v[0]),
            f16x2_of_f32(v[3], v[2]),
            f16x2_of_f32(v[5], v[4]),
            f16x2_of_f32(v[7], v[6]),
            "",
        )
    else:
        store_one(out, at, v[0])
        store_one(out, at + 1, v[1])
        store_one(out, at + 2, v[2])
        store_one(out, at + 3, v[3])
        store_one(out, at + 4, v[4])
        store_one(out, at + 5, v[5])
        store_one(out, at + 6, v[6])
        store_one(out, at + 7, v[7])


# Magnitudes --------------------------------------------------------------------------------------


def amax8(v):
    """Largest magnitude of eight values, NaN if one of them is NaN."""
    a = max_nan_f32(
        max_nan_f32(abs_f32(v[0]), abs_f32(v[1])), max_nan_f32(abs_f32(v[2]), abs_f32(v[3]))
    )
    b = max_nan_f32(
        max_nan_f32(abs_f32(v[4]), abs_f32(v[5])), max_nan_f32(abs_f32(v[6]), abs_f32(v[7]))
    )
    return max_nan_f32(a, b)


# Codes -------------------------------------------------------------------------------------------


def code_bytes(columns):
    """Bytes of the codes of so many columns."""
    if ELEMENT == "e2m1":
        return columns // 2
    else:
        return columns


def encode_e2m1x8(v, q):
    """Codes of RN(v * q): one word, element 0 in the lowest nibble."""
    return e2m1x8_of_f32(
        mul_rn(v[0], q),
        mul_rn(v[1], q),
        mul_rn(v[2], q),
        mul_rn(v[3], q),
        mul_rn(v[4], q),
        mul_rn(v[5], q),
        mul_rn(v[6], q),
        mul_rn(v[7], q),
    )


def encode_float8x4(a, b, c, d, q):
    """Codes of RN(a * q) and the others: one word, `a` in the lowest byte."""
    if ELEMENT == "e4m3":
        low = e4m3x2_of_f32(mul_rn(b, q), mul_rn(a, q))
        high = e4m3x2_of_f32(mul_rn(d, q), mul_rn(c, q))
    else:
        low = e5m2x2_of_f32(mul_rn(b, q), mul_rn(a, q))
        high = e5m2x2_of_f32(mul_rn(d, q), mul_rn(c, q))
    return or_u32(low, shl_u32(high, 16))


def store_word(codes, at, word):
    """Four bytes to any address."""
    st_global_u8(codes, at, word, "")
    st_global_u8(codes, at + 1, shr_u32(word, 8), "")
    st_global_u8(codes, at + 2, shr_u32(word, 16), "")
    st_global_u8(codes, at + 3, shr_u32(word, 24), "")


def store_codes(codes, at, v, w, q):
    """Codes of a piece times q, from byte `at` on."""
    if ELEMENT == "e2m1":
        a = encode_e2m1x8(v, q)
        b = encode_e2m1x8(w, q)
        if ALIGNED:
            st_global_v2_u32(codes, at, a, b, "")
        else:
            store_word(codes, at, a)
            store_word(codes, at + 4, b)
    else:
        a = encode_float8x4(v[0], v[1], v[2], v[3], q)
        b = encode_float8x4(v[4], v[5], v[6], v[7], q)
        c = encode_float8x4(w[0], w[1], w[2], w[3], q)
        d = encode_float8x4(w[4], w[5], w[6], w[7], q)
        if ALIGNED:
            st_global_v4_u32(codes, at, a, b, c, d, "")
        else:
            store_word(codes, at, a)
            store_word(codes, at + 4, b)
            store_word(codes, at + 8, c)
            store_word(codes, at + 12, d)


def load_word(codes, at):
    """Four bytes from any address."""
    low = or_u32(ld_global_u8(codes, at, ""), shl_u32(ld_global_u8(codes, at + 1, ""), 8))
    high = or_u32(ld_global_u8(codes, at + 2, ""), shl_u32(ld_global_u8(codes, at + 3, ""), 8))
    return or_u32(low, shl_u32(high, 16))


def load_codes8(codes, at, element: str):
    """Eight codes, from byte `at` on: two words, the second 0 for four-bit elements."""
    if element == "e2m1":
        if ALIGNED:
            return (ld_global_u32(codes, at, ""), shl_u32(0, 0))
        else:
            return (load_word(codes, at), shl_u32(0, 0))
    elif ALIGNED:
        return ld_global_v2_u32(codes, at, "")
    else:
        return (load_word(codes, at), load_word(codes, at + 4))


def decode_one(code, element: str):
    """Value of the code in the lowest bits of a word; the bits above it do not count."""
    if element == "e2m1":
        return f32_of_e2m1(code)
    elif element == "e4m3":
        return f32_of_e4m3(code)
    else:
        return f32_of_e5m2(code)


def decode8(words, element: str):
    """Values of eight codes as `load_codes8` gives them."""
    low, high = words
    if element == "e2m1":
        return (
            f32_of_e2m1(low),
            f32_of_e2m1(shr_u32(low, 4)),
            f32_of_e2m1(shr_u32(low, 8)),
            f32_of_e2m1(shr_u32(low, 12)),
            f32_of_e2m1(shr_u32(low, 16)),
            f32_of_e2m1(shr_u32(low, 20)),
            f32_of_e2m1(shr_u32(low, 24)),
            f32_of_e2m1(shr_u32(low, 28)),
        )
    else:
        return (
            decode_one(low, element),
            decode_one(shr_u32(low, 8), element),
            decode_one(shr_u32(low, 16), element),
            decode_one(shr_u32(low, 24), element),
            decode_one(high, element),
            decode_one(shr_u32(high, 8), element),
            decode_one(shr_u32(high, 16), element),
            decode_one(shr_u32(high, 24), element),
        )


def times8(v, factor):
    """RN(v * factor) of eight values."""
    return (
        mul_rn(v[0], factor),
        mul_rn(v[1], factor),
        mul_rn(v[2], factor),
        mul_rn(v[3], factor),
        mul_rn(v[4], factor),
        mul_rn(v[5], factor),
        mul_rn(v[6], factor),
        mul_rn(v[7], factor),
    )
