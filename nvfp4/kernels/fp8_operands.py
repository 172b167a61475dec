"""Operands of FP8 tensor cores: prepared mxfp4 weights in registers, rows of e4m3 in shared memory.

Source: docs/decisions.md, D25. A product of 32 of the depth has the columns of half a step: slot
16 j + 4 t + i is column 8 t + 4 j + i of it, so that a lane's four registers are the elements of
two of its words of codes, and rows of A go to shared memory in words of four columns. Rows of 64
bytes lie there with a swizzle of 64.

Compile-time constants: A_ELEMENT, CHUNK, STAGES, WHOLE, as in ``matmul_sm90``.
"""

from __future__ import annotations

from ..ptx.arith import (
    add_u32,
    and_u32,
    i64_of_u32,
    lop3,
    lt_u32,
    mul_u32,
    or_u32,
    prmt,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
    xor_u32,
)
from ..ptx.bulk import cp_async_4, cp_async_arrive
from ..ptx.mbarrier import mbarrier_wait_parity
from ..ptx.memory import ld_global_f32, ld_global_u32, ptr_address
from ..ptx.warp import shfl_idx_u32
from .prepared_items import locate, row_to_copy
from .prepared_mma import early_fragment, late_fragment, multipliers
from .rings import next_stage

CHUNK = 128
WHOLE = True

WARP = 0xFFFFFFFF
ROW_BYTES = 64
#: Signs of two bfloat16; (a & c) | (b & ~c) as a table of ``lop3``.
SIGNS = 0x80008000
SELECT = 0xE4
#: Bytes 1 and 3 of both words.
UPPER_BYTES = 0x7531


# Weights -----------------------------------------------------------------------------------------


def less_of_matrix(b_scales, header):
    """What stored scales of a matrix lose, as exponents of two bfloat16."""
    return ld_global_u32(b_scales, header + 8, "")


def narrow_factor(b_scales, header):
    """What a matrix's sums must be multiplied by; 0 where its values are no e4m3 values."""
    return ld_global_f32(b_scales, header + 4, "")


def narrow_multipliers(record, less):
    """:func:`multipliers` that put e4m3's bits where bits 10 to 4 of a bfloat16 are."""
    m = multipliers(record)
    return (sub_u32(m[0], less), sub_u32(m[1], less))


def in_upper_bytes(pair):
    """The e4m3 bytes of two such bfloat16, in bytes 1 and 3."""
    return lop3(pair, shl_u32(pair, 4), SIGNS, SELECT)


def packed(first, second):
    """The e4m3 bytes of two pairs."""
    return prmt(in_upper_bytes(first), in_upper_bytes(second), UPPER_BYTES)


def early_bytes(left, right, scales):
    """Registers of the product of a step's first 32 columns, of its first two words of codes."""
    p = early_fragment(left, left, scales)
    q = early_fragment(right, right, scales)
    return (packed(p[0], p[2]), packed(p[1], p[3]), packed(q[0], q[2]), packed(q[1], q[3]))


def late_bytes(left, right, scales):
    """Of the others."""
    p = late_fragment(left, left, scales)
    q = late_fragment(right, right, scales)
    return (packed(p[0], p[2]), packed(p[1], p[3]), packed(q[0], q[2]), packed(q[1], q[3]))


# Rows --------------------------------------------------------------------------------------------


def copy_rows_of_bytes(
    a, a_rows, ranges, item, items, beyond, across, row_bytes, depth, steps, ring, brought, empty,
    mine, lane,
):  # fmt: skip
    """What a producer warp does: two rows of every eight, with a copy of four bytes a lane.

    The two are neighbours, 128 bytes in shared memory: each lane has a bank of its own.
    """
    address = ptr_address(a, 0)
    upper = shr_u32(lane, 4)
    # Word n of a row's 64 bytes: of half n / 8, columns 8 t + 4 j.
    n = and_u32(lane, 15)
    chunk = or_u32(shl_u32(shr_u32(n, 3), 1), and_u32(n, 1))
    t = and_u32(shr_u32(n, 1), 3)
    row = add_u32(shl_u32(mine, 1), upper)
    place = xor_u32(chunk, mine)  # of 16 bytes; `mine` is bits 2 and 1 of the row
    place = add_u32(shl_u32(place, 4), shl_u32(t, 2))
    place = add_u32(place, mul_u32(row, ROW_BYTES))
    # Rows of the tile are found by a lane each.
    local = add_u32(shl_u32(shr_u32(lane, 1), 3), add_u32(shl_u32(mine, 1), and_u32(lane, 1)))
    stage = sub_u32(mine, mine)
    parity = add_u32(stage, 1)
    while lt_u32(item, items):
        here = locate(item, across, ranges, lane)
        mine_row = row_to_copy(a_rows, here, local)
        more_row = mine_row
        if CHUNK > 128:
            more_row = row_to_copy(a_rows, here, add_u32(local, 128))
        step = sub_u32(stage, stage)
        while lt_u32(step, steps):
            column = i64_of_u32(add_u32(shl_u32(step, 6), shl_u32(n, 2)))
            size = u32_of_i64(4)
            if not WHOLE:
                if column >= depth:
                    column = 0
                    size = u32_of_i64(0)
            at = address + column
            target = add_u32(add_u32(ring, mul_u32(stage, CHUNK * ROW_BYTES)), place)
            mbarrier_wait_parity(add_u32(empty, shl_u32(stage, 3)), parity)
            for pair in range(min(CHUNK // 8, 16)):
                source = shfl_idx_u32(WARP, mine_row, add_u32(upper, 2 * pair))
                under = add_u32(target, pair * 8 * ROW_BYTES)
                cp_async_4(under, at + i64_of_u32(source) * row_bytes, size)
            if CHUNK > 128:
                for pair in range(16, CHUNK // 8):
                    source = shfl_idx_u32(WARP, more_row, add_u32(upper, 2 * pair - 32))
                    under = add_u32(target, pair * 8 * ROW_BYTES)
                    cp_async_4(under, at + i64_of_u32(source) * row_bytes, size)
            cp_async_arrive(add_u32(brought, shl_u32(stage, 3)))
            stage, parity = next_stage(stage, parity)
            step = add_u32(step, 1)
        item = add_u32(item, beyond)
