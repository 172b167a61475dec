"""Rows of float16 for ``matmul_sm90``: each element becomes two bfloat16 where it lies.

Rows are copied as they are (``sm90_rows``) to the first tile of a stage. Four warps wait for them
and write over them the nearest bfloat16 of each element, and what is left of it, which is one too,
to a second tile behind the first: weights are multiplied by both. As each lane has its bytes for
itself, swizzle and rows do not matter here, and no load is under way in registers.

Compile-time constants: CHUNK, rows of A of a tile, a multiple of 8; STAGES.
"""

from __future__ import annotations

from ..ptx.arith import add_u32, eq_u32, lt_u32, mul_u32, shl_u32, sub_u32, xor_u32
from ..ptx.mbarrier import fence_proxy_async_shared, mbarrier_arrive, mbarrier_wait_parity
from ..ptx.memory import ld_shared_v4_u32, st_shared_v4_u32
from ..ptx.warp import syncwarp
from .mma_tiles import lower_half, upper_half
from .rings import next_stage
from .sm90_weights import rows_part, rows_stage

CHUNK = 128
STAGES = 5

WARP = 0xFFFFFFFF
SPLITTING_WARPS = 4
#: Bytes that these have at a time, 16 a lane: 16 rows of a step.
TURN = 2048


def put_parts(at, words):
    """Store both parts of eight elements: the first where they were."""
    h0 = upper_half(words[0])
    h1 = upper_half(words[1])
    h2 = upper_half(words[2])
    h3 = upper_half(words[3])
    st_shared_v4_u32(at, h0, h1, h2, h3)
    l0 = lower_half(words[0], h0)
    l1 = lower_half(words[1], h1)
    l2 = lower_half(words[2], h2)
    l3 = lower_half(words[3], h3)
    st_shared_v4_u32(add_u32(at, rows_part()), l0, l1, l2, l3)


def split_tile(at, mine):
    """Split what a lane has of a tile, from `at` on: two turns at a time, for their loads."""
    for i in range(CHUNK // 32):
        here = add_u32(at, 2 * TURN * i)
        first = ld_shared_v4_u32(here)
        second = ld_shared_v4_u32(add_u32(here, TURN))
        put_parts(here, first)
        put_parts(add_u32(here, TURN), second)
    last = add_u32(at, CHUNK // 32 * 2 * TURN)
    if CHUNK % 32 >= 16:
        put_parts(last, ld_shared_v4_u32(last))
    if CHUNK % 16 == 8:
        # Half a turn.
        if lt_u32(mine, SPLITTING_WARPS // 2):
            last = add_u32(at, CHUNK // 16 * TURN)
            put_parts(last, ld_shared_v4_u32(last))


def split_rows(item, items, beyond, steps, ring, barriers, mine, lane):
    """What a warp does that splits rows, of number `mine` among these; it tells consumers.

    It waits for the products of the turn of the ring before, too: that copies have come orders the
    copies alone.
    """
    full, empty, brought = barriers
    stage = sub_u32(lane, lane)
    parity = stage
    place = add_u32(ring, shl_u32(add_u32(shl_u32(mine, 5), lane), 4))
    while lt_u32(item, items):
        step = sub_u32(stage, stage)
        while lt_u32(step, steps):
            mbarrier_wait_parity(add_u32(empty, shl_u32(stage, 3)), xor_u32(parity, 1))
            mbarrier_wait_parity(add_u32(brought, shl_u32(stage, 3)), parity)
            split_tile(add_u32(place, mul_u32(stage, rows_stage())), mine)
            fence_proxy_async_shared()
            syncwarp(WARP)
            if eq_u32(lane, 0):
                mbarrier_arrive(add_u32(full, shl_u32(stage, 3)))
            stage, parity = next_stage(stage, parity)
            step = add_u32(step, 1)
        item = add_u32(item, beyond)
