"""Products of ``matmul_sm90``: weights of a stage to registers, from there to ``wgmma``.

Of a stage a warpgroup has two stripes of 64 columns. ``ldmatrix`` hands out codes in the order that
rows as they lie call for; a group of products is under way while the next one's weights are made.

Compile-time constants: B_ELEMENT, B_SCALE, COMPUTE, STEPS, STAGES, and those of ``sm90_weights``.
"""

from __future__ import annotations

from ..ptx.arith import add_u32, eq_u32, lt_u32, mul_u32, shl_u32, shr_u32, sub_u32
from ..ptx.mbarrier import mbarrier_arrive, mbarrier_wait_parity
from ..ptx.memory import ld_shared_u32, ld_shared_v2_u32
from ..ptx.mma import ldmatrix_x4
from ..ptx.warp import syncwarp
from ..ptx.wgmma import (
    wgmma_descriptor,
    wgmma_group_rs_bf16,
    wgmma_group_rs_e4m3,
    wgmma_wait_group,
)
from .fp8_operands import bytes_of_step, narrow_factor, narrow_multipliers
from .prepared_mma import factor_of_matrix, fragments, multipliers, record_bytes, step_bytes
from .rings import next_stage
from .sm90_weights import (
    blocks_apart,
    codes_stage,
    records_stage,
    rows_part,
    rows_stage,
    rows_step,
    two_parts,
)

B_ELEMENT = "e2m1"
B_SCALE = "e8m0"
COMPUTE = "bfloat16"
STEPS = 1

WARP = 0xFFFFFFFF


def codes_of_stage(at):
    """A lane's words of a step of a block of 16 rows of the weights, for products as they are."""
    low = ldmatrix_x4(at)
    if B_ELEMENT == "e2m1":
        return low
    else:
        high = ldmatrix_x4(add_u32(at, 512))
        return (low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3])


def scales_of_stage(at, less):
    """What a lane's words 0 and 1 of a step are multiplied by, and words 2 and 3."""
    if COMPUTE == "fp8":
        early = narrow_multipliers(ld_shared_u32(at), less)
        return early, early
    elif B_SCALE == "e4m3":
        records = ld_shared_v2_u32(at)
        return multipliers(records[0]), multipliers(records[1])
    else:
        early = multipliers(ld_shared_u32(at))
        return early, early


def record_of_lane(lane):
    """Where in a step's scales those of a lane begin."""
    if B_SCALE == "e4m3":
        return shl_u32(shr_u32(lane, 2), 3)
    else:
        return shl_u32(shr_u32(lane, 2), 2)


def descriptor_of_stage(at):
    """Of the rows of A of a stage."""
    if COMPUTE == "fp8":
        return wgmma_descriptor(at, 64, 16, 512)
    else:
        return wgmma_descriptor(at, 128, 16, 1024)


def multiply(acc, codes, scales, rows):
    """Add a stripe's products of a step, a group; wait for all groups but this one.

    Of float16 rows these are two groups with the same weights, what is left of elements first.
    """
    if COMPUTE == "fp8":
        p, q = bytes_of_step(codes, scales[0])
        acc = wgmma_group_rs_e4m3(acc, p, q, rows)
        wgmma_wait_group(1)
    else:
        p, q, r, s = fragments(codes, scales[0], scales[1])
        if two_parts():
            acc = wgmma_group_rs_bf16(acc, p, q, r, s, rows + rows_part() // 16)
            acc = wgmma_group_rs_bf16(acc, p, q, r, s, rows)
            wgmma_wait_group(2)
        else:
            acc = wgmma_group_rs_bf16(acc, p, q, r, s, rows)
            wgmma_wait_group(1)
    return acc


def factor_of_sums(b_scales, header):
    """What the sums of a matrix must be multiplied by."""
    if COMPUTE == "fp8":
        return narrow_factor(b_scales, header)
    else:
        return factor_of_matrix(b_scales, header)


def weights_of_step(at, record, less):
    """A lane's codes of a step and what they are multiplied by, of both stripes."""
    codes0 = codes_of_stage(at)
    codes1 = codes_of_stage(add_u32(at, blocks_apart() * STEPS * step_bytes()))
    scales0 = scales_of_stage(record, less)
    scales1 = scales_of_stage(add_u32(record, blocks_apart() * STEPS * record_bytes()), less)
    return codes0, codes1, scales0, scales1


def multiply_steps(acc0, acc1, rings, steps, stage, parity, less, lane):
    """The products of an item's steps, of which the last ones may still be under way."""
    ring, code_ring, record_ring, full, empty = rings
    before = empty  # the mbarrier of the stage that the last step has read
    started = False
    step = sub_u32(stage, stage)
    while lt_u32(step, steps):
        mbarrier_wait_parity(add_u32(full, shl_u32(stage, 3)), parity)
        at = add_u32(code_ring, mul_u32(stage, codes_stage()))
        record = add_u32(record_ring, mul_u32(stage, records_stage()))
        codes0, codes1, scales0, scales1 = weights_of_step(at, record, less)
        rows = descriptor_of_stage(add_u32(ring, mul_u32(stage, rows_stage())))
        acc0 = multiply(acc0, codes0, scales0, rows)
        # Up to now products of the step before may have been under way.
        syncwarp(WARP)
        if started and eq_u32(lane, 0):
            mbarrier_arrive(before)
        started = True
        before = add_u32(empty, shl_u32(stage, 3))
        acc1 = multiply(acc1, codes1, scales1, rows)
        if STEPS == 2:
            at = add_u32(at, step_bytes())
            record = add_u32(record, record_bytes())
            codes0, codes1, scales0, scales1 = weights_of_step(at, record, less)
            acc0 = multiply(acc0, codes0, scales0, rows + rows_step() // 16)
            acc1 = multiply(acc1, codes1, scales1, rows + rows_step() // 16)
        stage, parity = next_stage(stage, parity)
        step = add_u32(step, STEPS)
    return acc0, acc1, stage, parity, before
