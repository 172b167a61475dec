"""Quantised results of products with prepared weights: codes, scales and all padding of scales.

Values stand in the lanes of a warp, neighbouring columns beside each other, and are quantised as
``matmul_naive`` does, with an encode scale of 1. Each byte is written once, by whoever has its row:
the item that makes the row; for padding and rows of no range, some warp of the grid.

Compile-time constants: ELEMENT, SCALE, LAYOUT, STARTS, ROUNDING, UNIT as in ``matmul_naive``;
GROUPED, THREADS.
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..ptx.arith import (
    abs_f32,
    add_u32,
    i64_of_u32,
    max_nan_f32,
    mul_rn,
    shl_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.convert import e2m1x2_of_f32
from ..ptx.memory import ld_shared_u32, ptr_address, st_global_u8, st_global_u16, st_global_u32
from ..ptx.warp import vote_any
from .elements import code_bytes, encode_float8x4, store_word
from .groups import counted, load_index, row_of_none
from .matmul_naive import result_block, result_k_tiles, store_result
from .scales import SIXTH, block_scale, tcgen_place
from .warps import amax_of_lanes

ELEMENT = "e2m1"
LAYOUT = "tcgen"
STARTS = "none"
GROUPED = True
THREADS = 256

ONE = np.float32(1.0)
WARP = 0xFFFFFFFF


# Blocks ------------------------------------------------------------------------------------------


def first_scale_row(codes, ranges, owner, first):
    """The row of the scales of row `first` of the result, which is one of range `owner`."""
    if LAYOUT == "linear" or not GROUPED:
        return i64_of_u32(first)
    else:
        entry = add_u32(ranges[2], shl_u32(owner, 4))
        tile = i64_of_u32(ld_shared_u32(add_u32(entry, 8)))
        if STARTS != "none":
            tile = load_index(codes[2], i64_of_u32(owner), STARTS)
            # Far out of range it might be shifted into it.
            tile = min(max(tile, -(1 << 32)), codes[3])
        return (tile << 7) + i64_of_u32(sub_u32(first, ld_shared_u32(entry)))


def has_scale(codes, scale_row):
    """Whether there is such a row of scales."""
    if LAYOUT == "linear" or not GROUPED:
        return True
    else:
        return scale_row >= 0 and scale_row < codes[3] << 7


def put_value(codes, out, row, column, width, value, write, scale_row):
    """Write a value's code and, in a block's first lane, its scale; a whole warp comes here."""
    scaled = write and has_scale(codes, scale_row)
    store_result(out, codes[0], row, column, width, value, write, scale_row, scaled, WARP)
    if scaled:
        pad_row(codes, column, width, scale_row)


def put_four(codes, out, row, column, width, v, write, scale_row):
    """The same for four neighbouring columns a lane."""
    if vote_any(WARP, write):
        amax = max_nan_f32(abs_f32(v[0]), abs_f32(v[1]))
        amax = max_nan_f32(amax, max_nan_f32(abs_f32(v[2]), abs_f32(v[3])))
        amax = amax_of_lanes(WARP, amax, result_block() // 4)
        byte, q = block_scale(amax, SIXTH, ONE)
        if write:
            store_four_codes(out, row * width + column, v, q)
            if column % result_block() == 0 and has_scale(codes, scale_row):
                block = column // result_block()
                if LAYOUT == "linear":
                    place = scale_row * (width // result_block()) + block
                else:
                    place = tcgen_place(scale_row, block, result_k_tiles(width))
                st_global_u8(codes[0], place, byte, "")
                pad_row(codes, column, width, scale_row)


def store_four_codes(out, at, v, q):
    """Codes of four values times q, from number `at` of all on."""
    if ELEMENT == "e2m1":
        at = at >> 1
        low = e2m1x2_of_f32(mul_rn(v[1], q), mul_rn(v[0], q))
        high = e2m1x2_of_f32(mul_rn(v[3], q), mul_rn(v[2], q))
        if ptr_address(out, 0) & 1 == 0:
            st_global_u16(out, at, add_u32(low, shl_u32(high, 8)), "")
        else:
            st_global_u8(out, at, low, "")
            st_global_u8(out, at + 1, high, "")
    else:
        word = encode_float8x4(v[0], v[1], v[2], v[3], q)
        if ptr_address(out, 0) & 3 == 0:
            st_global_u32(out, at, word, "")
        else:
            store_word(out, at, word)


def pad_row(codes, column, width, scale_row):
    """Zero the scales behind the last block of a row, where it begins at this column."""
    if LAYOUT == "tcgen":
        block = width // result_block()
        if column == (block - 1) * result_block():
            while block < 4 * result_k_tiles(width):
                place = tcgen_place(scale_row, block, result_k_tiles(width))
                st_global_u8(codes[0], place, 0, "")
                block += 1


# What no item writes -----------------------------------------------------------------------------


def blank_rest(codes, out, table, groups, rows, width):
    """Write the decode scales, and zeros to all bytes that belong to no row of a range.

    All threads of the grid come here; `table` is used in a grouped product only.
    """
    i = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    if GROUPED:
        while i < groups:
            codes[1][i] = ONE
            i += cuda.gridDim.x * THREADS
        if counted():
            blank_behind_counts(codes, out, table, groups, rows, width)
        else:
            blank_rows(codes, out, table, groups, rows, width)
    elif i == 0:
        codes[1][0] = ONE
    if LAYOUT == "tcgen":
        if counted():
            blank_tiles_behind_counts(codes, table, groups, rows, width)
        elif GROUPED:
            blank_ends(codes, table, groups, width)
            blank_tiles(codes, table, groups, width)
        elif rows & 127 != 0:
            k = first_warp()
            while k < result_k_tiles(width):
                tile = (rows >> 7) * result_k_tiles(width) + k
                blank_tile(codes[0], tile, rows & 127)
                k += all_warps()


def first_warp():
    """Number of this warp in the grid."""
    return cuda.blockIdx.x * (THREADS // 32) + (cuda.threadIdx.x >> 5)


def all_warps():
    """Warps of the grid."""
    return cuda.gridDim.x * (THREADS // 32)


def blank_rows(codes, out, table, groups, rows, width):
    """Codes of rows of no range, and their scales where these are linear."""
    head = i64_of_u32(ld_shared_u32(table))
    tail = i64_of_u32(ld_shared_u32(add_u32(table, shl_u32(u32_of_i64(groups), 4))))
    k = cuda.blockIdx.x + 0
    row = row_of_none(k, head, tail)
    while row < rows:
        blank_row(codes, out, row, width)
        k += cuda.gridDim.x
        row = row_of_none(k, head, tail)


def blank_row(codes, out, row, width):
    """A row's codes, and its scales where these are linear; a block does it."""
    size = code_bytes(width)
    at = cuda.threadIdx.x + 0
    while at < size:
        st_global_u8(out, row * size + at, 0, "")
        at += THREADS
    if LAYOUT == "linear":
        size = width // result_block()
        at = cuda.threadIdx.x + 0
        while at < size:
            st_global_u8(codes[0], row * size + at, 0, "")
            at += THREADS


