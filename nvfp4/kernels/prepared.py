"""Elements of prepared weights, one by one: for whatever does not read whole stripes.

The layout is that of docs/decisions.md D13. `element` and `scale` are arguments, as in
``products``. With ALIGNED, codes and scales begin at multiples of 16 bytes.

Compile-time constants: ALIGNED.
"""

from __future__ import annotations

import numpy as np

from ..ptx.arith import (
    add_u32,
    and_u32,
    eq_u32,
    mul_rn,
    or_u32,
    select_u32,
    shf_l,
    shl_u32,
    shr_u32,
    sub_u32,
    xor_u32,
)
from ..ptx.bits import uint_as_float
from ..ptx.memory import ld_global_u8, ld_global_u32, ld_global_v4_u32
from .elements import decode_one, load_word, times8
from .scales import decode_scale_byte

ALIGNED = True

#: Bytes in front of the scales of a matrix, which begin with its factor.
HEADER = 16
#: Where bfloat16 has the sign and the magnitude of two e2m1 codes.
PLACES = 0x81C081C0
#: What makes values of such bfloat16, and scales of the multipliers of nvfp4.
FROM_PLACES = np.float32(2.0**126)
FROM_MULTIPLIER = np.float32(2.0**-117)


def bias(element: str):
    """What is added to an e8m0 scale, less the exponent of the factor."""
    if element == "e2m1":
        return 126
    elif element == "e4m3":
        return 120
    else:
        return 112


def stripe_bytes(element: str):
    """Bytes of the codes of a stripe of 16 rows by 64 columns."""
    if element == "e2m1":
        return 512
    else:
        return 1024


def record_bytes(scale: str):
    """Bytes of its scales."""
    if scale == "e4m3":
        return 64
    else:
        return 32


def prepared_codes(rows, columns, element: str):
    """Bytes of the codes of a matrix."""
    return ((rows + 15) >> 4) * ((columns + 63) >> 6) * stripe_bytes(element)


def prepared_scales(rows, columns, scale: str):
    """Bytes of its scales, with the header."""
    return HEADER + ((rows + 15) >> 4) * ((columns + 63) >> 6) * record_bytes(scale)


# Codes of e2m1, two rows by two halves of a stripe by two columns in a word ----------------------


def mixed(f0, f1, f2, f3):
    """The word of these registers, its bits found in an order in which each is known."""
    q = or_u32(f0, shr_u32(f1, 4))
    from_low = and_u32(shr_u32(xor_u32(f3, shr_u32(q, 4)), 6), 0x02020202)
    from_high = and_u32(shl_u32(xor_u32(f3, shl_u32(q, 6)), 4), 0x10001000)
    q = or_u32(q, or_u32(from_low, from_high))
    left = xor_u32(f2, shl_u32(q, 6))
    turned = and_u32(shf_l(left, left, 22), 0x60206020)
    from_low = and_u32(shr_u32(xor_u32(f2, shf_l(q, q, 10)), 6), 0x00010001)
    q = or_u32(q, or_u32(turned, from_low))
    return or_u32(q, and_u32(shl_u32(xor_u32(f3, shl_u32(q, 6)), 4), 0x04000400))


def two_of_word(q, upper, half):
    """Values of two neighbouring columns of a half, of row g or (upper) g + 8."""
    other = select_u32(upper == 1, shr_u32(q, 4), shf_l(q, q, 10))
    second = xor_u32(shl_u32(q, 6), other)
    both = and_u32(select_u32(half == 0, shl_u32(q, 4 * upper), second), PLACES)
    return (
        mul_rn(uint_as_float(shl_u32(both, 16)), FROM_PLACES),
        mul_rn(uint_as_float(and_u32(both, 0xFFFF0000)), FROM_PLACES),
    )


def two_of_bytes(word, half, element: str):
    """The same of eight-bit codes of a row."""
    word = shr_u32(word, select_u32(half == 0, 8, 0))
    return decode_one(word, element), decode_one(shr_u32(word, 16), element)


# Scales -------------------------------------------------------------------------------------------


def load_words(p, at):
    """Sixteen bytes from a multiple of 16 of what begins anywhere."""
    if ALIGNED:
        return ld_global_v4_u32(p, at, "")
    else:
        return (
            load_word(p, at),
            load_word(p, at + 4),
            load_word(p, at + 8),
            load_word(p, at + 12),
        )


def load_header(scales, at):
    """The bits of a matrix's factor."""
    if ALIGNED:
        return ld_global_u32(scales, at, "")
    else:
        return load_word(scales, at)


def prepared_scale(scales, at, stripe, lane, upper, half, element: str, scale: str):
    """f32 of the scale of a lane's codes; the scales of the matrix begin at byte `at`."""
    record = at + HEADER + stripe * record_bytes(scale) + 2 * half + upper
    if scale == "e4m3":
        byte = ld_global_u8(scales, record + (lane >> 1) * 4, "")
        multiplier = add_u32(shl_u32(byte, 4), 0x7500)
        return mul_rn(uint_as_float(shl_u32(multiplier, 16)), FROM_MULTIPLIER)
    else:
        byte = ld_global_u8(scales, record + (lane >> 2) * 4, "")
        factor = load_header(scales, at)
        plain = eq_u32(factor, 0) | eq_u32(byte, 255)
        original = sub_u32(add_u32(byte, shr_u32(factor, 23)), 127 + bias(element))
        return decode_scale_byte(and_u32(select_u32(plain, byte, original), 0xFF), scale)


# Elements -----------------------------------------------------------------------------------------


def prepared8(codes, codes_at, scales, scales_at, row, column, columns, element: str, scale: str):
    """Element * scale, exactly, from `column` (a multiple of 8) of a row on.

    The matrix's codes begin at byte `codes_at`, its scales, with the header, at `scales_at`.
    """
    stripe = (row >> 4) * ((columns + 63) >> 6) + (column >> 6)
    lane = ((row & 7) << 2) + ((column >> 3) & 3)
    upper = (row >> 3) & 1
    half = (column >> 5) & 1
    factor = prepared_scale(scales, scales_at, stripe, lane, upper, half, element, scale)
    at = codes_at + stripe * stripe_bytes(element) + ((lane & 3) * 8 + (row & 7)) * 16
    if element == "e2m1":
        words = load_words(codes, at)
        a = two_of_word(words[0], upper, half)
        b = two_of_word(words[1], upper, half)
        c = two_of_word(words[2], upper, half)
        d = two_of_word(words[3], upper, half)
    else:
        words = load_words(codes, at + 512 * upper)
        a = two_of_bytes(words[0], half, element)
        b = two_of_bytes(words[1], half, element)
        c = two_of_bytes(words[2], half, element)
        d = two_of_bytes(words[3], half, element)
    return times8((a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]), factor)
