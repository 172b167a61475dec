"""Rows of A for ``matmul_sm90``, by way of registers: loads of 16 bytes, stores of matrices.

A copy of four bytes for each of a lane's pairs takes six turns of the load unit for a warp's 128
bytes. Here a lane loads 16 bytes of a row, which are four neighbouring pairs of the weights' K
order (D13), and ``stmatrix`` puts each where it belongs: four rows of 128 bytes take four turns to
load and four to store, and no two lanes meet in a bank.

Two teams of four warps have every second step each, so that loads of two steps are under way; a
warp has every fourth block of four rows. The first warp of a team asks for the step's weights too.

Compile-time constants: CHUNK, rows of A of a tile, a multiple of 8, 128 at most; STAGES; WHOLE,
whether the depth is a multiple of 64.
"""

from __future__ import annotations

from ..ptx.arith import (
    add_u32,
    and_u32,
    eq_u32,
    ge_u32,
    i64_of_u32,
    lt_u32,
    mul_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
    xor_u32,
)
from ..ptx.mbarrier import fence_proxy_async_shared, mbarrier_arrive, mbarrier_wait_parity
from ..ptx.memory import ld_address_v4_u32, ptr_address
from ..ptx.mma import stmatrix_x4
from ..ptx.warp import elect, shfl_idx_u32, syncwarp
from .prepared_items import locate, row_to_copy
from .sm90_weights import ask_for_weights, ready

CHUNK = 128
STAGES = 5
WHOLE = True

WARP = 0xFFFFFFFF
HINT = "L1::no_allocate"


def row_of_lane(a_rows, here, inner, lane):
    """The row of A of an item that a lane has of its warp's 32.

    A warp loads four rows at a time, of every 16 rows of the tile; lanes 4i to 4i + 3 have those of
    its load i.
    """
    mine = add_u32(shl_u32(inner, 2), and_u32(lane, 3))
    return row_to_copy(a_rows, here, add_u32(mine, shl_u32(shr_u32(lane, 2), 4)))


def load_row(address, row, row_bytes, column, depth):
    """Eight neighbours of a row; zeros behind the depth."""
    if WHOLE:
        return ld_address_v4_u32(address + i64_of_u32(row) * row_bytes + column * 2, HINT)
    else:
        none = u32_of_i64(0)
        words = (none, none, none, none)
        if column < depth:
            words = ld_address_v4_u32(address + i64_of_u32(row) * row_bytes + column * 2, HINT)
        return words


def load_rows(address, row, row_bytes, sub, column, depth):
    """Of each of a lane's rows, eight neighbours."""
    w0 = load_row(address, shfl_idx_u32(WARP, row, sub), row_bytes, column, depth)
    w1, w2, w3, w4, w5, w6, w7 = w0, w0, w0, w0, w0, w0, w0
    if CHUNK > 16:
        from_row = shfl_idx_u32(WARP, row, add_u32(sub, 4))
        w1 = load_row(address, from_row, row_bytes, column, depth)
    if CHUNK > 32:
        from_row = shfl_idx_u32(WARP, row, add_u32(sub, 8))
        w2 = load_row(address, from_row, row_bytes, column, depth)
    if CHUNK > 48:
        from_row = shfl_idx_u32(WARP, row, add_u32(sub, 12))
        w3 = load_row(address, from_row, row_bytes, column, depth)
    if CHUNK > 64:
        from_row = shfl_idx_u32(WARP, row, add_u32(sub, 16))
        w4 = load_row(address, from_row, row_bytes, column, depth)
    if CHUNK > 80:
        from_row = shfl_idx_u32(WARP, row, add_u32(sub, 20))
        w5 = load_row(address, from_row, row_bytes, column, depth)
    if CHUNK > 96:
        from_row = shfl_idx_u32(WARP, row, add_u32(sub, 24))
        w6 = load_row(address, from_row, row_bytes, column, depth)
    if CHUNK > 112:
        from_row = shfl_idx_u32(WARP, row, add_u32(sub, 28))
        w7 = load_row(address, from_row, row_bytes, column, depth)
    return w0, w1, w2, w3, w4, w5, w6, w7


