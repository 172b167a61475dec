"""Which rows are multiplied together: chunks of the ranges of rows, found on the device.

Every block makes a table in shared memory when it begins, of 16 bytes for each range: its first
row, the number of its first chunk, the number of its first tile of 128 rows; and one entry behind
the last range, which closes all three. Afterwards a warp finds
the range of a chunk with two looks.
Offsets count as ``groups`` says: clamped, and never below the one before. Where there are counts
instead, an entry's fourth word is the range's, since the next one does not begin where it ends.

A range of n rows has ceil(n / CHUNK) chunks of the same size, a multiple of 8 rows, the last of
which may be smaller.

A kernel may make the table AHEAD, before the kernels that it waits for have ended, if it asks
:func:`has_changed` when they have. Offsets are then read past the first level cache, which would
keep what was there before.

Constraint: rows below 2^31. Compile-time constants: OFFSETS; CHUNK, rows; THREADS,
of a block; AHEAD.
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..ptx.arith import (
    add_u32,
    and_u32,
    div_u32,
    eq_u32,
    i64_of_i32,
    i64_of_u32,
    le_u32,
    lt_u32,
    max_u32,
    min_u32,
    mul_u32,
    popc,
    select_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.memory import ld_relaxed_u32, ld_shared_u32, st_shared_u32
from ..ptx.warp import ballot, shfl_up_u32, syncwarp
from .grouped_pieces import sum_of_lanes_up_to
from .groups import counted, load_count, load_index

OFFSETS = "int32"
CHUNK = 8
THREADS = 256
AHEAD = False

WARP = 0xFFFFFFFF
ENTRY = 16


def table_bytes(groups):
    """Bytes of the table."""
    return (groups + 1) * ENTRY


def chunks_of(count):
    """Chunks of a range of so many rows."""
    return div_u32(add_u32(count, CHUNK - 1), CHUNK)


def largest_of_lanes_up_to(value, lane):
    """Inclusive maximum over the lanes of a full warp."""
    value = max_u32(value, select_u32(lt_u32(lane, 1), 0, shfl_up_u32(WARP, value, 1)))
    value = max_u32(value, select_u32(lt_u32(lane, 2), 0, shfl_up_u32(WARP, value, 2)))
    value = max_u32(value, select_u32(lt_u32(lane, 4), 0, shfl_up_u32(WARP, value, 4)))
    value = max_u32(value, select_u32(lt_u32(lane, 8), 0, shfl_up_u32(WARP, value, 8)))
    return max_u32(value, select_u32(lt_u32(lane, 16), 0, shfl_up_u32(WARP, value, 16)))


def make_table(row_offsets, groups, rows, table, scratch, thread):
    """Make the table at shared address `table`; all threads of the block come here.

    `scratch` is room for two words a warp.
    """
    if counted():
        make_table_of_counts(row_offsets, groups, rows, table, thread)
    else:
        ends = ends_of_thread(row_offsets, groups, thread)
        make_table_of_ranges(row_offsets, groups, rows, table, scratch, thread, ends)


def load_offset(row_offsets, i):
    """An offset, 64 bits wide."""
    if not AHEAD:
        return load_index(row_offsets, i, OFFSETS)
    elif OFFSETS == "int32":
        return i64_of_i32(ld_relaxed_u32(row_offsets, i * 4))
    elif OFFSETS == "uint32":
        return i64_of_u32(ld_relaxed_u32(row_offsets, i * 4))
    else:
        low = i64_of_u32(ld_relaxed_u32(row_offsets, i * 8))
        return low + (i64_of_i32(ld_relaxed_u32(row_offsets, i * 8 + 4)) << 32)


def ends_of_thread(row_offsets, groups, thread):
    """Where the range of a thread's number begins and ends; 0 where there is none."""
    start = groups - groups
    stop = start
    if groups <= THREADS and i64_of_u32(thread) < groups:
        start = load_offset(row_offsets, i64_of_u32(thread))
        stop = load_offset(row_offsets, i64_of_u32(thread) + 1)
    return start, stop


def has_changed(row_offsets, groups, rows, thread, ends):
    """Whether a table that was made of `ends` may be another one; all threads of the block ask."""
    start, stop = ends_of_thread(row_offsets, groups, thread)
    same = groups <= THREADS and start == ends[0] and stop == ends[1]
    # Of wrong offsets others than these were read.
    same = same and start >= 0 and start <= stop and stop <= rows
    return cuda.syncthreads_or(np.int32(not same)) != 0


