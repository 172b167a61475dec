"""Weights for ``matmul_sm90``: tensor copies of codes and scales to stages in shared memory.

A stage has STEPS steps of 64 columns of 16 blocks of 16 rows of the weights, a block's steps behind
each other, in two boxes of eight blocks: those of the two consumer warpgroups or, with PAIR
"halves", of gate and up. A map's dimensions are words of a step, steps, blocks of rows, matrices;
what lies outside arrives as zero: zero codes with zero scales, of columns that there are not.

Compile-time constants: B_ELEMENT, B_SCALE, PAIR, STAGES, STEPS, and those that make rows' stages.
"""

from __future__ import annotations

from ..ptx.arith import add_u32, mul_u32, shl_u32, shr_u32, u32_of_i64
from ..ptx.mbarrier import mbarrier_arrive_expect_tx
from ..ptx.memory import ptr_address
from ..ptx.tma import fence_tensormap_acquire, prefetch_tensormap, tma_load_4d
from .prepared_mma import record_bytes, step_bytes

A_ELEMENT = "none"
INPUT = "bfloat16"
PAIR = "none"
COMPUTE = "bfloat16"
CHUNK = 128
STAGES = 5
STEPS = 1

#: Blocks of 16 rows of the weights in a stage, and in a box.
BLOCKS = 16
BOX = 8


def two_parts():
    """Whether rows of A are of float16: each element is multiplied as two bfloat16."""
    if A_ELEMENT == "none" and INPUT == "float16":
        return True
    else:
        return False


def rows_part():
    """Bytes of a tile of rows of A of a step: 64 columns of CHUNK rows."""
    if COMPUTE == "fp8":
        return CHUNK * 64
    else:
        return CHUNK * 128


def rows_step():
    """Bytes of the rows of A of a step."""
    if two_parts():
        return 2 * rows_part()
    else:
        return rows_part()


def rows_stage():
    """Bytes of the rows of A of a stage, one step's behind the other's."""
    return STEPS * rows_step()


def codes_stage():
    """Bytes of the codes of a stage."""
    return BLOCKS * STEPS * step_bytes()


def records_stage():
    """Bytes of their scales."""
    return BLOCKS * STEPS * record_bytes()


def codes_at():
    """Where the ring of codes is, behind that of rows."""
    return STAGES * rows_stage()


def records_at():
    """Where that of scales is."""
    return codes_at() + STAGES * codes_stage()


def behind_stages():
    """Where the rings end."""
    return records_at() + STAGES * records_stage()


def block_of_stage(group, inner):
    """The block of a stage that a warp of a warpgroup has of its first stripe."""
    if PAIR == "halves":
        return add_u32(shl_u32(group, 2), inner)
    else:
        return add_u32(shl_u32(group, 3), inner)


def blocks_apart():
    """How many blocks behind it that of its second stripe is."""
    if PAIR == "halves":
        return BOX
    else:
        return BOX // 2


def ready(maps):
    """See the maps as they were written, and bring them ahead; whoever asks for weights does it."""
    fence_tensormap_acquire(ptr_address(maps[0], 0))
    prefetch_tensormap(ptr_address(maps[0], 0))
    fence_tensormap_acquire(ptr_address(maps[1], 0))
    prefetch_tensormap(ptr_address(maps[1], 0))


def ask_for_weights(maps, expert, block, row_blocks, step, ring, stage, full):
    """Have the weights of a step of an item brought to a stage; one thread does it."""
    matrix = u32_of_i64(max(expert, 0))
    if PAIR == "halves":
        low = mul_u32(block, BOX)
        high = add_u32(low, shr_u32(row_blocks, 1))
    else:
        low = mul_u32(block, BLOCKS)
        high = add_u32(low, BOX)
    barrier = add_u32(full, shl_u32(stage, 3))
    mbarrier_arrive_expect_tx(barrier, codes_stage() + records_stage())
    to = add_u32(ring, add_u32(codes_at(), mul_u32(stage, codes_stage())))
    tma_load_4d(to, ptr_address(maps[0], 0), 0, step, low, matrix, barrier)
    to = add_u32(to, codes_stage() // 2)
    tma_load_4d(to, ptr_address(maps[0], 0), 0, step, high, matrix, barrier)
    to = add_u32(ring, add_u32(records_at(), mul_u32(stage, records_stage())))
    tma_load_4d(to, ptr_address(maps[1], 0), 0, step, low, matrix, barrier)
    to = add_u32(to, records_stage() // 2)
    tma_load_4d(to, ptr_address(maps[1], 0), 0, step, high, matrix, barrier)
