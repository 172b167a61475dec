"""What the warps of a product with tensor memory that store results do: warps 0 to 3.

Each reads 32 lanes of the accumulators, 32 columns (or pairs of columns) at a time, to a strip of
shared memory: a lane a line, and behind each line what becomes of a row of the result, its number
and its factor. Then all rows of the strip are stored, a row after the other, a lane a column.

Compile-time constants: see ``sm100_layout`` and ``products``.
"""

from __future__ import annotations

import numpy as np

from ..ptx.arith import i64_of_u32, mul_rn, u32_of_i64
from ..ptx.bits import float_as_uint, uint_as_float
from ..ptx.cluster import map_shared, mbarrier_arrive_cluster
from ..ptx.mbarrier import mbarrier_arrive, mbarrier_wait_parity
from ..ptx.memory import ld_shared_f32, ld_shared_v4_u32, st_shared_v4_u32
from ..ptx.tcgen05 import (
    st_shared_row,
    tcgen05_fence_after_thread_sync,
    tcgen05_fence_before_thread_sync,
    tcgen05_ld,
    tcgen05_wait_ld,
)
from ..ptx.warp import elect, syncwarp
from .elements import store_one
from .groups import row_of_none, source_row
from .products import decode_of_b, epilogue, factor_of_row, pair_epilogue, result_columns
from .sm100_layout import (
    columns_of_tile,
    first_work,
    made_base,
    next_accumulators,
    strip_pitch,
    strip_words,
    strips_base,
    tile_of,
    work_step,
)

PAIR = "none"
PAIR_OF_BLOCKS = False
TILE_N = 128
MMA_N = 128
SWAP = False
GROUPED = False

ZERO = np.float32(0.0)
WARP = 0xFFFFFFFF
#: What becomes of a row of a tile.
NOTHING, VALUES, ZEROS = 0, 1, 2


def row_fate(local, facts, input_rows, rows, row_indices):
    """What becomes of a row of a tile: (fate, row of the result, row of A)."""
    _, expert, first, count, a_tile, owner, head, tail = facts
    row = first + local
    fate = NOTHING
    if GROUPED:
        if local < count:
            if owner < 0:
                row = row_of_none(row, head, tail)
            if row < rows:
                fate = ZEROS
                reads = a_tile >= 0 and source_row(row_indices, row, input_rows) >= 0
                if expert >= 0 and reads:
                    fate = VALUES
    elif local < count:
        fate = VALUES
    return fate, row


def store_element(out, at, v, w, factor, factors_of_b, row, column, expert, e0, e1, e2, e3):
    """One element of the result, of a sum or a pair of sums."""
    db0, db1 = factors_of_b
    v = mul_rn(v, mul_rn(factor, db0))
    if PAIR == "none":
        v = np.float32(epilogue(v, row, column, expert, e0, e1, e2, e3))
    else:
        w = mul_rn(w, mul_rn(factor, db1))
        v = np.float32(pair_epilogue(v, w, row, column, expert, e0, e1, e2, e3))
    store_one(out, at, v)


def store_strip(strip, lane, to, width, n, columns, expert, count):
    """Store 32 columns of `count` rows; this lane stores column `n` of the result."""
    out, b_decode, e0, e1, e2, e3 = to
    if n < width:
        dbs = factors_of_columns(b_decode, n, width, columns, expert)
        for r in range(count):
            line = strip + r * strip_pitch()
            words = ld_shared_v4_u32(line + 4 * strip_words())
            row = i64_of_u32(words[1])
            at = row * width + n
            if words[0] == VALUES:
                factor = uint_as_float(words[2])
                if PAIR == "none":
                    v = ld_shared_f32(line + 4 * lane)
                    w = ZERO
                elif PAIR == "halves":
                    v = ld_shared_f32(line + 4 * lane)
                    w = ld_shared_f32(line + 128 + 4 * lane)
                else:
                    v = ld_shared_f32(line + 8 * lane)
                    w = ld_shared_f32(line + 8 * lane + 4)
                store_element(out, at, v, w, factor, dbs, row, n, expert, e0, e1, e2, e3)
            elif words[0] == ZEROS:
                store_one(out, at, ZERO)


def take_strip(line, accumulators, chunk):
    """A warp's 32 lanes of 32 columns, or of 32 pairs of columns, to its strip, a lane a line."""
    if PAIR == "none":
        acc = tcgen05_wait_ld(tcgen05_ld(accumulators + 32 * chunk, 32))
        st_shared_row(line, acc)
    elif PAIR == "halves":
        acc = tcgen05_wait_ld(tcgen05_ld(accumulators + 32 * chunk, 32))
        st_shared_row(line, acc)
        acc = tcgen05_wait_ld(tcgen05_ld(accumulators + MMA_N + 32 * chunk, 32))
        st_shared_row(line + 128, acc)
    else:
        acc = tcgen05_wait_ld(tcgen05_ld(accumulators + 64 * chunk, 32))
        st_shared_row(line, acc)
        acc = tcgen05_wait_ld(tcgen05_ld(accumulators + 64 * chunk + 32, 32))
        st_shared_row(line + 128, acc)


