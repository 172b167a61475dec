"""Prepared weights as operands of tensor cores: registers of A of m16n8k16 products, in bfloat16.

A step is 16 rows x 64 columns of a matrix that ``nvfp4.prepare_weights`` has laid out
(docs/decisions.md D13); each lane has its codes side by side, and a word of scale bytes that serves
all of them. One multiplication of pairs of bfloat16 makes an element times its scale exactly, up to
the matrix's factor, by which the sums are multiplied afterwards.

Word w (0..3) of lane (g, t) has rows g and g + 8, columns 8t + 2w and the next of both halves of
the step. A lane that reads its own four words has eight neighbours of each half, and needs just
these of the other operand, which it reads side by side (``matmul_decode``). A lane that reads word
t of the four lanes (g, 0..3), as ``ldmatrix`` hands them out, has columns 2t and the next of every
eight: what the instructions call for where the other operand lies as it is (``matmul_sm90``).
Either way words 0 and 1 make products of the first columns, 2 and 3 of the next, in both halves.

Compile-time constants: B_ELEMENT, B_SCALE.
"""

from __future__ import annotations

from ..ptx.arith import (
    add_u32,
    and_u32,
    i64_of_u32,
    lop3,
    mad_u32,
    or_u32,
    shf_l,
    shl_u32,
    shr_u32,
)
from ..ptx.memory import ld_global_f32, ld_global_u32, ld_global_v4_u32
from ..ptx.packed import mul_bf16x2_high, mul_bf16x2_low

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


def code_place(lane):
    """Where in a step's codes the first 16 bytes of a lane are.

    Lanes that ``ldmatrix`` reads together lie side by side.
    """
    return add_u32(shl_u32(and_u32(lane, 3), 7), shl_u32(shr_u32(lane, 2), 4))


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
    """Pairs of bfloat16 for rows g and g + 8: for columns below 32 of the step, and above."""
    if B_SCALE == "e4m3":
        low = and_u32(record, 0x00FF00FF)
        high = and_u32(shr_u32(record, 8), 0x00FF00FF)
        return (
            mad_u32(low, 16, 0x75007500),
            mad_u32(high, 16, 0x75007500),
        )
    else:
        return (
            and_u32(shl_u32(record, 7), 0x7F807F80),
            and_u32(shr_u32(record, 1), 0x7F807F80),
        )


def upper_codes(word):
    """Bytes 1 and 3, eight-bit codes, as bfloat16 that are too small by a power of two."""
    sign = and_u32(word, 0x80008000)
    if B_ELEMENT == "e4m3":
        return or_u32(sign, and_u32(shr_u32(word, 4), 0x07F007F0))
    else:
        return or_u32(sign, and_u32(shr_u32(word, 3), 0x0FE00FE0))


def registers(low, high):
    """Elements of one product, each register too small by a power of two.

    From a word of e2m1 codes, or from the words of rows g and g + 8.
    """
    if B_ELEMENT == "e2m1":
        left = shl_u32(low, 6)
        return (
            and_u32(low, PLACES),
            and_u32(shl_u32(low, 4), PLACES),
            lop3(left, shf_l(low, low, 10), PLACES, XOR_AND),
            lop3(left, shr_u32(low, 4), PLACES, XOR_AND),
        )
    else:
        return (
            upper_codes(low),
            upper_codes(high),
            upper_codes(shl_u32(low, 8)),
            upper_codes(shl_u32(high, 8)),
        )


def scaled_registers(low, high, scales):
    """Elements times scales of a word: rows g, g + 8 of the first half, then of the second.

    Of eight-bit codes there is a word for each row.
    """
    w = registers(low, high)
    return (
        mul_bf16x2_low(w[0], scales[0]),
        mul_bf16x2_low(w[1], scales[1]),
        mul_bf16x2_high(w[2], scales[0]),
        mul_bf16x2_high(w[3], scales[1]),
    )


def fragments(codes, early, late):
    """Registers of the four products of a step; `late` are multipliers of words 2 and 3."""
    if B_ELEMENT == "e2m1":
        upper = (codes[0], codes[1], codes[2], codes[3])
    else:
        upper = (codes[4], codes[5], codes[6], codes[7])
    v0 = scaled_registers(codes[0], upper[0], early)
    v1 = scaled_registers(codes[1], upper[1], early)
    v2 = scaled_registers(codes[2], upper[2], late)
    v3 = scaled_registers(codes[3], upper[3], late)
    return (
        (v0[0], v0[1], v1[0], v1[1]),
        (v2[0], v2[1], v3[0], v3[1]),
        (v0[2], v0[3], v1[2], v1[3]),
        (v2[2], v2[3], v3[2], v3[3]),
    )
