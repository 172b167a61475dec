"""Results of ``matmul_sm90`` that are only scaled and rounded: no function, no pairs, no blocks.

Sums are scaled and rounded in registers, put into rows in shared memory by ``stmatrix``, 64 rows of
A at a time, and stored from there 16 bytes a lane. A loop that looks at sums one by one, as a
user's function needs it (``sm90_results``), takes five times as long: at a depth of 768 that was a
third of the product.

Compile-time constants: those of ``sm90_results``.
"""

from __future__ import annotations

import numpy as np

from ..ptx.arith import (
    add_u32,
    and_u32,
    i64_of_u32,
    lt_u32,
    min_u32,
    mul_rn,
    mul_u32,
    select_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.control import bar_sync
from ..ptx.memory import (
    ld_shared_v4_u32,
    ptr_address,
    st_global_u16,
    st_global_v4_u32_if,
    st_shared_f32,
)
from ..ptx.warp import shfl_idx_u32
from ..ptx.wgmma import st_shared_acc_rows
from .groups import source_row
from .prepared_items import decode_of_column
from .products import factor_of_row
from .sm90_results import rows_are_alike

OUTPUT = "bfloat16"
DECODE_A = "none"
CHUNK = 128
SPLIT = 1

ZERO = np.float32(0.0)
WARP = 0xFFFFFFFF
#: What a row that there is not is told to others as.
NONE = 0xFFFFFFFF
#: Rows of A whose results are in shared memory at a time, and bytes from one to the next: 128
#: columns, and a factor of the row behind them.
ROWS = 64
PITCH = 272
FACTOR = 256


def tile_rows():
    """Rows of A whose results a block stores of a tile."""
    return CHUNK // SPLIT


def kind_of_output():
    """The 16-bit type of the result, as instructions name it."""
    if OUTPUT == "float16":
        return "f16"
    else:
        return "bf16"


def place_of_lane(inner, lane):
    """Where in a warpgroup's rows the eight elements go that a lane tells ``stmatrix`` of."""
    row = add_u32(and_u32(lane, 7), shl_u32(shr_u32(lane, 4), 3))
    column = add_u32(shl_u32(inner, 4), and_u32(lane, 8))
    return add_u32(mul_u32(row, PITCH), shl_u32(column, 1))


def source_of(a_rows, here, number):
    """The row of A of a row of the tile, as others are told it."""
    row_indices, input_rows = a_rows
    expert, _, first_row, count, _, _ = here
    source = -1
    if expert >= 0:
        mine = min_u32(number, sub_u32(count, 1))
        source = source_row(row_indices, i64_of_u32(add_u32(first_row, mine)), input_rows)
    return u32_of_i64(source)


def factors_of_columns(to, here, columns, begin, factor, of_matrix):
    """What two of a lane's columns are multiplied by, 8 apart; any, where there is none."""
    expert = max(here[0], 0)
    last = columns - 1
    low = decode_of_column(to[1], of_matrix, expert, min(begin, last), columns)
    high = decode_of_column(to[1], of_matrix, expert, min(begin + 8, last), columns)
    if DECODE_A == "row":
        return low, high
    else:
        return mul_rn(factor, low), mul_rn(factor, high)


def lies_well(out, columns):
    """Whether 16 bytes of a row begin at multiples of 16 bytes, wherever they are."""
    return (columns % 8 == 0) & (ptr_address(out, 0) % 16 == 0)


def store_eight(out, at, left, words):
    """Eight neighbouring columns of a row, those of `left` that there are."""
    if left > 0:
        st_global_u16(out, at * 2, and_u32(words[0], 0xFFFF), "")
    if left > 1:
        st_global_u16(out, at * 2 + 2, shr_u32(words[0], 16), "")
    if left > 2:
        st_global_u16(out, at * 2 + 4, and_u32(words[1], 0xFFFF), "")
    if left > 3:
        st_global_u16(out, at * 2 + 6, shr_u32(words[1], 16), "")
    if left > 4:
        st_global_u16(out, at * 2 + 8, and_u32(words[2], 0xFFFF), "")
    if left > 5:
        st_global_u16(out, at * 2 + 10, shr_u32(words[2], 16), "")
    if left > 6:
        st_global_u16(out, at * 2 + 12, and_u32(words[3], 0xFFFF), "")
    if left > 7:
        st_global_u16(out, at * 2 + 14, shr_u32(words[3], 16), "")


def is_known(here, source, inside):
    """Whether the row of A of row `inside` of 32 is there; where not, the result is zero."""
    if rows_are_alike():
        return here[0] >= 0
    else:
        return lt_u32(shfl_idx_u32(WARP, source, inside), NONE)


def put_eight(out, here, inside, source, first, column, columns, words):
    """Store what a lane has of row `inside` of 32, if the tile has the row; it lies well."""
    known = is_known(here, source, inside)
    local = add_u32(inside, first)
    at = i64_of_u32(add_u32(here[2], local)) * columns + column
    a = select_u32(known, words[0], 0)
    b = select_u32(known, words[1], 0)
    c = select_u32(known, words[2], 0)
    d = select_u32(known, words[3], 0)
    st_global_v4_u32_if(out, at * 2, a, b, c, d, lt_u32(local, here[3]) & (column < columns))


def put_rows(at, acc, rebase, low, high, factors, first: str):
    """Put 64 columns of a stripe's sums, which are rows of A, into shared memory as rows."""
    if DECODE_A == "row" and OUTPUT == "float16":
        st_shared_acc_rows(at, acc, PITCH, rebase, low, high, factors, 1, "f16", first, ROWS)
    elif DECODE_A == "row":
        st_shared_acc_rows(at, acc, PITCH, rebase, low, high, factors, 1, "bf16", first, ROWS)
    elif OUTPUT == "float16":
        st_shared_acc_rows(at, acc, PITCH, rebase, low, high, factors, 0, "f16", first, ROWS)
    else:
        st_shared_acc_rows(at, acc, PITCH, rebase, low, high, factors, 0, "bf16", first, ROWS)


def factor_of_source(scalars, here, source):
    """The factor of a row of A; 0, where it is not there."""
    alpha, alpha_number, a_decode = scalars
    factor = ZERO
    if lt_u32(source, NONE):
        of_range = i64_of_u32(here[1])
        row = i64_of_u32(source)
        factor = factor_of_row(alpha, alpha_number, a_decode, here[0], row, of_range)
    return factor


def store_plainly(to, acc0, acc1, a_rows, factors, here, columns, where, part, begin: str):
    """Store 64 rows of the tile, those that it has: `part` is 0, 1 or 2, `begin` 64 times that."""
    first = 64 * part
    base, group, inner, lane = where
    alpha, alpha_number, a_decode, rebase, of_matrix = factors
    scalars = (alpha, alpha_number, a_decode)
    if lt_u32(first, here[3]):
        source0 = source_of(a_rows, here, add_u32(lane, first))
        source1 = source_of(a_rows, here, add_u32(lane, first + 32))
        factor = ZERO
        if DECODE_A == "row":
            at = add_u32(base, add_u32(mul_u32(lane, PITCH), FACTOR))
            factor0 = factor_of_source(scalars, here, source0)
            factor1 = factor_of_source(scalars, here, source1)
            if lt_u32(lane, tile_rows()):
                st_shared_f32(at, factor0)
            if tile_rows() > 32:
                if lt_u32(lane, tile_rows() - 32):
                    st_shared_f32(add_u32(at, 32 * PITCH), factor1)
        elif here[0] >= 0:
            factor = factor_of_source(scalars, here, u32_of_i64(0))  # that of all rows
        left = add_u32(shl_u32(here[4], 8), shl_u32(group, 7))
        mine = i64_of_u32(add_u32(left, add_u32(shl_u32(inner, 4), shr_u32(lane, 2))))
        low0, high0 = factors_of_columns(to, here, columns, mine, factor, of_matrix)
        at = add_u32(base, place_of_lane(inner, lane))
        bar_sync(add_u32(group, 1), 128)
        put_rows(at, acc0, rebase, low0, high0, add_u32(base, FACTOR), begin)
        low1, high1 = factors_of_columns(to, here, columns, mine + 64, factor, of_matrix)
        put_rows(add_u32(at, 128), acc1, rebase, low1, high1, add_u32(base, FACTOR), begin)
        bar_sync(add_u32(group, 1), 128)
        # A lane has eight columns, sixteen lanes a row; a warp has two rows of every eight.
        eight = shl_u32(and_u32(lane, 15), 3)
        column = i64_of_u32(add_u32(left, eight))
        row = add_u32(shl_u32(inner, 1), shr_u32(lane, 4))
        base = add_u32(add_u32(base, mul_u32(row, PITCH)), shl_u32(eight, 1))
        store_rows(to[0], base, row, source0, here, column, columns, first, 0)
        if tile_rows() > first + 32:
            store_rows(to[0], base, row, source1, here, column, columns, first, 32)


def store_rows(out, base, row, source, here, column, columns, first, part):
    """Store a lane's share of 32 rows: of each eight that the tile has, that of number `row`."""
    left = tile_rows() - first - part
    base = add_u32(base, part * PITCH)
    if lies_well(out, columns):
        w0 = ld_shared_v4_u32(base)
        w1, w2, w3 = w0, w0, w0
        if left > 8:
            w1 = ld_shared_v4_u32(add_u32(base, 8 * PITCH))
        if left > 16:
            w2 = ld_shared_v4_u32(add_u32(base, 16 * PITCH))
        if left > 24:
            w3 = ld_shared_v4_u32(add_u32(base, 24 * PITCH))
        put_eight(out, here, row, source, first + part, column, columns, w0)
        if left > 8:
            put_eight(out, here, add_u32(row, 8), source, first + part, column, columns, w1)
        if left > 16:
            put_eight(out, here, add_u32(row, 16), source, first + part, column, columns, w2)
        if left > 24:
            put_eight(out, here, add_u32(row, 24), source, first + part, column, columns, w3)
    else:
        turn = sub_u32(row, row)
        while lt_u32(turn, min(left, 32)):
            inside = add_u32(row, turn)
            known = is_known(here, source, inside)
            local = add_u32(inside, first + part)
            words = ld_shared_v4_u32(add_u32(base, mul_u32(turn, PITCH)))
            if not known:
                none = u32_of_i64(0)
                words = (none, none, none, none)
            if lt_u32(local, here[3]):
                at = i64_of_u32(add_u32(here[2], local)) * columns + column
                store_eight(out, at, columns - column, words)
            turn = add_u32(turn, 8)
