"""Rows of a quantised A for ``matmul_sm90``, made bfloat16 on the way to shared memory.

Each of four warps has every fourth step, all rows of it; two lanes share a row. A ring has as many
stages as there are such warps at least: with fewer a warp would be two turns of it ahead, which the
parities of mbarriers do not tell from none.

Compile-time constants: CHUNK, STAGES, WHOLE; A_SCALE and others of ``activations``.
"""

from __future__ import annotations

from ..ptx.arith import (
    add_u32,
    and_u32,
    ge_u32,
    i64_of_u32,
    lt_u32,
    mul_u32,
    rem_u32,
    select_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
    xor_u32,
)
from ..ptx.mbarrier import mbarrier_arrive, mbarrier_wait_parity
from ..ptx.memory import st_shared_v4_u32
from .activations import chunk
from .prepared_items import locate, row_of_item
from .sm90_weights import rows_stage

A_SCALE = "e8m0"
CHUNK = 64
STAGES = 5
WHOLE = True

PRODUCER_WARPS = 4


def half_row(a, a_scales, row, column, depth):
    """Half of a row's part of a step: 32 columns, in four pieces of eight."""
    at, scale_row = row
    none = u32_of_i64(0)
    zeros = (none, none, none, none)
    if WHOLE:
        p, one = chunk(a, a_scales, at, scale_row, column, depth)
        q, two = chunk(a, a_scales, at, scale_row, column + 8, depth)
        r, three = chunk(a, a_scales, at, scale_row, column + 16, depth)
        s, four = chunk(a, a_scales, at, scale_row, column + 24, depth)
    else:
        p, one = zeros, False
        q, two = zeros, False
        r, three = zeros, False
        s, four = zeros, False
        if column < depth:
            p, one = chunk(a, a_scales, at, scale_row, column, depth)
        if column + 8 < depth:
            q, two = chunk(a, a_scales, at, scale_row, column + 8, depth)
        if column + 16 < depth:
            r, three = chunk(a, a_scales, at, scale_row, column + 16, depth)
        if column + 24 < depth:
            s, four = chunk(a, a_scales, at, scale_row, column + 24, depth)
    return (p, q, r, s), one | two | three | four


def put_half_row(stage, row, half, words):
    """Store its four pieces, 16 bytes each, with the swizzle that products expect."""
    p, q, r, s = words
    base = add_u32(stage, shl_u32(row, 7))
    first = shl_u32(half, 2)
    turn = and_u32(row, 7)
    st_shared_v4_u32(add_u32(base, shl_u32(xor_u32(first, turn), 4)), p[0], p[1], p[2], p[3])
    second = add_u32(first, 1)
    st_shared_v4_u32(add_u32(base, shl_u32(xor_u32(second, turn), 4)), q[0], q[1], q[2], q[3])
    third = add_u32(first, 2)
    st_shared_v4_u32(add_u32(base, shl_u32(xor_u32(third, turn), 4)), r[0], r[1], r[2], r[3])
    fourth = add_u32(first, 3)
    st_shared_v4_u32(add_u32(base, shl_u32(xor_u32(fourth, turn), 4)), s[0], s[1], s[2], s[3])


def produce_two(a, a_scales, r0, r1, column, depth, stage, first, half, free, parity):
    """Bring up to 32 rows of a step, from row `first` of the tile on; 16 rows a warp's load."""
    w0, e0 = half_row(a, a_scales, r0, column, depth)
    w1, e1 = w0, e0
    if CHUNK > 16 and A_SCALE != "none":
        w1, e1 = half_row(a, a_scales, r1, column, depth)
    # The stage is waited for behind the loads, which take as long.
    mbarrier_wait_parity(free, parity)
    put_if(stage, first, half, w0)
    if CHUNK > 16:
        if A_SCALE == "none":  # one row after the other, for want of registers
            w1, _ = half_row(a, a_scales, r1, column, depth)
        put_if(stage, add_u32(first, 16), half, w1)
    return e0 | e1


def put_if(stage, row, half, words):
    """Store a row that the tile has."""
    if lt_u32(row, CHUNK):
        put_half_row(stage, row, half, words)


def make_rows(
    a, a_scales, a_rows, ranges, item, items, beyond, across, a_stride, depth, steps, ring,
    brought, empty, mine, lane,
):  # fmt: skip
    """What a producer warp does where A is quantised: all rows of every fourth step."""
    half = and_u32(lane, 1)
    in_tile = shr_u32(lane, 1)
    column0 = i64_of_u32(shl_u32(half, 5))
    stage = rem_u32(mine, STAGES)
    parity = select_u32(lt_u32(mine, STAGES), 1, 0)
    skip = mine
    extreme = False
    while lt_u32(item, items):
        here = locate(item, across, ranges, lane)
        _, _, first, count, _, tile_row = here
        r0 = row_of_item(a_rows, in_tile, count, first, tile_row, a_stride)
        r1 = row_of_item(a_rows, add_u32(in_tile, 16), count, first, tile_row, a_stride)
        r2 = row_of_item(a_rows, add_u32(in_tile, 32), count, first, tile_row, a_stride)
        r3 = row_of_item(a_rows, add_u32(in_tile, 48), count, first, tile_row, a_stride)
        r4, r5, r6, r7 = r0, r1, r2, r3
        if CHUNK > 64:
            r4 = row_of_item(a_rows, add_u32(in_tile, 64), count, first, tile_row, a_stride)
            r5 = row_of_item(a_rows, add_u32(in_tile, 80), count, first, tile_row, a_stride)
            r6 = row_of_item(a_rows, add_u32(in_tile, 96), count, first, tile_row, a_stride)
            r7 = row_of_item(a_rows, add_u32(in_tile, 112), count, first, tile_row, a_stride)
        step = skip
        while lt_u32(step, steps):
            at = add_u32(ring, mul_u32(stage, rows_stage()))
            free = add_u32(empty, shl_u32(stage, 3))
            column = i64_of_u32(shl_u32(step, 6)) + column0
            some = produce_two(a, a_scales, r0, r1, column, depth, at, in_tile, half, free, parity)
            extreme = extreme | some
            if CHUNK > 32:
                low = add_u32(in_tile, 32)
                some = produce_two(a, a_scales, r2, r3, column, depth, at, low, half, free, parity)
                extreme = extreme | some
            if CHUNK > 64:
                low = add_u32(in_tile, 64)
                some = produce_two(a, a_scales, r4, r5, column, depth, at, low, half, free, parity)
                extreme = extreme | some
            if CHUNK > 96:
                low = add_u32(in_tile, 96)
                some = produce_two(a, a_scales, r6, r7, column, depth, at, low, half, free, parity)
                extreme = extreme | some
            mbarrier_arrive(add_u32(brought, shl_u32(stage, 3)))
            stage = add_u32(stage, PRODUCER_WARPS)
            while ge_u32(stage, STAGES):
                stage = sub_u32(stage, STAGES)
                parity = xor_u32(parity, 1)
            step = add_u32(step, PRODUCER_WARPS)
        # Where in the next item this warp's first step is.
        skip = sub_u32(step, steps)
        item = add_u32(item, beyond)
    return extreme
