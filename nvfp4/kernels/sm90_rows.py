"""Rows of A for ``matmul_sm90``, by way of registers: loads of 16 bytes, stores of four.

A copy of four bytes for each of a lane's pairs takes six turns of the load unit for a warp's 128
bytes. Here a lane loads 16 bytes of a row, which are four neighbouring pairs of the weights' K
order (D13), and stores each where it belongs: four rows of 128 bytes take four turns to load and
four to store, and no two lanes meet in a bank.

Each of the four warps has every fourth block of four rows. What it loads for a step is under way
while it waits for the stage to be free, and while the step before is stored.

Compile-time constants: CHUNK, rows of A of a tile, a multiple of 8; STAGES; WHOLE, whether the
depth is a multiple of 64.
"""

from __future__ import annotations

from ..ptx.arith import (
    add_u32,
    and_u32,
    eq_u32,
    i64_of_u32,
    lt_u32,
    mul_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
    xor_u32,
)
from ..ptx.mbarrier import mbarrier_arrive, mbarrier_wait_parity
from ..ptx.memory import ld_address_v4_u32, ptr_address, st_shared_u32
from ..ptx.warp import syncwarp
from .prepared_items import locate, row_to_copy
from .rings import next_stage

CHUNK = 128
STAGES = 5
WHOLE = True

WARP = 0xFFFFFFFF
HINT = "L1::no_allocate"


def units_of_rows(a_rows, here, first, units):
    """Of a lane's rows in an item, where each begins, in units of 16 bytes."""
    u0 = mul_u32(row_to_copy(a_rows, here, first), units)
    u1, u2, u3, u4, u5, u6, u7, u8 = u0, u0, u0, u0, u0, u0, u0, u0
    if CHUNK > 16:
        u1 = mul_u32(row_to_copy(a_rows, here, add_u32(first, 16)), units)
    if CHUNK > 32:
        u2 = mul_u32(row_to_copy(a_rows, here, add_u32(first, 32)), units)
    if CHUNK > 48:
        u3 = mul_u32(row_to_copy(a_rows, here, add_u32(first, 48)), units)
    if CHUNK > 64:
        u4 = mul_u32(row_to_copy(a_rows, here, add_u32(first, 64)), units)
    if CHUNK > 80:
        u5 = mul_u32(row_to_copy(a_rows, here, add_u32(first, 80)), units)
    if CHUNK > 96:
        u6 = mul_u32(row_to_copy(a_rows, here, add_u32(first, 96)), units)
    if CHUNK > 112:
        u7 = mul_u32(row_to_copy(a_rows, here, add_u32(first, 112)), units)
    if CHUNK > 128:
        u8 = mul_u32(row_to_copy(a_rows, here, add_u32(first, 128)), units)
    return u0, u1, u2, u3, u4, u5, u6, u7, u8


def load_row(address, unit, column, depth):
    """Eight neighbours of a row; zeros behind the depth."""
    if WHOLE:
        return ld_address_v4_u32(address + (i64_of_u32(unit) << 4) + column * 2, HINT)
    else:
        none = u32_of_i64(0)
        words = (none, none, none, none)
        if column < depth:
            words = ld_address_v4_u32(address + (i64_of_u32(unit) << 4) + column * 2, HINT)
        return words


def load_rows(address, units, column, depth):
    """Of each of a lane's rows, eight neighbours."""
    w0 = load_row(address, units[0], column, depth)
    w1, w2, w3, w4, w5, w6, w7, w8 = w0, w0, w0, w0, w0, w0, w0, w0
    if CHUNK > 16:
        w1 = load_row(address, units[1], column, depth)
    if CHUNK > 32:
        w2 = load_row(address, units[2], column, depth)
    if CHUNK > 48:
        w3 = load_row(address, units[3], column, depth)
    if CHUNK > 64:
        w4 = load_row(address, units[4], column, depth)
    if CHUNK > 80:
        w5 = load_row(address, units[5], column, depth)
    if CHUNK > 96:
        w6 = load_row(address, units[6], column, depth)
    if CHUNK > 112:
        w7 = load_row(address, units[7], column, depth)
    if CHUNK > 128:
        w8 = load_row(address, units[8], column, depth)
    return w0, w1, w2, w3, w4, w5, w6, w7, w8