def blank_behind_counts(codes, out, table, groups, rows, width):
    """The same of the rows of each matrix from its count on."""
    capacity = rows // max(groups, 1)
    row = cuda.blockIdx.x + 0
    while row < rows:
        matrix = row // capacity
        if row - matrix * capacity >= count_of_matrix(table, matrix):
            blank_row(codes, out, row, width)
        row += cuda.gridDim.x


def count_of_matrix(table, matrix):
    """How many rows of a matrix count."""
    at = add_u32(table, add_u32(shl_u32(u32_of_i64(matrix), 4), 12))
    return i64_of_u32(ld_shared_u32(at))


def blank_tiles_behind_counts(codes, table, groups, rows, width):
    """Scales of each matrix from its count to the end of its tiles."""
    across = result_k_tiles(width)
    down = (rows // max(groups, 1) + 127) >> 7
    unit = first_warp()
    while unit < groups * down * across:
        tile = unit // across
        matrix = tile // down
        first = count_of_matrix(table, matrix) - ((tile - matrix * down) << 7)
        if first < 128:
            blank_tile(codes[0], unit, first)
        unit += all_warps()


def tiles_of_range(codes, table, i):
    """First tile of a range in the result's scales, and its rows."""
    entry = add_u32(table, shl_u32(u32_of_i64(i), 4))
    count = sub_u32(ld_shared_u32(add_u32(entry, 16)), ld_shared_u32(entry))
    tile = i64_of_u32(ld_shared_u32(add_u32(entry, 8)))
    if STARTS != "none":
        tile = load_index(codes[2], i, STARTS)
    return tile, i64_of_u32(count)


def blank_ends(codes, table, groups, width):
    """The rows behind the last one of each range, in its last tile."""
    across = result_k_tiles(width)
    unit = first_warp()
    while unit < groups * across:
        i = unit // across
        tile, count = tiles_of_range(codes, table, i)
        tile += count >> 7
        if count & 127 != 0 and tile >= 0 and tile < codes[3]:
            blank_tile(codes[0], tile * across + unit - i * across, count & 127)
        unit += all_warps()


def blank_tiles(codes, table, groups, width):
    """The tiles that no range has."""
    across = result_k_tiles(width)
    if STARTS == "none":
        entry = add_u32(table, shl_u32(u32_of_i64(groups), 4))
        unit = i64_of_u32(ld_shared_u32(add_u32(entry, 8))) * across + first_warp()
        while unit < codes[3] * across:
            blank_tile(codes[0], unit, 0)
            unit += all_warps()
    else:
        tile = first_warp()
        while tile < codes[3]:
            if not is_owned(codes, table, groups, tile):
                k = tile * across
                while k < (tile + 1) * across:
                    blank_tile(codes[0], k, 0)
                    k += 1
            tile += all_warps()


def is_owned(codes, table, groups, tile):
    """Whether a range has a tile; a whole warp asks."""
    owned = False
    i = cuda.threadIdx.x & 31
    while i < groups:
        first, count = tiles_of_range(codes, table, i)
        owned = owned | ((first <= tile) & (tile < first + ((count + 127) >> 7)))
        i += 32
    return vote_any(WARP, owned)


def blank_tile(scales, tile, first):
    """Zero rows `first` to 127 of a tile of 512 bytes; a warp does it."""
    lane = cuda.threadIdx.x & 31
    at = (tile << 9) + (lane << 4)
    for quarter in range(4):
        if lane + 32 * quarter >= first:
            if ptr_address(scales, 0) & 3 == 0:
                st_global_u32(scales, at + 4 * quarter, 0, "")
            else:
                store_word(scales, at + 4 * quarter, 0)
