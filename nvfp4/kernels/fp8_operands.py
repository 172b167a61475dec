"""Operands of FP8 tensor cores: prepared mxfp4 weights in registers, rows of e4m3 in shared memory.

Source: docs/decisions.md, D25. A product of 32 of the depth has the columns of half a step: slot
16 j + 4 t + 2 p + i is column 16 j + 8 p + 2 t + i of it, so that a lane's four registers are
elements that it has as pairs of neighbours, and rows of A go to shared memory with the pairs of
every 16 columns in that order. Rows of 64 bytes lie there with a swizzle of 64.
"""

from __future__ import annotations

from ..ptx.arith import lop3, prmt, shl_u32, sub_u32
from ..ptx.memory import ld_global_f32, ld_global_u32
from .prepared_mma import multipliers, scaled_registers

#: Signs of two bfloat16; (a & c) | (b & ~c) as a table of ``lop3``.
SIGNS = 0x80008000
SELECT = 0xE4
#: Bytes 1 and 3 of both words.
UPPER_BYTES = 0x7531


# Weights -----------------------------------------------------------------------------------------


def less_of_matrix(b_scales, header):
    """What stored scales of a matrix lose, as exponents of two bfloat16."""
    return ld_global_u32(b_scales, header + 8, "")


def narrow_factor(b_scales, header):
    """What a matrix's sums must be multiplied by; 0 where its values are no e4m3 values."""
    return ld_global_f32(b_scales, header + 4, "")


def narrow_multipliers(record, less):
    """:func:`multipliers` that put e4m3's bits where bits 10 to 4 of a bfloat16 are."""
    m = multipliers(record)
    return (sub_u32(m[0], less), sub_u32(m[1], less))


def in_upper_bytes(pair):
    """The e4m3 bytes of two such bfloat16, in bytes 1 and 3."""
    return lop3(pair, shl_u32(pair, 4), SIGNS, SELECT)


def packed(first, second):
    """The e4m3 bytes of two pairs."""
    return prmt(in_upper_bytes(first), in_upper_bytes(second), UPPER_BYTES)


def bytes_of_step(codes, scales):
    """Registers of both products of a step, of words that ``ldmatrix`` has handed out."""
    v0 = scaled_registers(codes[0], codes[0], scales)
    v1 = scaled_registers(codes[1], codes[1], scales)
    v2 = scaled_registers(codes[2], codes[2], scales)
    v3 = scaled_registers(codes[3], codes[3], scales)
    return (
        (packed(v0[0], v1[0]), packed(v0[1], v1[1]), packed(v2[0], v3[0]), packed(v2[1], v3[1])),
        (packed(v0[2], v1[2]), packed(v0[3], v1[3]), packed(v2[2], v3[2]), packed(v2[3], v3[3])),
    )


# Rows --------------------------------------------------------------------------------------------


def in_order_of_bytes(words):
    """Sixteen columns of a row, as registers of weights have them: two and two of the eights."""
    return (
        prmt(words[0], words[2], 0x5410),
        prmt(words[0], words[2], 0x7632),
        prmt(words[1], words[3], 0x5410),
        prmt(words[1], words[3], 0x7632),
    )