def store_row(stage, places, piece, words, mine):
    """Store eight neighbours of a lane's row of this number, if the tile has the row."""
    if CHUNK >= 16 * piece + 16 or lt_u32(mine, 2):
        at = add_u32(stage, 2048 * piece)
        st_shared_u32(add_u32(at, places[0]), words[0])
        st_shared_u32(add_u32(at, places[1]), words[1])
        st_shared_u32(add_u32(at, places[2]), words[2])
        st_shared_u32(add_u32(at, places[3]), words[3])


def store_rows(stage, places, words, mine):
    """Store what :func:`load_rows` has loaded."""
    store_row(stage, places, 0, words[0], mine)
    if CHUNK > 16:
        store_row(stage, places, 1, words[1], mine)
    if CHUNK > 32:
        store_row(stage, places, 2, words[2], mine)
    if CHUNK > 48:
        store_row(stage, places, 3, words[3], mine)
    if CHUNK > 64:
        store_row(stage, places, 4, words[4], mine)
    if CHUNK > 80:
        store_row(stage, places, 5, words[5], mine)
    if CHUNK > 96:
        store_row(stage, places, 6, words[6], mine)
    if CHUNK > 112:
        store_row(stage, places, 7, words[7], mine)
    if CHUNK > 128:
        store_row(stage, places, 8, words[8], mine)


def bring_rows(
    a,
    a_rows,
    ranges,
    item,
    items,
    beyond,
    across,
    a_stride,
    depth,
    steps,
    ring,
    brought,
    empty,
    mine,
    lane,
):
    """What a producer warp does; `brought` is told once by each warp, `a_stride` in elements."""
    address = ptr_address(a, 0)
    units = shr_u32(u32_of_i64(a_stride), 3)
    t = and_u32(lane, 3)
    half = and_u32(shr_u32(lane, 2), 1)
    first = add_u32(shl_u32(mine, 2), shr_u32(lane, 3))
    turn = and_u32(first, 7)
    under = add_u32(shl_u32(first, 7), shl_u32(t, 2))
    chunk = shl_u32(half, 2)
    places = (
        add_u32(under, shl_u32(xor_u32(chunk, turn), 4)),
        add_u32(under, shl_u32(xor_u32(add_u32(chunk, 1), turn), 4)),
        add_u32(under, shl_u32(xor_u32(add_u32(chunk, 2), turn), 4)),
        add_u32(under, shl_u32(xor_u32(add_u32(chunk, 3), turn), 4)),
    )
    start = i64_of_u32(add_u32(shl_u32(half, 5), shl_u32(t, 3)))
    stage = sub_u32(mine, mine)
    parity = add_u32(stage, 1)
    step = stage
    if lt_u32(item, items):
        rows = units_of_rows(a_rows, locate(item, across, ranges, lane), first, units)
        words = load_rows(address, rows, start, depth)
        while lt_u32(item, items):
            mbarrier_wait_parity(add_u32(empty, shl_u32(stage, 3)), parity)
            store_rows(add_u32(ring, mul_u32(stage, CHUNK * 128)), places, words, mine)
            syncwarp(WARP)
            if eq_u32(lane, 0):
                mbarrier_arrive(add_u32(brought, shl_u32(stage, 3)))
            stage, parity = next_stage(stage, parity)
            step = add_u32(step, 1)
            if eq_u32(step, steps):
                step = sub_u32(step, step)
                item = add_u32(item, beyond)
                if lt_u32(item, items):
                    rows = units_of_rows(a_rows, locate(item, across, ranges, lane), first, units)
            # Behind the last item too, for nothing: an `if` around loads costs moves.
            words = load_rows(address, rows, start + i64_of_u32(shl_u32(step, 6)), depth)