def store_row(stage, place, piece, words, mine):
    """Store eight neighbours of a lane's row of this number, if the tile has the row.

    Four lanes have 32 neighbours of a row, and the first word of each belongs into 16 bytes, so
    do the second ones: rows of four matrices of eight rows.
    """
    if CHUNK >= 16 * piece + 16 or lt_u32(mine, 2):
        at = add_u32(add_u32(stage, 2048 * piece), place)
        stmatrix_x4(at, words[0], words[1], words[2], words[3])


def store_rows(stage, place, words, mine):
    """Store what :func:`load_rows` has loaded."""
    store_row(stage, place, 0, words[0], mine)
    if CHUNK > 16:
        store_row(stage, place, 1, words[1], mine)
    if CHUNK > 32:
        store_row(stage, place, 2, words[2], mine)
    if CHUNK > 48:
        store_row(stage, place, 3, words[3], mine)
    if CHUNK > 64:
        store_row(stage, place, 4, words[4], mine)
    if CHUNK > 80:
        store_row(stage, place, 5, words[5], mine)
    if CHUNK > 96:
        store_row(stage, place, 6, words[6], mine)
    if CHUNK > 112:
        store_row(stage, place, 7, words[7], mine)


def bring_rows(
    maps, a, a_rows, ranges, item, items, beyond, across, row_bytes, depth, steps, ring, full,
    empty, row_blocks, mine, lane,
):  # fmt: skip
    """What a producer warp does; `full` is told once by each warp of a team, and of the weights."""
    address = ptr_address(a, 0)
    team = shr_u32(mine, 2)
    inner = and_u32(mine, 3)
    t = and_u32(lane, 3)
    half = and_u32(shr_u32(lane, 2), 1)
    sub = shr_u32(lane, 3)
    # A lane says where a row of a matrix goes: of word w, row g / 2 of four, half g % 2.
    w = shr_u32(lane, 3)
    row_to = add_u32(shl_u32(inner, 2), and_u32(shr_u32(lane, 1), 3))
    to = add_u32(shl_u32(and_u32(lane, 1), 2), w)
    place = add_u32(shl_u32(row_to, 7), shl_u32(xor_u32(to, and_u32(row_to, 7)), 4))
    start = i64_of_u32(add_u32(shl_u32(half, 5), shl_u32(t, 3)))
    asks = elect(WARP) and eq_u32(inner, 0)
    if asks:
        ready(maps)
    stage = team
    parity = add_u32(sub_u32(mine, mine), 1)
    step = team
    while ge_u32(step, steps):
        step = sub_u32(step, steps)
        item = add_u32(item, beyond)
    if lt_u32(item, items):
        here = locate(item, across, ranges, lane)
        expert, block = here[0], here[4]
        row = row_of_lane(a_rows, here, inner, lane)
        column = start + i64_of_u32(shl_u32(step, 6))
        words = load_rows(address, row, row_bytes, sub, column, depth)
        while lt_u32(item, items):
            mbarrier_wait_parity(add_u32(empty, shl_u32(stage, 3)), parity)
            if asks:
                ask_for_weights(maps, expert, block, row_blocks, step, ring, stage, full)
            store_rows(add_u32(ring, mul_u32(stage, CHUNK * 128)), place, words, inner)
            fence_proxy_async_shared()
            syncwarp(WARP)
            if eq_u32(lane, 0):
                mbarrier_arrive(add_u32(full, shl_u32(stage, 3)))
            stage = add_u32(stage, 2)
            if ge_u32(stage, STAGES):
                stage = sub_u32(stage, STAGES)
                parity = xor_u32(parity, 1)
            step = add_u32(step, 2)
            if ge_u32(step, steps):
                while ge_u32(step, steps):
                    step = sub_u32(step, steps)
                    item = add_u32(item, beyond)
                if lt_u32(item, items):
                    here = locate(item, across, ranges, lane)
                    expert, block = here[0], here[4]
                    row = row_of_lane(a_rows, here, inner, lane)
            # Behind the last item too, for nothing: an `if` around loads costs moves.
            column = start + i64_of_u32(shl_u32(step, 6))
            words = load_rows(address, row, row_bytes, sub, column, depth)
