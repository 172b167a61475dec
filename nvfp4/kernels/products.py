"""What every product has: operands, the factor after the sum, the epilogue, the result.

An operand is a plain array (A only) or codes with scales; its constants are passed to the helpers
here as arguments, since there are two of them: `element` ("e2m1", "e4m3", "e5m2", or "none" for a
plain array of dtype INPUT), `scale` and `layout`.

Compile-time constants: ALPHA ("value", "array" or "expert"), DECODE_A ("none", "scalar", "row",
"group"), DECODE_B ("scalar", "row", "batch", "batch_row"), PAIR ("none", "halves", "interleaved").
"""

from __future__ import annotations

import numpy as np

from ..ptx.arith import add_rn, mul_rn
from ..ptx.memory import ld_global_u8
from .elements import decode8, load8, load_codes8, times8
from .scales import decode_scale_byte, tcgen_place

ALPHA = "value"
DECODE_A = "none"
DECODE_B = "scalar"
PAIR = "none"

ZERO = np.float32(0.0)


# Operands ----------------------------------------------------------------------------------------


def row_units(depth, element: str):
    """What a row of `depth` elements is long: in elements of a plain array, in bytes of codes."""
    if element == "e2m1":
        return depth // 2
    else:
        return depth


def blocks_of(depth, scale: str):
    """Blocks of a row."""
    if scale == "e4m3":
        return depth // 16
    else:
        return depth // 32


def matrix_scales(rows, depth, scale: str, layout: str):
    """Bytes of the scales of one matrix."""
    blocks = blocks_of(depth, scale)
    if layout == "linear":
        return rows * blocks
    else:
        return (rows + 127) // 128 * ((blocks + 3) // 4) * 512


def scale_of_piece(scales, at, row, piece, depth, scale: str, layout: str):
    """f32 of the scale of a piece; `at` is where the matrix's scales begin."""
    block = piece
    if scale == "e8m0":
        block = piece >> 1
    blocks = blocks_of(depth, scale)
    if layout == "linear":
        place = row * blocks + block
    else:
        place = tcgen_place(row, block, (blocks + 3) // 4)
    return decode_scale_byte(ld_global_u8(scales, at + place, ""), scale)


def operand8(p, row_at, column, element: str, factor):
    """Eight elements times their scale, exactly: from `column` of a row that begins at `row_at`."""
    if element == "none":
        return load8(p, row_at + column)
    else:
        return times8(
            decode8(load_codes8(p, row_at + row_units(column, element), element), element), factor
        )


# Sums --------------------------------------------------------------------------------------------


def add_products8(total, v, w):
    """Total and eight products, one after the other, each rounded, each addition rounded."""
    total = add_rn(total, mul_rn(v[0], w[0]))
    total = add_rn(total, mul_rn(v[1], w[1]))
    total = add_rn(total, mul_rn(v[2], w[2]))
    total = add_rn(total, mul_rn(v[3], w[3]))
    total = add_rn(total, mul_rn(v[4], w[4]))
    total = add_rn(total, mul_rn(v[5], w[5]))
    total = add_rn(total, mul_rn(v[6], w[6]))
    return add_rn(total, mul_rn(v[7], w[7]))


# The factor after the sum ------------------------------------------------------------------------


def alpha_of(alpha, alpha_number, expert):
    """The caller's factor."""
    if ALPHA == "value":
        return alpha_number
    elif ALPHA == "array":
        return alpha[0]
    else:
        return alpha[expert]


def factor_of_row(alpha, alpha_number, a_decode, expert, a_row, owner):
    """RN(alpha * dA) for a row of A, in a range of `owner`."""
    factor = alpha_of(alpha, alpha_number, expert)
    if DECODE_A == "none":
        return factor
    elif DECODE_A == "scalar":
        return mul_rn(factor, a_decode[0])
    elif DECODE_A == "row":
        return mul_rn(factor, a_decode[a_row])
    else:
        return mul_rn(factor, a_decode[owner])


def decode_of_b(b_decode, expert, n, rows):
    """DB of row n of matrix `expert`; each matrix has `rows`."""
    if DECODE_B == "scalar":
        return b_decode[0]
    elif DECODE_B == "batch":
        return b_decode[expert]
    elif DECODE_B == "row":
        return b_decode[n]
    else:
        return b_decode[expert * rows + n]


# Columns of the result ---------------------------------------------------------------------------


def result_columns(columns):
    """Columns of the result of a product of so many."""
    if PAIR == "none":
        return columns
    else:
        return columns // 2


def first_of_pair(column, columns):
    """The column of the product that makes a column of the result, or the gate of it."""
    if PAIR == "interleaved":
        return column * 2
    else:
        return column


def second_of_pair(column, columns):
    """The column of the product that is the other one, `up`."""
    if PAIR == "interleaved":
        return column * 2 + 1
    else:
        return column + columns // 2


def epilogue(value, row, column, expert, e0, e1, e2, e3):
    """What is done to a value before the cast: a program puts the caller's function here."""
    return value


def pair_epilogue(gate, up, row, column, expert, e0, e1, e2, e3):
    """The same for pairs of columns."""
    return gate