def make_table_of_counts(row_counts, groups, rows, table, thread):
    """:func:`make_table` with counts."""
    capacity = rows // max(groups, 1)
    tiles = (capacity + 127) >> 7
    i = i64_of_u32(thread)
    while i <= groups:
        at = add_u32(table, u32_of_i64(i * ENTRY))
        count = capacity - capacity
        if i < groups:
            count = load_count(row_counts, i, capacity)
        put_entry(at, u32_of_i64(i * capacity), u32_of_i64(0), u32_of_i64(i * tiles))
        st_shared_u32(add_u32(at, 12), u32_of_i64(count))
        i += THREADS
    cuda.syncthreads()
    if lt_u32(thread, 32):
        number_chunks(u32_of_i64(groups), table, thread)
    cuda.syncthreads()


def number_chunks(groups, table, lane):
    """Put the number of its first chunk into each entry; one warp, each lane a run of ranges."""
    per = div_u32(add_u32(groups, 31), 32)
    first = min_u32(mul_u32(lane, per), groups)
    last = min_u32(add_u32(first, per), groups)
    mine = sub_u32(first, first)
    i = first
    while lt_u32(i, last):
        mine = add_u32(mine, chunks_of(ld_shared_u32(add_u32(table, add_u32(shl_u32(i, 4), 12)))))
        i = add_u32(i, 1)
    upto = sum_of_lanes_up_to(mine, lane)
    chunk = sub_u32(upto, mine)
    i = first
    while lt_u32(i, last):
        at = add_u32(table, shl_u32(i, 4))
        st_shared_u32(add_u32(at, 4), chunk)
        chunk = add_u32(chunk, chunks_of(ld_shared_u32(add_u32(at, 12))))
        i = add_u32(i, 1)
    if le_u32(31, lane):
        st_shared_u32(add_u32(table, add_u32(shl_u32(groups, 4), 4)), upto)


def length_of_range(entry, start):
    """Rows of the range of an entry, whose first is `start`."""
    if counted():
        return ld_shared_u32(add_u32(entry, 12))
    else:
        return sub_u32(ld_shared_u32(add_u32(entry, ENTRY)), start)


def make_table_of_ranges(row_offsets, groups, rows, table, scratch, thread, ends):
    """:func:`make_table` with offsets; `ends` are those of :func:`ends_of_thread`."""
    wrong = True
    if groups <= THREADS:
        # A range for each thread; where offsets are as they should be, that is all.
        lane = and_u32(thread, 31)
        all_groups = u32_of_i64(groups)
        low = sub_u32(thread, thread)
        high = low
        wrong = False
        inside = lt_u32(thread, all_groups)
        if inside:
            start, stop = ends
            wrong = start < 0 or start > stop or stop > rows
            low = u32_of_i64(start)
            high = u32_of_i64(stop)
        count = sub_u32(high, low)
        chunks = sum_of_lanes_up_to(chunks_of(count), lane)
        tiles = sum_of_lanes_up_to(tiles_of(count), lane)
        mine = add_u32(scratch, shl_u32(shr_u32(thread, 5), 3))
        if le_u32(31, lane):
            st_shared_u32(mine, chunks)
            st_shared_u32(add_u32(mine, 4), tiles)
        wrong = cuda.syncthreads_or(np.int32(wrong)) != 0
        if not wrong:
            before = scratch
            chunk = sub_u32(chunks, chunks_of(count))
            tile = sub_u32(tiles, tiles_of(count))
            while lt_u32(before, mine):
                chunk = add_u32(chunk, ld_shared_u32(before))
                tile = add_u32(tile, ld_shared_u32(add_u32(before, 4)))
                before = add_u32(before, 8)
            at = add_u32(table, shl_u32(thread, 4))
            if inside:
                put_entry(at, low, chunk, tile)
            if le_u32(all_groups, add_u32(thread, 1)) and (inside or groups == 0):
                last = add_u32(at, ENTRY)
                if groups == 0:
                    last = at
                    high = u32_of_i64(rows)
                if inside or eq_u32(thread, 0):
                    chunk = add_u32(chunk, chunks_of(count))
                    put_entry(last, high, chunk, add_u32(tile, tiles_of(count)))
    if wrong:
        i = i64_of_u32(thread)
        while i <= groups:
            offset = min(max(load_offset(row_offsets, i), 0), rows)
            st_shared_u32(add_u32(table, u32_of_i64(i * ENTRY)), u32_of_i64(offset))
            i += THREADS
        cuda.syncthreads()
        if lt_u32(thread, 32):
            fill_table(u32_of_i64(groups), table, thread)
    cuda.syncthreads()


