"""Rows of e4m3 for ``matmul_sm90``, put into the weights' order on their way through registers.

Two teams of four warps have every second step each, so that loads of two steps are under way; a
warp has every fourth block of eight rows, a lane 16 bytes of one. The first warp of a team asks for
the step's weights too.

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
from ..ptx.memory import ld_address_v4_u32, ptr_address, st_shared_v4_u32
from ..ptx.warp import elect, shfl_idx_u32, syncwarp
from .fp8_operands import in_order_of_bytes
from .prepared_items import locate, row_to_copy
from .sm90_weights import ask_for_weights, ready, rows_stage

CHUNK = 128
STAGES = 5
WHOLE = True

WARP = 0xFFFFFFFF
ROW_BYTES = 64
HINT = "L1::no_allocate"


def row_of_lane(a_rows, here, inner, lane):
    """The row of A of an item that a lane has of its warp's 32: eight of every 32 of the tile."""
    number = add_u32(shl_u32(inner, 3), and_u32(lane, 7))
    return row_to_copy(a_rows, here, add_u32(number, shl_u32(shr_u32(lane, 3), 5)))


def load_row(address, row, row_bytes, at, width):
    """Sixteen bytes of a row, from byte `at` of its `width`; zeros behind it."""
    if WHOLE:
        return ld_address_v4_u32(address + i64_of_u32(row) * row_bytes + at, HINT)
    else:
        none = u32_of_i64(0)
        words = (none, none, none, none)
        if at < width:
            words = ld_address_v4_u32(address + i64_of_u32(row) * row_bytes + at, HINT)
        return words


def load_turn(address, row, row_bytes, sub, turn, at, width):
    """What a lane loads in a turn."""
    source = shfl_idx_u32(WARP, row, add_u32(sub, turn * 8))
    return load_row(address, source, row_bytes, at, width)


def load_rows(address, row, row_bytes, sub, at, width):
    """Of each of a lane's rows, sixteen bytes."""
    w0 = load_turn(address, row, row_bytes, sub, 0, at, width)
    w1, w2, w3 = w0, w0, w0
    if CHUNK > 32:
        w1 = load_turn(address, row, row_bytes, sub, 1, at, width)
    if CHUNK > 64:
        w2 = load_turn(address, row, row_bytes, sub, 2, at, width)
    if CHUNK > 96:
        w3 = load_turn(address, row, row_bytes, sub, 3, at, width)
    return w0, w1, w2, w3


def store_turn(place, turn, words, number):
    """Store what was loaded in a turn, if the tile has these rows; `number` is the first one's."""
    if CHUNK >= turn * 32 + 32 or lt_u32(number, CHUNK - turn * 32):
        words = in_order_of_bytes(words)
        at = add_u32(place, turn * 32 * ROW_BYTES)
        st_shared_v4_u32(at, words[0], words[1], words[2], words[3])


def store_rows(place, words, number):
    """Store what :func:`load_rows` has loaded."""
    store_turn(place, 0, words[0], number)
    if CHUNK > 32:
        store_turn(place, 1, words[1], number)
    if CHUNK > 64:
        store_turn(place, 2, words[2], number)
    if CHUNK > 96:
        store_turn(place, 3, words[3], number)


def place_of_row(row, chunk):
    """Where 16 bytes of a row go, with a swizzle of 64."""
    turned = xor_u32(chunk, and_u32(shr_u32(row, 1), 3))
    return add_u32(mul_u32(row, ROW_BYTES), shl_u32(turned, 4))


def bring_byte_rows(
    maps, a, a_rows, ranges, item, items, beyond, across, row_bytes, depth, steps, ring, full,
    empty, row_blocks, mine, lane,
):  # fmt: skip
    """What a producer warp does; `full` is told once by each warp of a team, and of the weights."""
    address = ptr_address(a, 0)
    team = shr_u32(mine, 2)
    inner = and_u32(mine, 3)
    chunk = and_u32(lane, 3)
    sub = shr_u32(lane, 2)
    number = shl_u32(inner, 3)
    place = add_u32(ring, place_of_row(add_u32(number, sub), chunk))
    start = i64_of_u32(shl_u32(chunk, 4))
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
        at = start + i64_of_u32(mul_u32(step, ROW_BYTES))
        words = load_rows(address, row, row_bytes, sub, at, depth)
        while lt_u32(item, items):
            mbarrier_wait_parity(add_u32(empty, shl_u32(stage, 3)), parity)
            if asks:
                ask_for_weights(maps, expert, block, row_blocks, step, ring, stage, full)
            store_rows(add_u32(place, mul_u32(stage, rows_stage())), words, number)
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
            at = start + i64_of_u32(mul_u32(step, ROW_BYTES))
            words = load_rows(address, row, row_bytes, sub, at, depth)
