"""Prepared weights as operands of tensor cores: registers of A of m16n8k16 products, in bfloat16.

A step is 16 rows x 64 columns of a matrix that ``nvfp4.prepare_weights`` has laid out
(docs/decisions.md D13); each lane has its codes side by side, and a word of scale bytes that serves
all of them. One multiplication of pairs of bfloat16 makes an element times its scale exactly, up to
the matrix's factor, by which the sums are multiplied afterwards.

In the order of a step, the pair of columns (8t + 2j, next) stands where product j has (2t, next),
and (32 + 8t + 2j, next) where it has (2t + 8, next): so what a lane needs of the other operand are
eight neighbours from 8t on, and eight from 32 + 8t on.

Compile-time constants: B_ELEMENT, B_SCALE.
"""

from __future__ import annotations

from ..ptx.arith import (
    and_u32,
    i64_of_u32,
    lop3,
    mad_u32,
    mul_u32,
    or_u32,
    prmt,
    shf_l,
    shl_u32,
    shr_u32,
)
from ..ptx.memory import ld_global_f32, ld_global_u32, ld_global_v4_u32
from ..ptx.packed import mul_bf16x2

B_ELEMENT = "e2m1"
B_SCALE = "e8m0"

HEADER = 16
#: Sign and magnitude of two e2m1 codes, where bfloat16 has them.
PLACES = 0x81C081C0
#: (a ^ b) & c as a table of ``lop3``.
XOR_AND = 0x28


# Where things are ---------------------------------------------------------------------------------


def step_bytes():
    """Bytes of the codes of a step."""
    if B_ELEMENT == "e2m1":
        return 512
    else:
        return 1024


def record_bytes():
    """Bytes of the scales of a step."""
    if B_SCALE == "e4m3":
        return 64
    else:
        return 32


def matrix_codes(row_blocks, steps):
    """Bytes of the codes of a matrix."""
    return row_blocks * steps * step_bytes()


def matrix_records(row_blocks, steps):
    """Bytes of the scales of a matrix, its header included."""
    return HEADER + row_blocks * steps * record_bytes()


def record_place(lane):
    """Where in a step's scales the word of a lane is."""
    if B_SCALE == "e4m3":
        return i64_of_u32(shl_u32(shr_u32(lane, 1), 2))
    else:
        return i64_of_u32(shl_u32(shr_u32(lane, 2), 2))


def factor_of_matrix(b_scales, at):
    """What a matrix's sums must be multiplied by; 0 where its scales are as they were."""
    return ld_global_f32(b_scales, at, "")


# Registers ----------------------------------------------------------------------------------------


def load_codes(b, at):
    """A lane's codes of a step, read once: four words of e2m1, eight of eight-bit codes."""
    low = ld_global_v4_u32(b, at, "nc.L1::no_allocate")
    if B_ELEMENT == "e2m1":
        return low
    else:
        high = ld_global_v4_u32(b, at + 512, "nc.L1::no_allocate")
        return (low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3])


def load_record(b_scales, at):
    """A lane's word of scale bytes."""
    return ld_global_u32(b_scales, at, "nc.L1::no_allocate")


def multipliers(record):
    """Pairs of equal bfloat16 for the four registers of a product: rows g, g + 8, g, g + 8."""
    return (
        multiplier(and_u32(record, 255)),
        multiplier(prmt(record, 0, 0x4441)),
        multiplier(prmt(record, 0, 0x4442)),
        multiplier(shr_u32(record, 24)),
    )


def multiplier(byte):
    """What a scale byte stands for, twice."""
    if B_SCALE == "e4m3":
        return mad_u32(byte, 0x00100010, 0x75007500)
    else:
        return mul_u32(byte, 0x00800080)


def upper_codes(word):
    """Bytes 1 and 3, eight-bit codes, as bfloat16 that are too small by a power of two."""
    sign = and_u32(word, 0x80008000)
    if B_ELEMENT == "e4m3":
        return or_u32(sign, and_u32(shr_u32(word, 4), 0x07F007F0))
    else:
        return or_u32(sign, and_u32(shr_u32(word, 3), 0x0FE00FE0))


def fragment(low, high, scales):
    """Registers of one product, from a word of e2m1, or from the words of rows g and g + 8."""
    if B_ELEMENT == "e2m1":
        left = shl_u32(low, 6)
        return (
            mul_bf16x2(and_u32(low, PLACES), scales[0]),
            mul_bf16x2(and_u32(shl_u32(low, 4), PLACES), scales[1]),
            mul_bf16x2(lop3(left, shf_l(low, low, 10), PLACES, XOR_AND), scales[2]),
            mul_bf16x2(lop3(left, shr_u32(low, 4), PLACES, XOR_AND), scales[3]),
        )
    else:
        return (
            mul_bf16x2(upper_codes(low), scales[0]),
            mul_bf16x2(upper_codes(high), scales[1]),
            mul_bf16x2(upper_codes(shl_u32(low, 8)), scales[2]),
            mul_bf16x2(upper_codes(shl_u32(high, 8)), scales[3]),
        )


def fragments(codes, scales):
    """Registers of the four products of a step."""
    if B_ELEMENT == "e2m1":
        return (
            fragment(codes[0], codes[0], scales),
            fragment(codes[1], codes[1], scales),
            fragment(codes[2], codes[2], scales),
            fragment(codes[3], codes[3], scales),
        )
    else:
        return (
            fragment(codes[0], codes[4], scales),
            fragment(codes[1], codes[5], scales),
            fragment(codes[2], codes[6], scales),
            fragment(codes[3], codes[7], scales),
        )
