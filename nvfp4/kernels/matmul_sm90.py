"""Products of many rows with prepared weights on Hopper: ``wgmma`` with weights in registers.

A block makes tiles of 256 columns of the product by CHUNK rows of A, of a list that it finds
itself: items of ``prepared_items``. A step is 64 of the depth; a ring of stages in shared memory
has the rows of A of a step, as they are, its codes and its scales. Two consumer warpgroups make
bfloat16 of codes, which ``ldmatrix`` hands out in the order that calls for such rows, while
products before are under way: a group of four for a stripe of 64 columns, two stripes for each
warpgroup, weights as the first operand, in registers. Other warps bring rows (``sm90_rows``) and
have the weights brought (``sm90_weights``). Producers and consumers go over the same items by
themselves; full and empty stages are told by mbarriers, so loads for the next item begin while the
last one is written, and the next item is looked up while the last products are under way.

Where A is quantised, four warps bring its rows, dequantised, one tells consumers of them, and one
asks for weights. Rows of float16 are copied, too; four warps more make two tiles of bfloat16 of
each, of which the second has what the first leaves (``sm90_half_rows``), and consumers multiply a
stripe's weights, made once, by both.

Results that are only scaled and rounded go to shared memory as rows (``sm90_plain_results``);
otherwise sums do, 32 rows of A at a time, so that results are stored along rows, or quantised: the
lanes of a block of columns have it side by side.

Where tiles are few, a cluster of SPLIT blocks shares the depth of one (``sm90_split``).

What bfloat16 cannot hold is multiplied again as in ``matmul_decode``.

Constraints: those of ``matmul_decode``, and codes and scales of B at multiples of 16 bytes; CHUNK
is at most 128 where A is quantised (no more than 64 without spilled registers, which is the plan's
limit). Grid: any number of blocks. Shared memory: :func:`shared_bytes`.

With COMPUTE "fp8" rows of A are e4m3 with one scale each, A_SCALE is "none", and products are of
e4m3: see ``fp8_operands``. MATRICES says which matrices this launch is for: see ``fp8_matrices``.

Compile-time constants: those of ``matmul_decode`` that are not its own; COMPUTE, MATRICES; CHUNK,
rows of A of a tile, a multiple of 8; HALF_TOKENS, half of it; STAGES of the ring, four or more
where rows are made; STEPS of a stage, 2 only where rows are multiplied as they are and nobody
shares the depth (WHOLE then says whether the depth is a multiple of 128); BLOCKS_PER_SM, 2 where
registers of small tiles allow it; EPILOGUE, whether there is a function of the user's; SPLIT,
blocks that share the depth of a tile (1: none do; else GROUPED is False, the result is plain, CHUNK
is a multiple of 8 * SPLIT, and the grid has SPLIT blocks for each item); SHARE, HALF_TOKENS /
SPLIT; THREADS: see :func:`threads_of`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import (
    add_u32,
    and_u32,
    div_u32,
    eq_u32,
    ge_u32,
    i64_of_u32,
    lt_u32,
    max_u32,
    min_u32,
    mul_u32,
    ne_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.cluster import cluster_arrive, cluster_rank, cluster_wait
from ..ptx.control import (
    bar_arrive,
    bar_sync,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
)
from ..ptx.mbarrier import (
    fence_mbarrier_init,
    fence_proxy_async_shared,
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_wait_parity,
)
from ..ptx.memory import (
    atom_max_shared_u32,
    ld_shared_u32,
    ld_shared_v2_u32,
    shared_base,
    st_shared_u32,
)
from ..ptx.mma import ldmatrix_x4
from ..ptx.warp import elect, syncwarp
from ..ptx.wgmma import (
    setmaxnreg_dec,
    setmaxnreg_inc,
    wgmma_descriptor,
    wgmma_group_rs_bf16,
    wgmma_group_rs_e4m3,
    wgmma_keep,
    wgmma_wait,
    wgmma_wait_group,
    wgmma_zeros,
)
from .activations import may_be_extreme, row_bytes
from .fp8_matrices import is_ours, number_our_chunks
from .fp8_operands import (
    bytes_of_step,
    less_of_matrix,
    narrow_factor,
    narrow_multipliers,
)
from .matmul_decode import CODES_PARAMETERS, CODES_VARIANT
from .matmul_naive import grouped_matmul_kernel
from .prepared_codes import blank_rest
from .prepared_items import (
    blank_rows_of_none,
    decode_of_matrix,
    locate,
)
from .prepared_mma import (
    factor_of_matrix,
    fragments,
    matrix_records,
    multipliers,
    record_bytes,
    step_bytes,
)
from .products import result_columns
from .rings import next_stage
from .schedule import chunk_count, make_table, table_bytes
from .sm90_byte_rows import bring_byte_rows
from .sm90_half_rows import SPLITTING_WARPS, split_rows
from .sm90_plain_results import store_plainly, tile_rows
from .sm90_quantized_rows import PRODUCER_WARPS, make_rows
from .sm90_results import PIECE, PITCH, leave_and_store, repeat_slowly
from .sm90_rows import COPYING_WARPS, copy_rows
from .sm90_split import first_step_of, part_of_item, sums_of_cluster
from .sm90_weights import (
    BLOCKS,
    ask_for_weights,
    behind_stages,
    block_of_stage,
    blocks_apart,
    codes_at,
    codes_stage,
    ready,
    records_at,
    records_stage,
    rows_part,
    rows_stage,
    rows_step,
    two_parts,
)

A_ELEMENT = "none"
A_SCALE = "e8m0"
INPUT = "bfloat16"
B_ELEMENT = "e2m1"
B_SCALE = "e8m0"
PAIR = "none"
OUTPUT = "bfloat16"
EPILOGUE = "none"
SPLIT = 1
GROUPED = True
CHUNK = 128
HALF_TOKENS = 64
STAGES = 5
STEPS = 1
WHOLE = True
COMPUTE = "bfloat16"
MATRICES = "all"
BLOCKS_PER_SM = 1

ZERO = np.float32(0.0)
CONSUMERS = 256
WARP = 0xFFFFFFFF


# Shared memory: the ring, results, flags, mbarriers, the table of ranges --------------------------


def barriers_at():
    """Where mbarriers are: full, empty and brought, of each stage; flags before them."""
    return behind_stages() + 2 * results_of_group() + 16


def results_of_group():
    """Bytes of a warpgroup's results: 32 rows of sums of its stripes, or 64 rows of the result."""
    if is_plain():
        return min(2 * PIECE, tile_rows()) * PITCH
    else:
        return 2 * PIECE * PITCH


