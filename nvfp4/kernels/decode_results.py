"""Results of ``matmul_decode``: sums of warps meet in shared memory, and are stored.

Compile-time constants: those of ``matmul_decode``.
"""

from __future__ import annotations

import numpy as np

from ..ptx.arith import (
    add_rn,
    add_u32,
    and_u32,
    div_u32,
    i64_of_u32,
    lt_u32,
    mul_u32,
    ne_u32,
    or_u32,
    select_u32,
    shl_u32,
    shr_u32,
)
from ..ptx.memory import ld_shared_f32, ld_shared_u32, st_shared_f32, st_shared_u32
from ..ptx.warp import vote_any
from .activations import row_bytes, row_is_extreme
from .elements import store_one
from .groups import source_row
from .prepared_codes import first_scale_row, put_value
from .prepared_items import decode_of_matrix, final_value, scale_row_of, slow_value
from .prepared_mma import factor_of_matrix, matrix_records
from .products import result_columns

PAIR = "none"
CHUNK = 8
TEAM = 8
STRIPES = 1
PASSES = 1
OUTPUT = "bfloat16"

ZERO = np.float32(0.0)
#: Floats from one row of A to the next in what a warp leaves in shared memory: 16 would make four
#: lanes meet in each bank.
PITCH = 20
WARP = 0xFFFFFFFF


def sum_bytes():
    """What a warp leaves of an item in shared memory: its sums of all stripes."""
    return STRIPES * CHUNK * PITCH * 4


def leave(base, row, g, c):
    """Leave the sums of eight rows of A in shared memory, each row's 16 side by side."""
    at = add_u32(base, mul_u32(add_u32(mul_u32(row, PITCH), g), 4))
    st_shared_f32(at, c[0])
    st_shared_f32(add_u32(at, 4 * PITCH), c[1])
    st_shared_f32(add_u32(at, 32), c[2])
    st_shared_f32(add_u32(at, 4 * PITCH + 32), c[3])


def total(base, row, stripe, n):
    """The sum of all warps of a team for a row of A and one of 16 rows of a stripe."""
    at = add_u32(mul_u32(stripe, CHUNK * PITCH), add_u32(mul_u32(row, PITCH), n))
    at = add_u32(base, shl_u32(at, 2))
    value = ld_shared_f32(at)
    for warp in range(1, TEAM):
        value = add_rn(value, ld_shared_f32(add_u32(at, warp * sum_bytes())))
    return value


def leave_flag(base, extreme):
    """Leave, where no sum is, whether this warp has met an extreme scale."""
    met = vote_any(WARP, extreme)
    st_shared_u32(add_u32(base, 64), select_u32(met, 1, 0))


def some_flag(base):
    """Whether a warp of the team has left one."""
    some = ld_shared_u32(add_u32(base, 64))
    for warp in range(1, TEAM):
        some = or_u32(some, ld_shared_u32(add_u32(base, 64 + warp * sum_bytes())))
    return ne_u32(some, 0)


def width_of_pass():
    """Columns of the result of a pass over an item."""
    if PAIR == "interleaved":
        return 8 * STRIPES
    elif PAIR == "halves":
        return 16
    else:
        return 16 * STRIPES


def width_of_item():
    """Columns of the result of an item."""
    return PASSES * width_of_pass()


def sums_of(bases, local, n):
    """The sum of a column `n` of the item for a row of A; of pairs also that of up.

    `bases` are where the sums of the first and of the last pass are.
    """
    base = bases[0]
    if PASSES == 2:
        base = select_u32(lt_u32(n, width_of_pass()), base, bases[1])
        n = and_u32(n, width_of_pass() - 1)
    if PAIR == "interleaved":
        at = shl_u32(n, 1)
        s0 = total(base, local, shr_u32(at, 4), and_u32(at, 15))
        s1 = total(base, local, shr_u32(at, 4), add_u32(and_u32(at, 15), 1))
    elif PAIR == "halves":
        s0 = total(base, local, 0, n)
        s1 = total(base, local, 1, n)
    else:
        s0 = total(base, local, shr_u32(n, 4), and_u32(n, 15))
        s1 = s0
    return s0, s1