def put_entry(at, row, chunk, tile):
    """Write an entry."""
    st_shared_u32(at, row)
    st_shared_u32(add_u32(at, 4), chunk)
    st_shared_u32(add_u32(at, 8), tile)


def tiles_of(count):
    """Tiles of 128 rows of a range of so many."""
    return shr_u32(add_u32(count, 127), 7)


def fill_table(groups, table, lane):
    """What one warp does: each lane a run of ranges."""
    per = div_u32(add_u32(groups, 31), 32)
    first = min_u32(mul_u32(lane, per), groups)
    last = min_u32(add_u32(first, per), groups)
    # The largest offset of the run, that of its first range's start included; then of all before.
    top = ld_shared_u32(add_u32(table, shl_u32(first, 4)))
    i = first
    while lt_u32(i, last):
        i = add_u32(i, 1)
        top = max_u32(top, ld_shared_u32(add_u32(table, shl_u32(i, 4))))
    upto = largest_of_lanes_up_to(top, lane)
    low = ld_shared_u32(add_u32(table, shl_u32(first, 4)))
    below = shfl_up_u32(WARP, upto, 1)
    low = max_u32(low, select_u32(lt_u32(lane, 1), 0, below))
    start = low
    chunks = sub_u32(first, first)
    tiles = chunks
    i = first
    while lt_u32(i, last):
        i = add_u32(i, 1)
        high = max_u32(low, ld_shared_u32(add_u32(table, shl_u32(i, 4))))
        chunks = add_u32(chunks, chunks_of(sub_u32(high, low)))
        tiles = add_u32(tiles, tiles_of(sub_u32(high, low)))
        low = high
    all_chunks = sum_of_lanes_up_to(chunks, lane)
    all_tiles = sum_of_lanes_up_to(tiles, lane)
    chunk = sub_u32(all_chunks, chunks)
    tile = sub_u32(all_tiles, tiles)
    stop = low
    # The first offset of a lane is the last of the lane before: all have read, now all write.
    syncwarp(WARP)
    low = start
    i = first
    while lt_u32(i, last):
        at = add_u32(table, shl_u32(i, 4))
        i = add_u32(i, 1)
        high = stop
        if lt_u32(i, last):
            high = max_u32(low, ld_shared_u32(add_u32(at, ENTRY)))
        put_entry(at, low, chunk, tile)
        chunk = add_u32(chunk, chunks_of(sub_u32(high, low)))
        tile = add_u32(tile, tiles_of(sub_u32(high, low)))
        low = high
    if le_u32(31, lane):
        at = add_u32(table, shl_u32(groups, 4))
        put_entry(at, stop, all_chunks, all_tiles)


def chunk_count(groups, table):
    """All chunks."""
    return ld_shared_u32(add_u32(table, add_u32(shl_u32(groups, 4), 4)))


def range_of_chunk(groups, table, chunk, lane):
    """The range that a chunk, below :func:`chunk_count`, belongs to; all lanes of a warp ask.

    Each lane looks at the first of a run of ranges, then at one of the run that it must be.
    """
    per = shr_u32(add_u32(groups, 31), 5)
    low = sub_u32(groups, groups)
    while lt_u32(1, per):
        found = last_not_above(groups, table, chunk, add_u32(low, mul_u32(lane, per)))
        low = add_u32(low, mul_u32(found, per))
        per = shr_u32(add_u32(per, 31), 5)
    return add_u32(low, last_not_above(groups, table, chunk, add_u32(low, lane)))


def last_not_above(groups, table, chunk, range_of_lane):
    """The last lane whose range does not begin behind a chunk."""
    first = ld_shared_u32(add_u32(table, add_u32(shl_u32(min_u32(range_of_lane, groups), 4), 4)))
    below = lt_u32(range_of_lane, groups) & le_u32(first, chunk)
    return sub_u32(popc(ballot(WARP, below)), 1)


def rows_of_chunk(count, chunks, chunk):
    """First row, from the range's, and rows of one of the chunks of a range of `count` rows."""
    size = count
    if lt_u32(1, chunks):
        size = div_u32(add_u32(count, sub_u32(chunks, 1)), chunks)
    size = shl_u32(shr_u32(add_u32(size, 7), 3), 3)
    first = min_u32(mul_u32(chunk, size), count)
    return first, min_u32(size, sub_u32(count, first))
