"""Warps of ``matmul_sm90`` that multiply nothing: rows of A, codes and scales come to the ring.

They go over the same items as consumers, by themselves.

Compile-time constants: those of ``matmul_sm90``.
"""

from __future__ import annotations

from ..ptx.arith import add_u32, eq_u32, ge_u32, lt_u32, shl_u32, sub_u32
from ..ptx.cluster import cluster_arrive, cluster_wait
from ..ptx.control import bar_arrive
from ..ptx.mbarrier import fence_proxy_async_shared, mbarrier_arrive, mbarrier_wait_parity
from ..ptx.memory import atom_max_shared_u32
from ..ptx.warp import elect, syncwarp
from ..ptx.wgmma import setmaxnreg_dec
from .activations import may_be_extreme, row_bytes
from .prepared_items import locate
from .rings import next_stage
from .sm90_block import by_copies, threads_with_flags
from .sm90_byte_rows import bring_byte_rows
from .sm90_half_rows import split_rows
from .sm90_quantized_rows import PRODUCER_WARPS, make_rows
from .sm90_rows import COPYING_WARPS, copy_rows
from .sm90_weights import ask_for_weights, ready, two_parts

COMPUTE = "bfloat16"
STEPS = 1
SPLIT = 1
BLOCKS_PER_SM = 1

WARP = 0xFFFFFFFF


def relay(item, items, beyond, steps, brought, full, lane):
    """What the warp does that tells consumers of stages that have been brought.

    A fence for the engines may wait for all copies that its thread has under way: so a warp has it
    that has none.
    """
    stage = sub_u32(lane, lane)
    parity = stage
    while lt_u32(item, items):
        step = sub_u32(stage, stage)
        while lt_u32(step, steps):
            mbarrier_wait_parity(add_u32(brought, shl_u32(stage, 3)), parity)
            fence_proxy_async_shared()
            mbarrier_arrive(add_u32(full, shl_u32(stage, 3)))
            stage, parity = next_stage(stage, parity)
            step = add_u32(step, STEPS)
        item = add_u32(item, beyond)


def bring_weights(maps, ranges, work, ring, full, empty, row_blocks, lane):
    """What the warp does that brings codes and scales, where no producer of rows does it."""
    item, items, beyond, across, steps, first_step = work
    stage = sub_u32(lane, lane)
    parity = add_u32(stage, 1)
    alone = elect(WARP)
    if alone:
        ready(maps)
    while lt_u32(item, items):
        here = locate(item, across, ranges, lane)
        step = sub_u32(stage, stage)
        while lt_u32(step, steps):
            mbarrier_wait_parity(add_u32(empty, shl_u32(stage, 3)), parity)
            if alone:
                at = add_u32(first_step, step)
                ask_for_weights(maps, here[0], here[4], row_blocks, at, ring, stage, full)
            stage, parity = next_stage(stage, parity)
            step = add_u32(step, STEPS)
        item = add_u32(item, beyond)


def produce(maps, a, a_scales, a_rows, ranges, work, ring, barriers, row_blocks, mine, lane, flags):
    """What a warp does that is no consumer, of number `mine` among these."""
    item, items, beyond, across, a_stride, depth, steps, first_step = work
    full, empty, brought = barriers
    weights = (item, items, beyond, across, steps, first_step)
    if two_parts() and ge_u32(mine, COPYING_WARPS + 2):
        setmaxnreg_dec(40)
        number = sub_u32(mine, COPYING_WARPS + 2)
        split_rows(item, items, beyond, steps, ring, barriers, number, lane)
    elif by_copies():
        if BLOCKS_PER_SM == 2:
            setmaxnreg_dec(48)
        else:
            setmaxnreg_dec(56)
        if lt_u32(mine, COPYING_WARPS):
            copy_rows(
                a, a_rows, ranges, item, items, beyond, across, row_bytes(a_stride), depth, steps,
                first_step, ring, brought, empty, mine, lane,
            )  # fmt: skip
        elif eq_u32(mine, COPYING_WARPS):
            bring_weights(maps, ranges, weights, ring, full, empty, row_blocks, lane)
        elif not two_parts():
            relay(item, items, beyond, steps, brought, full, lane)
    elif COMPUTE == "fp8":
        setmaxnreg_dec(64)
        bring_byte_rows(
            maps, a, a_rows, ranges, item, items, beyond, across, row_bytes(a_stride), depth,
            steps, ring, full, empty, row_blocks, mine, lane,
        )  # fmt: skip
    elif ge_u32(mine, PRODUCER_WARPS):
        setmaxnreg_dec(24)
        if eq_u32(mine, PRODUCER_WARPS):
            relay(item, items, beyond, steps, brought, full, lane)
        elif eq_u32(mine, PRODUCER_WARPS + 1):
            bring_weights(maps, ranges, weights, ring, full, empty, row_blocks, lane)
    else:
        setmaxnreg_dec(120)
        extreme = make_rows(
            a, a_scales, a_rows, ranges, item, items, beyond, across, a_stride, depth, steps,
            ring, brought, empty, mine, lane,
        )  # fmt: skip
        if may_be_extreme():
            if extreme:
                atom_max_shared_u32(flags, 1)
        bar_arrive(3, threads_with_flags())
    if SPLIT > 1:
        # Barriers of the cluster are of all its threads.
        syncwarp(WARP)
        cluster_arrive()
        cluster_wait()
        cluster_arrive()
        cluster_wait()
