"""Results of ``matmul_sm90``: sums to shared memory, from there along rows, or quantised.

A warpgroup leaves the sums of 32 rows of A at a time, a piece. A lane has four neighbouring columns
for all rows of a tile, so what depends on the column alone is found once; rows are looked up by a
lane each, while the sums are on their way, and told to the others.

Compile-time constants: those of ``prepared_items`` and ``prepared_codes``; CHUNK.
"""

from __future__ import annotations

import numpy as np

from ..ptx.arith import (
    add_u32,
    and_u32,
    div_u32,
    i64_of_u32,
    lt_u32,
    min_u32,
    mul_u32,
    rem_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.bits import bf16x2_of_f32, f16x2_of_f32, uint_as_float
from ..ptx.control import bar_sync
from ..ptx.memory import ld_shared_v4_u32, ptr_address, st_global_v2_u32
from ..ptx.warp import shfl_idx_f32, shfl_idx_u32
from ..ptx.wgmma import st_shared_acc_columns
from .activations import row_bytes, row_is_extreme
from .elements import store_one
from .groups import source_row
from .prepared_codes import first_scale_row, put_four, put_value
from .prepared_items import decode_of_matrix, scale_row_of, slow_value, value_of_sum
from .prepared_mma import factor_of_matrix, matrix_records
from .products import factor_of_row, result_columns

PAIR = "none"
OUTPUT = "bfloat16"
INDICES = "none"
DECODE_A = "none"
CHUNK = 128

ZERO = np.float32(0.0)
WARP = 0xFFFFFFFF
#: What a row that there is not is told to others as.
NONE = 0xFFFFFFFF
#: Rows of A of which sums are in shared memory at a time, and bytes from one to the next.
PIECE = 32
PITCH = 272


def piece_bytes():
    """Bytes of the sums of a piece for a stripe."""
    return PIECE * PITCH


def columns_of_tile():
    """Columns of the result of a tile."""
    if PAIR == "none":
        return 256
    else:
        return 128


def columns_of_group():
    """Columns of the result of a warpgroup."""
    return columns_of_tile() // 2


def fours_of_group():
    """Lanes side by side that have them, four each."""
    return columns_of_group() // 4


def store_four(to, row, column, columns, v):
    """Store four neighbouring columns, those that there are."""
    width = result_columns(columns)
    at = row * width + column
    if OUTPUT != "float32" and width % 4 == 0 and ptr_address(to[0], 0) % 8 == 0:
        if OUTPUT == "bfloat16":
            low = bf16x2_of_f32(v[1], v[0])
            high = bf16x2_of_f32(v[3], v[2])
        else:
            low = f16x2_of_f32(v[1], v[0])
            high = f16x2_of_f32(v[3], v[2])
        st_global_v2_u32(to[0], at * 2, low, high, "")
    else:
        store_one(to[0], at, v[0])
        if column + 1 < width:
            store_one(to[0], at + 1, v[1])
        if column + 2 < width:
            store_one(to[0], at + 2, v[2])
        if column + 3 < width:
            store_one(to[0], at + 3, v[3])


def four_sums(base, stripe, local, n):
    """Sums of four neighbouring rows of the weights of a stripe for a row of A."""
    at = add_u32(base, mul_u32(stripe, piece_bytes()))
    words = ld_shared_v4_u32(add_u32(at, add_u32(mul_u32(local, PITCH), shl_u32(n, 2))))
    return (
        uint_as_float(words[0]),
        uint_as_float(words[1]),
        uint_as_float(words[2]),
        uint_as_float(words[3]),
    )


def sums_of_row(base, inside, n):
    """Sums of four neighbouring columns of the result, gates and ups of pairs, for a row of A."""
    if PAIR == "interleaved":
        at = and_u32(shl_u32(n, 1), 63)
        s = four_sums(base, shr_u32(n, 5), inside, at)
        u = four_sums(base, shr_u32(n, 5), inside, add_u32(at, 4))
        return (s[0], s[2], u[0], u[2]), (s[1], s[3], u[1], u[3])
    elif PAIR == "halves":
        return four_sums(base, 0, inside, n), four_sums(base, 1, inside, n)
    else:
        s = four_sums(base, shr_u32(n, 6), inside, and_u32(n, 63))
        return s, s


def put_row(to, to_codes, here, columns, of_row, column, local, inside, lane_row, sums):
    """Store, or quantise, four neighbouring columns of a row, of their sums; a whole warp comes.

    Values beyond the columns are made as of the last one, and not used: an epilogue may read its
    arrays there.
    """
    expert, owner, first_row, count, _, _ = here
    lane_factor, rebase, of_matrix = of_row
    codes, ranges = to_codes
    width = result_columns(columns)
    row = i64_of_u32(add_u32(first_row, local))
    write = lt_u32(local, count) and column < width
    if rows_are_alike():
        known = expert >= 0
        factor = lane_factor
    else:
        known = lt_u32(shfl_idx_u32(WARP, lane_row, inside), NONE)
        factor = shfl_idx_f32(WARP, lane_factor, inside)
    v = (ZERO, ZERO, ZERO, ZERO)
    if write and known:
        last = width - 1
        factors = (factor, rebase, of_matrix)
        g, u = sums
        v = (
            value_of_sum(to, row, column, columns, expert, g[0], u[0], factors),
            value_of_sum(to, row, min(column + 1, last), columns, expert, g[1], u[1], factors),
            value_of_sum(to, row, min(column + 2, last), columns, expert, g[2], u[2], factors),
            value_of_sum(to, row, min(column + 3, last), columns, expert, g[3], u[3], factors),
        )
    if OUTPUT == "codes":
        scale_row = first_scale_row(codes, ranges, owner, first_row) + i64_of_u32(local)
        put_four(codes, to[0], row, column, width, v, write, scale_row)
    elif write:
        store_four(to, row, column, columns, v)


def rows_are_alike():
    """Whether all rows of a tile are there if its matrix is, and have one factor."""
    if INDICES == "none" and DECODE_A != "row":
        return True
    else:
        return False


def in_piece(inside, piece):
    """A row of a piece that the tile has, where this one is behind its last: not used then."""
    if CHUNK >= piece * PIECE + PIECE:
        return inside
    else:
        return min_u32(inside, CHUNK - piece * PIECE - 1)


def leave_and_store(
    to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, piece, first: str
):
    """A piece of the results: `first` is its first row of A in the tile."""
    expert, owner, first_row, count, block, _ = here
    base, corner, group, index, lane = where
    alpha, alpha_number, a_decode, rebase, of_matrix = factors
    if lt_u32(piece * PIECE, count):
        row_indices, input_rows = a_rows
        # The row of this lane's number in the piece, or the last one of the tile.
        mine = min_u32(add_u32(lane, piece * PIECE), sub_u32(count, 1))
        source = -1
        if expert >= 0:
            source = source_row(row_indices, i64_of_u32(add_u32(first_row, mine)), input_rows)
        factor = ZERO
        if source >= 0:
            of_range = i64_of_u32(owner)
            factor = factor_of_row(alpha, alpha_number, a_decode, expert, source, of_range)
        mine = u32_of_i64(source)
        bar_sync(add_u32(group, 1), 128)
        st_shared_acc_columns(corner, acc0, PITCH, first, PIECE)
        st_shared_acc_columns(add_u32(corner, piece_bytes()), acc1, PITCH, first, PIECE)
        n = shl_u32(rem_u32(index, fours_of_group()), 2)
        begin = add_u32(mul_u32(block, columns_of_tile()), mul_u32(group, columns_of_group()))
        column = i64_of_u32(add_u32(begin, n))
        below = div_u32(index, fours_of_group())
        at_once = 128 // fours_of_group()
        above = sub_u32(lane, lane)
        of_row = (factor, rebase, of_matrix)
        bar_sync(add_u32(group, 1), 128)
        # As often for all lanes, and for the assembler to know it: it keeps what a warp has in
        # common in registers of their own only then. Rows together, so that their loads are.
        while lt_u32(above, PIECE):
            i0 = add_u32(below, above)
            i1 = add_u32(i0, at_once)
            s0 = sums_of_row(base, in_piece(i0, piece), n)
            s1 = sums_of_row(base, in_piece(i1, piece), n)
            s2, s3 = s0, s1
            i2, i3 = i0, i1
            if PAIR == "none":
                i2 = add_u32(i0, 2 * at_once)
                i3 = add_u32(i0, 3 * at_once)
                s2 = sums_of_row(base, in_piece(i2, piece), n)
                s3 = sums_of_row(base, in_piece(i3, piece), n)
            local = add_u32(i0, piece * PIECE)
            put_row(to, to_codes, here, columns, of_row, column, local, i0, mine, s0)
            local = add_u32(i1, piece * PIECE)
            put_row(to, to_codes, here, columns, of_row, column, local, i1, mine, s1)
            if PAIR == "none":
                local = add_u32(i2, piece * PIECE)
                put_row(to, to_codes, here, columns, of_row, column, local, i2, mine, s2)
                local = add_u32(i3, piece * PIECE)
                put_row(to, to_codes, here, columns, of_row, column, local, i3, mine, s3)
                above = add_u32(above, 4 * at_once)
            else:
                above = add_u32(above, 2 * at_once)


def repeat_slowly(
    to, codes, ranges, a_rows, operands, scalars, here, columns, group, index, everything
):
    """Write a warpgroup's part of an item again, one product after the other, where it must be.

    With `everything` also its rows with extreme scales, and none of the others.
    """
    expert, owner, first, count, block, tile_row = here
    row_indices, input_rows = a_rows
    a, a_scales, b, b_scales, depth, a_stride = operands
    alpha, alpha_number, a_decode = scalars
    width = result_columns(columns)
    if expert >= 0:
        header = expert * matrix_records((columns + 15) // 16, (depth + 63) // 64)
        plain = factor_of_matrix(b_scales, header) == ZERO
        if everything or plain:
            factors = (alpha, alpha_number, a_decode, ZERO, decode_of_matrix(to[1], expert))
            begin = add_u32(mul_u32(block, columns_of_tile()), mul_u32(group, columns_of_group()))
            i = index
            while lt_u32(i, mul_u32(count, columns_of_group())):
                local = div_u32(i, columns_of_group())
                column = i64_of_u32(add_u32(begin, rem_u32(i, columns_of_group())))
                row = i64_of_u32(add_u32(first, local))
                source = -1
                if column < width:
                    source = source_row(row_indices, row, input_rows)
                scale_row = scale_row_of(source, tile_row, local)
                if source >= 0 and not plain:
                    at = source * row_bytes(a_stride)
                    if not row_is_extreme(a, a_scales, at, scale_row, depth):
                        source = -1
                v = ZERO
                if source >= 0:
                    given = (a, a_scales, b, b_scales, depth, a_stride, scale_row)
                    of_range = i64_of_u32(owner)
                    v = slow_value(
                        to, row, column, columns, expert, factors, source, of_range, given
                    )
                    if OUTPUT != "codes":
                        store_one(to[0], row * width + column, v)
                if OUTPUT == "codes":
                    result_row = first_scale_row(codes, ranges, owner, first) + i64_of_u32(local)
                    put_value(codes, to[0], row, column, width, v, source >= 0, result_row)
                i = add_u32(i, 128)
