"""Rows of A for ``matmul_sm90``: copies of 16 bytes to shared memory, gathered or not.

Rows of bfloat16 lie there as they are, with a swizzle of 128 bytes, which is what the products of
weights that ``ldmatrix`` hands out expect. Two warps copy, blocks of four rows in turn, eight lanes
a row. A third asks for weights, and a fourth tells consumers of steps whose rows have come: a fence
for the engines may wait for all copies that its thread has under way, so a warp has it that has
none. Rows of float16 are told to the warps that split them (``sm90_half_rows``).

No tensor map of A: activations lie elsewhere in every call, and maps are made once for an address
and kept.

Compile-time constants: CHUNK, rows of A of a tile, a multiple of 8, 192 at most; STAGES; STEPS of a
stage, 1 or 2; WHOLE, whether the depth is a multiple of 64 * STEPS.
"""

from __future__ import annotations

from ..ptx.arith import (
    add_u32,
    and_u32,
    i64_of_u32,
    lt_u32,
    mul_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
    xor_u32,
)
from ..ptx.bulk import cp_async_16, cp_async_arrive
from ..ptx.mbarrier import mbarrier_wait_parity
from ..ptx.memory import ptr_address
from ..ptx.warp import shfl_idx_u32
from .prepared_items import locate, row_to_copy
from .rings import next_stage
from .sm90_weights import rows_stage, rows_step

CHUNK = 128
STEPS = 1
WHOLE = True

WARP = 0xFFFFFFFF
COPYING_WARPS = 2
ROW_BYTES = 128


def row_of_lane(a_rows, here, mine, lane, part):
    """The row of A of an item that a lane has of its warp's 32 of these 64 of the tile.

    A warp copies four rows at a time, of every eight; lanes 4i to 4i + 3 have those of copy i.
    """
    number = add_u32(shl_u32(mine, 2), and_u32(lane, 3))
    number = add_u32(number, add_u32(shl_u32(shr_u32(lane, 2), 3), 64 * part))
    return row_to_copy(a_rows, here, number)


def copy_part(place, address, row, row_bytes, sub, size, size1, part: str):
    """Copy what a lane has of 64 rows, those that the tile has."""
    for i in range(min(8, CHUNK // 8 - 8 * part)):  # type: ignore[operator]
        source = shfl_idx_u32(WARP, row, add_u32(sub, 4 * i))
        at = address + i64_of_u32(source) * row_bytes
        under = (64 * part + 8 * i) * ROW_BYTES  # type: ignore[operator]
        cp_async_16(add_u32(place, under), at, size)
        if STEPS == 2:
            cp_async_16(add_u32(place, under + rows_step()), at + next_step(size1), size1)


def next_step(size):
    """Bytes from a lane's columns of a step to those of the next; none, where there are none."""
    if WHOLE:
        return 128
    else:
        return i64_of_u32(shl_u32(size, 3))


def copy_rows(
    a, a_rows, ranges, item, items, beyond, across, row_bytes, depth, steps, first_step, ring,
    brought, empty, mine, lane,
):  # fmt: skip
    """What a copying warp does, for `steps` steps from `first_step` on, the first of a stage."""
    address = ptr_address(a, 0)
    chunk = and_u32(lane, 7)
    sub = shr_u32(lane, 3)
    first = add_u32(shl_u32(mine, 2), sub)  # its first row, and the swizzle of all of them
    place = add_u32(shl_u32(first, 7), shl_u32(xor_u32(chunk, first), 4))
    place = add_u32(ring, place)
    stage = sub_u32(mine, mine)
    parity = add_u32(stage, 1)
    while lt_u32(item, items):
        here = locate(item, across, ranges, lane)
        row0 = row_of_lane(a_rows, here, mine, lane, 0)
        row1, row2 = row0, row0
        if CHUNK > 64:
            row1 = row_of_lane(a_rows, here, mine, lane, 1)
        if CHUNK > 128:
            row2 = row_of_lane(a_rows, here, mine, lane, 2)
        step = sub_u32(stage, stage)
        while lt_u32(step, steps):
            column = shl_u32(add_u32(first_step, step), 6)
            column = i64_of_u32(add_u32(column, shl_u32(chunk, 3)))
            size = u32_of_i64(16)
            size1 = size
            if not WHOLE:
                if STEPS == 2:
                    if column + 64 >= depth:
                        size1 = u32_of_i64(0)
                if column >= depth:
                    column = 0
                    size = u32_of_i64(0)
            at = address + column * 2
            to = add_u32(place, mul_u32(stage, rows_stage()))
            mbarrier_wait_parity(add_u32(empty, shl_u32(stage, 3)), parity)
            copy_part(to, at, row0, row_bytes, sub, size, size1, 0)
            if CHUNK > 64:
                copy_part(to, at, row1, row_bytes, sub, size, size1, 1)
            if CHUNK > 128:
                copy_part(to, at, row2, row_bytes, sub, size, size1, 2)
            cp_async_arrive(add_u32(brought, shl_u32(stage, 3)))
            stage, parity = next_stage(stage, parity)
            step = add_u32(step, STEPS)
        item = add_u32(item, beyond)