def factors_of_columns(b_decode, n, width, columns, expert):
    """The decode scales of B of a column of the result, or of its pair of columns."""
    if expert < 0 or n >= width:
        return ZERO, ZERO
    elif PAIR == "none":
        return decode_of_b(b_decode, expert, n, columns), ZERO
    elif PAIR == "halves":
        return (
            decode_of_b(b_decode, expert, n, columns),
            decode_of_b(b_decode, expert, n + width, columns),
        )
    else:
        return (
            decode_of_b(b_decode, expert, 2 * n, columns),
            decode_of_b(b_decode, expert, 2 * n + 1, columns),
        )


def note_row(line, local, of_rows, factors, row_indices, shape):
    """Put what becomes of a row behind a line of the strip: fate, row, factor."""
    input_rows, rows = shape
    alpha, alpha_number, a_decode = factors
    fate, row = row_fate(local, of_rows, input_rows, rows, row_indices)
    factor = ZERO
    if fate == VALUES:
        factor = factor_of_row(alpha, alpha_number, a_decode, of_rows[1], row, of_rows[5])
    words = (u32_of_i64(fate), u32_of_i64(row), float_as_uint(factor))
    st_shared_v4_u32(line + 4 * strip_words(), words[0], words[1], words[2], 0)


def taken(made):
    """A warp has read its lanes of the accumulators."""
    tcgen05_fence_before_thread_sync()
    syncwarp(WARP)
    if elect(WARP):
        if PAIR_OF_BLOCKS:
            mbarrier_arrive_cluster(map_shared(made + 16, 0))
        else:
            mbarrier_arrive(made + 16)


def finish_tile(base, memory, made, parity, warp, lane, tile, to, factors, row_indices, shape):
    """Results of a tile: rows are lanes of the accumulators."""
    of_rows, column, _, columns = tile
    live = of_rows[0]
    width = result_columns(columns)
    wide = columns_of_tile() // 2 if PAIR == "interleaved" else columns_of_tile()
    first = column // 2 if PAIR == "interleaved" else column
    chunks = (min(width - first, wide) + 31) // 32
    # Rows of this warp; with none it only says that it has read its lanes.
    count = min(of_rows[3] - 32 * warp, 32)
    strip = strips_base(base) + warp * 32 * strip_pitch()
    line = strip + lane * strip_pitch()
    note_row(line, warp * 32 + lane, of_rows, factors, row_indices, shape)
    if live:
        mbarrier_wait_parity(made, parity)
        tcgen05_fence_after_thread_sync()
    if count > 0:
        for chunk in range(chunks):
            if live:
                take_strip(line, memory, chunk)
                if chunk == chunks - 1:
                    taken(made)
            syncwarp(WARP)
            n = first + 32 * chunk + lane
            store_strip(strip, lane, to, width, n, columns, of_rows[1], count)
            syncwarp(WARP)
    elif live:
        taken(made)


def finish_swapped(base, memory, made, parity, warp, lane, tile, to, factors, row_indices, shape):
    """Results of a tile: columns are lanes of the accumulators."""
    of_rows, column, part, columns = tile
    live = of_rows[0]
    out, b_decode, e0, e1, e2, e3 = to
    n = column + warp * 32 + lane
    dbs = factors_of_columns(b_decode, n, columns, columns, of_rows[1])
    chunks = (min(of_rows[3] - part, TILE_N) + 31) // 32
    strip = strips_base(base) + warp * 32 * strip_pitch()
    line = strip + lane * strip_pitch()
    if live:
        mbarrier_wait_parity(made, parity)
        tcgen05_fence_after_thread_sync()
    for chunk in range(chunks):
        note_row(line, part + 32 * chunk + lane, of_rows, factors, row_indices, shape)
        if live:
            take_strip(line, memory, chunk)
            if chunk == chunks - 1:
                taken(made)
        syncwarp(WARP)
        if n < columns:
            for r in range(min(of_rows[3] - part - 32 * chunk, 32)):
                words = ld_shared_v4_u32(strip + r * strip_pitch() + 4 * strip_words())
                row = i64_of_u32(words[1])
                at = row * columns + n
                if words[0] == VALUES:
                    v = ld_shared_f32(line + 4 * r)
                    factor = uint_as_float(words[2])
                    store_element(out, at, v, ZERO, factor, dbs, row, n, of_rows[1], e0, e1, e2, e3)
                elif words[0] == ZEROS:
                    store_one(out, at, ZERO)
        syncwarp(WARP)


def finish(base, memory, warp, lane, to, factors, of_groups, row_indices, shape, columns, total):
    """What the warps that store do."""
    mine = memory + (warp << 21)
    acc = 0
    parity = 0
    work = first_work()
    while work < total:
        of_rows, column, part = tile_of(work, of_groups, shape[1], columns)
        tile = (of_rows, column, part, columns)
        made = made_base(base) + 8 * acc
        at = mine + acc * TILE_N
        if SWAP:
            finish_swapped(
                base, at, made, parity, warp, lane, tile, to, factors, row_indices, shape
            )
        else:
            finish_tile(base, at, made, parity, warp, lane, tile, to, factors, row_indices, shape)
        if of_rows[0]:
            acc, parity = next_accumulators(acc, parity)
        work += work_step()