def by_copies():
    """Whether rows of A are copied as they are."""
    if A_ELEMENT == "none":
        return True
    else:
        return False


def made():
    """Whether rows of A are made bfloat16 on the way."""
    if A_ELEMENT != "none" and COMPUTE != "fp8":
        return True
    else:
        return False


def tellers_of_stage():
    """Arrivals that fill a stage: of whoever brings rows, and of whoever has asked for weights."""
    if COMPUTE == "fp8":
        return PRODUCER_WARPS + 1
    elif two_parts():
        return SPLITTING_WARPS + 1
    else:
        return 33


def bringers_of_stage():
    """Threads that tell of rows which are on their way."""
    if by_copies():
        return 32 * COPYING_WARPS
    else:
        return 32


def threads_with_flags():
    """Threads that may set a flag, with those that read it."""
    if made():
        return CONSUMERS + 32 * PRODUCER_WARPS
    else:
        return CONSUMERS


# Producers ---------------------------------------------------------------------------------------


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


# Consumers ---------------------------------------------------------------------------------------


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


# Body --------------------------------------------------------------------------------------------


def matmul_sm90(
    codes_map,
    records_map,
    a,
    a_scales,
    a_decode,
    b,
    b_scales,
    b_decode,
    row_offsets,
    expert_ids,
    row_indices,
    tile_starts,
    alpha,
    alpha_number,
    out,
    e0,
    e1,
    e2,
    e3,
    input_rows,
    rows,
    columns,
    depth,
    a_stride,
    groups,
    experts,
    tiles,
    out_scales,
    out_decode,
    out_tile_starts,
    out_tiles,
):
    griddepcontrol_wait()
    griddepcontrol_launch_dependents()
    thread = u32_of_i64(cuda.threadIdx.x)
    warp = shr_u32(thread, 5)
    lane = and_u32(thread, 31)
    ring = shared_base()
    flags = add_u32(ring, barriers_at() - 16)
    full = add_u32(ring, barriers_at())
    empty = add_u32(full, 8 * STAGES)
    brought = add_u32(full, 16 * STAGES)
    table = add_u32(full, 24 * STAGES)
    row_blocks = shr_u32(add_u32(u32_of_i64(columns), 15), 4)
    steps = shr_u32(add_u32(u32_of_i64(depth), 63), 6)
    if PAIR == "halves":
        across = shr_u32(add_u32(shr_u32(row_blocks, 1), 7), 3)
    else:
        across = shr_u32(add_u32(row_blocks, 15), 4)
    if eq_u32(thread, 0):
        st_shared_u32(flags, 0)
        st_shared_u32(add_u32(flags, 4), 0)
        stage = full
        while lt_u32(stage, empty):
            mbarrier_init(stage, tellers_of_stage())
            mbarrier_init(add_u32(stage, 16 * STAGES), bringers_of_stage())
            mbarrier_init(add_u32(stage, 8 * STAGES), CONSUMERS // 32)
            stage = add_u32(stage, 8)
        fence_mbarrier_init()
    if GROUPED:
        scratch = add_u32(table, u32_of_i64(table_bytes(groups)))
        make_table(row_offsets, groups, rows, table, scratch, thread)
        if MATRICES != "all":
            matrix_bytes = matrix_records(i64_of_u32(row_blocks), i64_of_u32(steps))
            number_our_chunks(b_scales, expert_ids, experts, groups, table, matrix_bytes, thread)
        items = mul_u32(chunk_count(u32_of_i64(groups), table), across)
    else:
        items = mul_u32(div_u32(add_u32(u32_of_i64(rows), CHUNK - 1), CHUNK), across)
        if MATRICES != "all":
            if not is_ours(b_scales, 0, 0):
                items = u32_of_i64(0)
        cuda.syncthreads()
    to = (out, b_decode, e0, e1, e2, e3)
    codes = (out_scales, out_decode, out_tile_starts, out_tiles)
    a_rows = (row_indices, input_rows)
    ranges = (expert_ids, tile_starts, table, groups, experts, tiles, rows)
    if MATRICES == "others":
        pass  # the other launch did
    elif OUTPUT == "codes":
        blank_rest(codes, out, table, groups, rows, result_columns(columns))
    elif GROUPED:
        blank_rows_of_none(out, table, groups, rows, result_columns(columns))
    item = u32_of_i64(cuda.blockIdx.x)
    beyond = u32_of_i64(cuda.gridDim.x)
    rank = sub_u32(thread, thread)
    first_step = rank
    own_steps = steps
    if SPLIT > 1:
        rank = cluster_rank()
        item = div_u32(item, SPLIT)
        beyond = div_u32(beyond, SPLIT)
        first_step = first_step_of(rank, steps)
        own_steps = sub_u32(first_step_of(add_u32(rank, 1), steps), first_step)
    if ge_u32(warp, CONSUMERS // 32):
        work = (item, items, beyond, across, a_stride, depth, own_steps, first_step)
        ahead = sub_u32(warp, CONSUMERS // 32)
        barriers = (full, empty, brought)
        maps = (codes_map, records_map)
        produce(
            maps, a, a_scales, a_rows, ranges, work, ring, barriers, row_blocks, ahead, lane, flags
        )
    else:
        if by_copies():
            if BLOCKS_PER_SM == 2:
                setmaxnreg_inc(96)
            elif two_parts():
                setmaxnreg_inc(208)
            else:
                setmaxnreg_inc(224)
        elif COMPUTE == "fp8":
            setmaxnreg_inc(192)
        else:
            setmaxnreg_inc(184)
        consume(
            b_scales, to, codes, a_rows, ranges, (alpha, alpha_number, a_decode), item, items,
            beyond, across, columns, row_blocks, steps, own_steps, rank, ring, full, empty, warp,
            lane, flags,
        )  # fmt: skip
        # What cannot be right is written again. Here, where no register is short.
        bar_sync(3, threads_with_flags())
        everything = ne_u32(ld_shared_u32(flags), 0)
        again = everything | ne_u32(ld_shared_u32(add_u32(flags, 4)), 0)
        if SPLIT > 1:
            again = again & eq_u32(rank, 0)
        if again:
            group = shr_u32(warp, 2)
            index = and_u32(thread, 127)
            operands = (a, a_scales, b, b_scales, depth, a_stride)
            scalars = (alpha, alpha_number, a_decode)
            while lt_u32(item, items):
                here = locate(item, across, ranges, lane)
                repeat_slowly(
                    to, codes, ranges, a_rows, operands, scalars, here, columns, group, index,
                    everything,
                )  # fmt: skip
                item = add_u32(item, beyond)


def is_plain():
    """Whether results are only scaled and rounded to 16 bits."""
    if EPILOGUE == "none" and PAIR == "none" and (OUTPUT == "bfloat16" or OUTPUT == "float16"):
        return True
    else:
        return False


def consume(
    b_scales, to, codes, a_rows, ranges, scalars, item, items, beyond,
    across, columns, row_blocks, steps, own_steps, rank, ring, full, empty, warp, lane, flags,
):  # fmt: skip
    """What a consumer warp does."""
    alpha, alpha_number, a_decode = scalars
    group = shr_u32(warp, 2)
    inner = and_u32(warp, 3)
    g = shr_u32(lane, 2)
    t = and_u32(lane, 3)
    index = add_u32(shl_u32(inner, 5), lane)
    results = add_u32(ring, behind_stages())
    base = add_u32(results, mul_u32(group, results_of_group()))
    corner = add_u32(mul_u32(shl_u32(t, 1), PITCH), shl_u32(add_u32(shl_u32(inner, 4), g), 2))
    corner = add_u32(base, corner)
    stage = sub_u32(warp, warp)
    parity = stage
    plain = False
    none = u32_of_i64(0)
    mine = block_of_stage(group, inner)
    code_ring = add_u32(ring, add_u32(codes_at(), shl_u32(lane, 4)))
    code_ring = add_u32(code_ring, mul_u32(mine, STEPS * step_bytes()))
    record_ring = add_u32(ring, add_u32(records_at(), record_of_lane(lane)))
    record_ring = add_u32(record_ring, mul_u32(mine, STEPS * record_bytes()))
    following = locate(min_u32(item, sub_u32(max_u32(items, 1), 1)), across, ranges, lane)
    while lt_u32(item, items):
        here = following
        expert = here[0]
        acc0 = wgmma_zeros(HALF_TOKENS)
        acc1 = wgmma_zeros(HALF_TOKENS)
        less = none
        if COMPUTE == "fp8":
            matrix_bytes = matrix_records(i64_of_u32(row_blocks), i64_of_u32(steps))
            less = less_of_matrix(b_scales, max(expert, 0) * matrix_bytes)
        rings = (ring, code_ring, record_ring, full, empty)
        acc0, acc1, stage, parity, before = multiply_steps(
            acc0, acc1, rings, own_steps, stage, parity, less, lane
        )
        item = add_u32(item, beyond)
        following = locate(min_u32(item, sub_u32(items, 1)), across, ranges, lane)
        acc0 = wgmma_wait(acc0, 0)
        acc1 = wgmma_keep(acc1)
        syncwarp(WARP)
        if eq_u32(lane, 0):
            mbarrier_arrive(before)
        rebase = ZERO
        of_matrix = ZERO
        if expert >= 0:
            header_at = expert * matrix_records(i64_of_u32(row_blocks), i64_of_u32(steps))
            rebase = factor_of_sums(b_scales, header_at)
            of_matrix = decode_of_matrix(to[1], expert)
            if rebase == ZERO:
                plain = True
        factors = (alpha, alpha_number, a_decode, rebase, of_matrix)
        if SPLIT > 1:
            thread = add_u32(shl_u32(warp, 5), lane)
            sum0, sum1 = sums_of_cluster(ring, acc0, acc1, rank, thread)
            where = (base, group, inner, lane)
            mine = part_of_item(here, rank)
            store_plainly(to, sum0, sum1, a_rows, factors, mine, columns, where, 0, 0)
            if tile_rows() > 64:
                store_plainly(to, sum0, sum1, a_rows, factors, mine, columns, where, 1, 64)
            cluster_arrive()
            cluster_wait()
        elif is_plain():
            where = (base, group, inner, lane)
            store_plainly(to, acc0, acc1, a_rows, factors, here, columns, where, 0, 0)
            if CHUNK > 64:
                store_plainly(to, acc0, acc1, a_rows, factors, here, columns, where, 1, 64)
            if CHUNK > 128:
                store_plainly(to, acc0, acc1, a_rows, factors, here, columns, where, 2, 128)
        else:
            where = (base, corner, group, index, lane)
            to_codes = (codes, ranges)
            leave_and_store(to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, 0, 0)
            if CHUNK > 32:
                leave_and_store(
                    to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, 1, 32
                )
            if CHUNK > 64:
                leave_and_store(
                    to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, 2, 64
                )
            if CHUNK > 96:
                leave_and_store(
                    to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, 3, 96
                )
            if CHUNK > 128:
                leave_and_store(
                    to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, 4, 128
                )
    if plain:
        atom_max_shared_u32(add_u32(flags, 4), 1)


# Kernels -----------------------------------------------------------------------------------------


#: Threads of the largest blocks.
MOST_THREADS = 512


def threads_of(a_element: str, dtype: str = "bfloat16") -> int:
    """Threads of a block: rows that are made, split, or put into order take four warps more."""
    return 384 if a_element == "none" and dtype == "bfloat16" else MOST_THREADS


def shared_bytes(
    *, tokens: int, stages: int, step: int, groups: int | None, row: int = 128, results: int = 64
) -> int:
    """Bytes of shared memory of a block.

    `stages` are those of one step; `step` is the bytes of 16 rows of the weights in a step, codes
    and scales; `row` those of a row of A; `groups` is None in a dense product; `results` are rows
    of results that are there at a time: 64, or all of a smaller tile, where they are plain.
    """
    table = 0 if groups is None else table_bytes(groups) + 8 * (MOST_THREADS // 32)
    return stages * (tokens * row + BLOCKS * step + 24) + 2 * results * PITCH + 16 + table


_SHARED_WITH_NAIVE = (
    *("A_ELEMENT", "A_SCALE", "A_LAYOUT", "B_ELEMENT", "B_SCALE", "INPUT"),
    *("ALPHA", "DECODE_A", "DECODE_B", "PAIR", "OFFSETS", "IDS", "INDICES", "A_STARTS"),
    *("OUTPUT", "ELEMENT", "SCALE", "LAYOUT", "STARTS", "ROUNDING", "UNIT"),
)
_HERE: dict[str, tuple[Any, ...]] = {
    "INPUT": ("bfloat16", "float16"),
    "EPILOGUE": ("none", "function"),
    "GROUPED": (True, False),
    "CHUNK": tuple(range(16, 161, 8)),
    "HALF_TOKENS": tuple(range(8, 81, 4)),
    "STAGES": tuple(range(2, 17)),
    "STEPS": (1, 2),
    "WHOLE": (True, False),
    "THREADS": (384, 512),
    "A_SCALE": ("e4m3", "e8m0", "none"),
    "COMPUTE": ("bfloat16", "fp8"),
    "MATRICES": ("all", "narrow", "others"),
    "BLOCKS_PER_SM": (1, 2),
    "SPLIT": (1, 2, 4, 8),
    "SHARE": tuple(range(4, 81, 4)),
}


@functools.cache
def matmul_sm90_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The kernel for an epilogue with arrays of these dtypes."""
    like = grouped_matmul_kernel(arrays)
    operands, rest = like.parameters[:12], like.parameters[16:]
    return Kernel(
        "matmul_sm90",
        matmul_sm90,
        ("u64*", "u64*", *operands, "u8*", *rest[:-1], *CODES_PARAMETERS),
        {name: like.constants[name] for name in _SHARED_WITH_NAIVE} | _HERE,
        architectures=("sm_90a",),
    )


MATMUL_SM90 = matmul_sm90_kernel()


def variant(b: str = "mxfp4", tokens: int = 128, **more: object) -> dict:
    """Constants of a usual program, to be changed by name."""
    scale = "e4m3" if b == "nvfp4" else "e8m0"
    rows = (str(more.get("A_ELEMENT", "none")), str(more.get("INPUT", "bfloat16")))
    return {
        **{"A_ELEMENT": "none", "A_SCALE": "e8m0", "A_LAYOUT": "linear", "INPUT": "bfloat16"},
        **{"B_ELEMENT": "e2m1" if b.endswith("fp4") else b[-4:], "B_SCALE": scale},
        **{"ALPHA": "value", "DECODE_A": "none", "DECODE_B": "batch", "PAIR": "none"},
        **{"OFFSETS": "int32", "IDS": "none", "INDICES": "int32", "A_STARTS": "none"},
        **{"OUTPUT": "bfloat16", "EPILOGUE": "none"},
        **{"GROUPED": True, "CHUNK": tokens, "HALF_TOKENS": tokens // 2},
        **{"STAGES": 5, "STEPS": 1, "WHOLE": True},
        **{"ELEMENT": "e2m1", "SCALE": "e8m0", "LAYOUT": "linear", "STARTS": "none"},
        **{"ROUNDING": "rceil", "UNIT": True},
        **{"COMPUTE": "bfloat16", "MATRICES": "all"},
        **{"SPLIT": 1, "SHARE": tokens // 2, "BLOCKS_PER_SM": 1},
        **{"THREADS": threads_of(*rows)},
        **more,
    }


_FP8: dict[str, Any] = {"A_ELEMENT": "e4m3", "A_SCALE": "none", "DECODE_A": "row"}

_DENSE: dict[str, Any] = {"GROUPED": False, "DECODE_B": "scalar", "INDICES": "none"}

VARIANTS = {
    "matmul_sm90": (
        variant(),
        variant("nvfp4", 32, BLOCKS_PER_SM=2),
        variant("mxfp8_e4m3", 64, **_DENSE, SPLIT=4, SHARE=8),
        variant(tokens=120, WHOLE=False, STAGES=4),
        variant(**_FP8, COMPUTE="fp8", MATRICES="narrow"),
        variant(PAIR="interleaved", **CODES_VARIANT),
        variant(tokens=144, **_DENSE, INPUT="float16", STAGES=4),
    ),
}
_QUANTIZED: dict[str, Any] = {"A_LAYOUT": "tcgen", "DECODE_A": "group", "INDICES": "none"}
_QUANTIZED |= {"A_STARTS": "int32"}

SLOW_VARIANTS = {
    "matmul_sm90": (
        variant(tokens=112, **_FP8, MATRICES="others"),
        variant("nvfp4", 64, **{**_QUANTIZED, "A_ELEMENT": "e2m1", "A_SCALE": "e4m3"}),
        variant("mxfp4", 40, **_QUANTIZED, A_ELEMENT="e4m3", PAIR="interleaved"),
        variant("mxfp8_e4m3", 128),
        variant("nvfp4", 144, INPUT="float16", STAGES=4),
        variant("mxfp8_e4m3", 96, INPUT="float16", PAIR="halves", **CODES_VARIANT),
        variant("mxfp8_e5m2", 128, **_DENSE, INPUT="float16", STAGES=3, SPLIT=4, SHARE=16),
    )
}
