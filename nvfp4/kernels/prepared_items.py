"""What kernels with prepared weights share: items of work, rows of A, results.

An item is a chunk of rows of a range (``schedule``) and a block of columns; the items of a range
that read the same weights follow each other.

Compile-time constants: those of ``schedule`` and ``groups``; GROUPED; A_ELEMENT, A_SCALE, A_LAYOUT,
A_STARTS, B_ELEMENT, B_SCALE, DECODE_A, DECODE_B, ALPHA, PAIR, OUTPUT, THREADS.
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..ptx.arith import (
    add_u32,
    div_u32,
    i64_of_u32,
    le_u32,
    lt_u32,
    min_u32,
    mul_rn,
    mul_u32,
    shl_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.memory import ld_shared_u32
from .activations import row_bytes
from .elements import store_one
from .groups import counted, expert_of, load_index, row_of_none, source_row
from .prepared_sums import slow_sum
from .products import decode_of_b, epilogue, factor_of_row, pair_epilogue
from .schedule import length_of_range, range_of_chunk, rows_of_chunk

A_ELEMENT = "none"
A_LAYOUT = "linear"
A_STARTS = "none"
PAIR = "none"
DECODE_B = "scalar"
GROUPED = True
CHUNK = 8
THREADS = 256

ZERO = np.float32(0.0)
ONE = np.float32(1.0)


def locate(item, across, ranges, lane):
    """What an item is: expert (-1: none), range, first row, rows, block of columns, scale row."""
    expert_ids, tile_starts, table, groups, experts, tiles, rows = ranges
    expert = 0
    owner = sub_u32(item, item)
    chunk_number = div_u32(item, across)
    if GROUPED:
        owner = range_of_chunk(u32_of_i64(groups), table, chunk_number, lane)
        entry = add_u32(table, shl_u32(owner, 4))
        start = ld_shared_u32(entry)
        length = length_of_range(entry, start)
        first_chunk = ld_shared_u32(add_u32(entry, 4))
        chunks = sub_u32(ld_shared_u32(add_u32(entry, 20)), first_chunk)
        # Chunks of a range that share weights come one after the other.
        place = sub_u32(item, mul_u32(first_chunk, across))
        block = place
        if lt_u32(1, chunks):
            block = div_u32(place, chunks)
        skip, count = rows_of_chunk(length, chunks, sub_u32(place, mul_u32(block, chunks)))
        first = add_u32(start, skip)
        expert = expert_of(expert_ids, i64_of_u32(owner), experts)
        tile_row = 0
        if A_LAYOUT == "tcgen":
            tile = i64_of_u32(ld_shared_u32(add_u32(entry, 8)))
            if A_STARTS != "none":
                tile = load_index(tile_starts, i64_of_u32(owner), A_STARTS)
            # No sum with the number of a tile, which may be any of 64 bits.
            if tile < 0 or tile > tiles - ((i64_of_u32(length) + 127) >> 7):
                expert = -1
                tile = 0
            tile_row = (tile << 7) + i64_of_u32(skip)
    else:
        block = sub_u32(item, mul_u32(chunk_number, across))
        first = mul_u32(chunk_number, CHUNK)
        count = min_u32(sub_u32(u32_of_i64(rows), first), CHUNK)
        tile_row = i64_of_u32(first)
    return expert, owner, first, count, block, tile_row


def row_of_item(a_rows, local, count, first, tile_row, a_stride):
    """Where the row of A of number `local` begins, in bytes, and the row of its scales.

    Beyond the count, and where there is no such row, any row: its sums are not used.
    """
    row_indices, input_rows = a_rows
    local = min_u32(local, sub_u32(count, 1))
    row = i64_of_u32(add_u32(first, local))
    source = max(source_row(row_indices, row, input_rows), 0)
    scale_row = source
    if A_LAYOUT == "tcgen":
        scale_row = tile_row + i64_of_u32(local)
    return source * row_bytes(a_stride), scale_row


def decode_of_matrix(b_decode, expert):
    """The decode scale of a whole matrix, where it has one."""
    if DECODE_B == "scalar" or DECODE_B == "batch":
        return decode_of_b(b_decode, expert, 0, 0)
    else:
        return ZERO


def decode_of_column(b_decode, of_matrix, expert, n, columns):
    """The decode scale of a column of the product; `of_matrix` is what all of them have."""
    if DECODE_B == "row" or DECODE_B == "batch_row":
        return decode_of_b(b_decode, expert, n, columns)
    else:
        return of_matrix


def columns_of_result(column, columns):
    """The columns of the product that make a column of the result: gate and up of a pair."""
    gate_row = column
    up_row = column + columns // 2
    if PAIR == "interleaved":
        gate_row = column * 2
        up_row = column * 2 + 1
    return gate_row, up_row


def final_value(to, row, column, columns, expert, s0, s1, factors, source, owner):
    """A value of the result, of its sum; of pairs, `s1` belongs to up."""
    alpha, alpha_number, a_decode, rebase, of_matrix = factors
    factor = factor_of_row(alpha, alpha_number, a_decode, expert, source, owner)
    return value_of_sum(to, row, column, columns, expert, s0, s1, (factor, rebase, of_matrix))


def value_of_sum(to, row, column, columns, expert, s0, s1, factors):
    """:func:`final_value` with the factor of its row, of its matrix, and its decode scale."""
    _, b_decode, e0, e1, e2, e3 = to
    factor, rebase, of_matrix = factors
    gate_row, up_row = columns_of_result(column, columns)
    decode = decode_of_column(b_decode, of_matrix, expert, gate_row, columns)
    v = mul_rn(mul_rn(s0, rebase), mul_rn(factor, decode))
    if PAIR == "none":
        v = np.float32(epilogue(v, row, column, expert, e0, e1, e2, e3))
    else:
        decode = decode_of_column(b_decode, of_matrix, expert, up_row, columns)
        up = mul_rn(mul_rn(s1, rebase), mul_rn(factor, decode))
        v = np.float32(pair_epilogue(v, up, row, column, expert, e0, e1, e2, e3))
    return v


def slow_value(to, row, column, columns, expert, factors, source, owner, operands):
    """:func:`final_value` with sums made one product after the other."""
    a, a_scales, b, b_scales, depth, a_stride, a_scale_row = operands
    alpha, alpha_number, a_decode, _, of_matrix = factors
    gate_row, up_row = columns_of_result(column, columns)
    at = source * a_stride
    s0 = slow_sum(a, a_scales, at, a_scale_row, b, b_scales, expert, gate_row, columns, depth)
    s1 = s0
    if PAIR != "none":
        s1 = slow_sum(a, a_scales, at, a_scale_row, b, b_scales, expert, up_row, columns, depth)
    plainly = (alpha, alpha_number, a_decode, ONE, of_matrix)
    return final_value(to, row, column, columns, expert, s0, s1, plainly, source, owner)


def row_to_copy(a_rows, here, local):
    """The row of A of a row of the tile; any, where there is none."""
    row_indices, input_rows = a_rows
    local = min_u32(local, sub_u32(here[3], 1))
    source = source_row(row_indices, i64_of_u32(add_u32(here[2], local)), input_rows)
    return u32_of_i64(max(source, 0))


def scale_row_of(source, tile_row, local):
    """The row of the scales of a row of A."""
    if A_LAYOUT == "tcgen":
        return tile_row + i64_of_u32(local)
    else:
        return source


def blank_rows_of_none(out, table, groups, rows, width):
    """Write zeros to the rows that belong to no range."""
    if counted():
        blank_rows_behind_counts(out, table, groups, rows, width)
    else:
        blank_rows_outside(out, table, groups, rows, width)


def blank_rows_behind_counts(out, table, groups, rows, width):
    """Write zeros to the rows of each matrix from its count on."""
    capacity = u32_of_i64(rows // max(groups, 1))
    row = cuda.blockIdx.x + 0
    while row < rows:
        matrix = div_u32(u32_of_i64(row), capacity)
        count = ld_shared_u32(add_u32(table, add_u32(shl_u32(matrix, 4), 12)))
        if le_u32(count, sub_u32(u32_of_i64(row), mul_u32(matrix, capacity))):
            column = cuda.threadIdx.x + 0
            while column < width:
                store_one(out, row * width + column, ZERO)
                column += THREADS
        row += cuda.gridDim.x


def blank_rows_outside(out, table, groups, rows, width):
    """Write zeros to the rows before the first range and behind the last one."""
    head = i64_of_u32(ld_shared_u32(table))
    tail = i64_of_u32(ld_shared_u32(add_u32(table, shl_u32(u32_of_i64(groups), 4))))
    k = cuda.blockIdx.x + 0
    row = row_of_none(k, head, tail)
    while row < rows:
        column = cuda.threadIdx.x + 0
        while column < width:
            store_one(out, row * width + column, ZERO)
            column += THREADS
        k += cuda.gridDim.x
        row = row_of_none(k, head, tail)