def finish(to, bases, a_rows, factors, here, columns, index):
    """Add up what the warps have left of an item, and store the results."""
    expert, owner, first, count, block, _ = here
    row_indices, input_rows = a_rows
    width = result_columns(columns)
    i = index
    while lt_u32(i, mul_u32(count, width_of_item())):
        local = div_u32(i, width_of_item())
        n = and_u32(i, width_of_item() - 1)
        column = i64_of_u32(add_u32(mul_u32(block, width_of_item()), n))
        if column < width:
            row = i64_of_u32(add_u32(first, local))
            source = -1
            if expert >= 0:
                source = source_row(row_indices, row, input_rows)
            if source < 0:
                store_one(to[0], row * width + column, ZERO)
            else:
                s0, s1 = sums_of(bases, local, n)
                of_range = i64_of_u32(owner)
                v = final_value(to, row, column, columns, expert, s0, s1, factors, source, of_range)
                store_one(to[0], row * width + column, v)
        i = add_u32(i, TEAM * 32)


def finish_codes(to, codes, ranges, bases, a_rows, factors, here, columns, index):
    """The same where the result is quantised: the lanes of a block are beside each other."""
    expert, owner, first, count, block, _ = here
    row_indices, input_rows = a_rows
    width = result_columns(columns)
    scale_row = first_scale_row(codes, ranges, owner, first)
    # Whole warps: lanes of a block see each other's values.
    end = and_u32(add_u32(mul_u32(count, width_of_item()), 31), 0xFFFFFFE0)
    i = index
    while lt_u32(i, end):
        local = div_u32(i, width_of_item())
        n = and_u32(i, width_of_item() - 1)
        column = i64_of_u32(add_u32(mul_u32(block, width_of_item()), n))
        row = i64_of_u32(add_u32(first, local))
        write = lt_u32(local, count) and column < width
        source = -1
        if write and expert >= 0:
            source = source_row(row_indices, row, input_rows)
        v = ZERO
        if source >= 0:
            s0, s1 = sums_of(bases, local, n)
            of_range = i64_of_u32(owner)
            v = final_value(to, row, column, columns, expert, s0, s1, factors, source, of_range)
        put_value(codes, to[0], row, column, width, v, write, scale_row + i64_of_u32(local))
        i = add_u32(i, TEAM * 32)


def repeat_slowly(
    to,
    codes,
    ranges,
    a_rows,
    operands,
    alpha,
    alpha_number,
    a_decode,
    here,
    columns,
    index,
    everything,
):
    """Write an item one product after the other if its matrix is plain.

    With `everything` also its rows with extreme scales: none of the other rows, which must not know
    of these.
    """
    expert, owner, first, count, block, tile_row = here
    row_indices, input_rows = a_rows
    a, a_scales, b, b_scales, depth, a_stride = operands
    width = result_columns(columns)
    if expert >= 0:
        row_blocks = (columns + 15) // 16
        header = expert * matrix_records(row_blocks, (depth + 63) // 64)
        plain = factor_of_matrix(b_scales, header) == ZERO
        if everything or plain:
            of_matrix = decode_of_matrix(to[1], expert)
            factors = (alpha, alpha_number, a_decode, ZERO, of_matrix)
            i = index
            while lt_u32(i, CHUNK * width_of_item()):
                local = div_u32(i, width_of_item())
                n = and_u32(i, width_of_item() - 1)
                column = i64_of_u32(add_u32(mul_u32(block, width_of_item()), n))
                row = i64_of_u32(add_u32(first, local))
                source = -1
                if lt_u32(local, count) and column < width:
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
                i = add_u32(i, TEAM * 32)
