"""Products of many rows with prepared weights on Hopper: ``wgmma`` with weights in registers.

A block makes tiles of 64 * 2 * STRIPES columns of the product by TOKENS rows of A, of a list that
it finds itself: items of ``prepared_items``. Two consumer warpgroups copy the codes of their
columns, each lane its own, some steps of 64 of the depth ahead, and make bfloat16 of them while
products before are under way; weights are the first operand, in registers.
Four producer warps bring the rows of A, gathered, dequantised, in the weights' K order, to a ring
in shared memory. Producers and consumers go over the same items by themselves; full and empty
stages are told by mbarriers, so loads for the next item begin while the last one is written.

Sums go through shared memory, 32 rows of A at a time, so that results are stored along rows, or
quantised: the lanes of a block of columns have it side by side.

What bfloat16 cannot hold is multiplied again as in ``matmul_decode``.

Constraints: those of ``matmul_decode``; A is bfloat16, or quantised and CHUNK at most 128 (no more
than 64 without spilled registers, which is the plan's limit). Grid: any number of blocks, one a
multiprocessor. Shared memory: :func:`shared_bytes`.

With COMPUTE "fp8" rows of A are e4m3 with one scale each, A_SCALE is "none", and products are of
e4m3: see ``fp8_operands``. MATRICES says which matrices this launch is for: see ``fp8_matrices``.

Compile-time constants: those of ``matmul_decode`` that are not its own; COMPUTE, MATRICES; CHUNK,
rows of A of a tile, a multiple of 8; HALF_TOKENS, half of it; STRIPES, 64 columns of each
warpgroup; STAGES of the ring, four or more where rows are made; DEPTH, steps whose weights are on
their way; PENDING, products under way, at most twice STRIPES; BRING, how rows of bfloat16 come: by
"copies" of four bytes, or by way of "registers" (``sm90_rows``).
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
    mad_u32,
    min_u32,
    mul_u32,
    ne_u32,
    rem_u32,
    select_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
    xor_u32,
)
from ..ptx.bits import bf16x2_of_f32, f16x2_of_f32, uint_as_float
from ..ptx.bulk import (
    cp_async_4,
    cp_async_16,
    cp_async_arrive,
    cp_async_commit_group,
    cp_async_wait_group,
)
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
    ld_shared_v4_u32,
    ptr_address,
    shared_base,
    st_global_v2_u32,
    st_shared_u32,
    st_shared_v4_u32,
)
from ..ptx.warp import shfl_idx_u32
from ..ptx.wgmma import (
    setmaxnreg_dec,
    setmaxnreg_inc,
    st_shared_acc_columns,
    wgmma_commit_group,
    wgmma_descriptor,
    wgmma_fence,
    wgmma_keep,
    wgmma_rs_bf16,
    wgmma_rs_e4m3,
    wgmma_wait,
    wgmma_wait_group,
    wgmma_zeros,
)
from .activations import chunk, may_be_extreme, row_bytes, row_is_extreme
from .elements import store_one
from .fp8_matrices import is_ours, number_our_chunks
from .fp8_operands import (
    copy_rows_of_bytes,
    early_bytes,
    late_bytes,
    less_of_matrix,
    narrow_factor,
    narrow_multipliers,
)
from .groups import source_row
from .matmul_decode import CODES_PARAMETERS, CODES_VARIANT
from .matmul_naive import grouped_matmul_kernel
from .prepared_codes import blank_rest, first_scale_row, put_four, put_value
from .prepared_items import (
    blank_rows_of_none,
    decode_of_matrix,
    final_value,
    locate,
    row_of_item,
    row_to_copy,
    scale_row_of,
    slow_value,
)
from .prepared_mma import (
    HEADER,
    early_fragment,
    factor_of_matrix,
    late_fragment,
    matrix_records,
    multipliers,
    record_bytes,
    record_place,
    step_bytes,
)
from .products import result_columns
from .rings import next_stage
from .schedule import chunk_count, make_table, table_bytes
from .sm90_rows import bring_rows

A_ELEMENT = "none"
A_SCALE = "e8m0"
B_ELEMENT = "e2m1"
PAIR = "none"
OUTPUT = "bfloat16"
GROUPED = True
CHUNK = 128
HALF_TOKENS = 64
STRIPES = 2
STAGES = 5
DEPTH = 4
PENDING = 3
WHOLE = True
COMPUTE = "bfloat16"
MATRICES = "all"
BRING = "copies"

ZERO = np.float32(0.0)
THREADS = 512
CONSUMERS = 256
PRODUCER_WARPS = 4
WARP = 0xFFFFFFFF
#: Rows of A of which sums are in shared memory at a time, and bytes from one to the next.
PIECE = 32
PITCH = 272


# Shared memory: the ring, results, flags, mbarriers, the table of ranges --------------------------


def stage_bytes():
    """Bytes of a stage: 64 columns of CHUNK rows."""
    if COMPUTE == "fp8":
        return CHUNK * 64
    else:
        return CHUNK * 128


def piece_bytes():
    """Bytes of the sums of a piece for a stripe."""
    return PIECE * PITCH


def results_at():
    """Where the sums are."""
    return STAGES * stage_bytes()


def slot_bytes():
    """Bytes of the codes and scales of a step for a warp and stripe, as its lanes have them."""
    return step_bytes() + 128


def weights_at():
    """Where codes and scales are, of each consumer warp DEPTH + 1 steps."""
    return results_at() + 2 * STRIPES * piece_bytes()


def barriers_at():
    """Where mbarriers are: full, empty and brought, of each stage; flags before them."""
    return weights_at() + 8 * (DEPTH + 1) * STRIPES * slot_bytes() + 16


def rows_are_copied():
    """Whether rows of A go to shared memory as they are."""
    if COMPUTE == "fp8" or A_ELEMENT == "none":
        return True
    else:
        return False


def producers_of_stage():
    """Threads that tell a stage."""
    if BRING == "registers":
        return PRODUCER_WARPS
    elif rows_are_copied():
        return 128
    else:
        return 32


# Producers ---------------------------------------------------------------------------------------


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
    """Store it in the weights' order: chunk i of 16 bytes has word i of each piece."""
    p, q, r, s = words
    base = add_u32(stage, shl_u32(row, 7))
    first = shl_u32(half, 2)
    turn = and_u32(row, 7)
    st_shared_v4_u32(add_u32(base, shl_u32(xor_u32(first, turn), 4)), p[0], q[0], r[0], s[0])
    second = add_u32(first, 1)
    st_shared_v4_u32(add_u32(base, shl_u32(xor_u32(second, turn), 4)), p[1], q[1], r[1], s[1])
    third = add_u32(first, 2)
    st_shared_v4_u32(add_u32(base, shl_u32(xor_u32(third, turn), 4)), p[2], q[2], r[2], s[2])
    fourth = add_u32(first, 3)
    st_shared_v4_u32(add_u32(base, shl_u32(xor_u32(fourth, turn), 4)), p[3], q[3], r[3], s[3])


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


def copy_rows(
    a,
    a_rows,
    ranges,
    item,
    items,
    beyond,
    across,
    a_stride,
    depth,
    steps,
    ring,
    brought,
    empty,
    mine,
    lane,
):
    """What a producer warp does where A is bfloat16: every fourth row, by copies of four bytes.

    A copy puts a lane's word where the weights' K order wants it; an mbarrier is told when it has.
    """
    address = ptr_address(a, 0)
    # Word n of a row's 128 bytes: of half n / 16, piece t and word w of it.
    w = and_u32(lane, 3)
    t = and_u32(shr_u32(lane, 2), 3)
    place = add_u32(shl_u32(shr_u32(lane, 4), 2), w)
    even = add_u32(shl_u32(xor_u32(place, mine), 4), shl_u32(t, 2))
    odd = add_u32(shl_u32(xor_u32(place, add_u32(mine, 4)), 4), shl_u32(t, 2))
    even = add_u32(even, shl_u32(mine, 7))
    odd = add_u32(odd, shl_u32(add_u32(mine, 4), 7))
    stage = sub_u32(mine, mine)
    parity = add_u32(stage, 1)
    row_bytes_a = a_stride * 2
    while lt_u32(item, items):
        here = locate(item, across, ranges, lane)
        mine_row = row_to_copy(a_rows, here, add_u32(shl_u32(lane, 2), mine))
        more_row = mine_row
        if CHUNK > 128:
            more_row = row_to_copy(a_rows, here, add_u32(add_u32(shl_u32(lane, 2), mine), 128))
        step = sub_u32(stage, stage)
        while lt_u32(step, steps):
            column = i64_of_u32(add_u32(shl_u32(step, 6), shl_u32(lane, 1)))
            size = u32_of_i64(4)
            if not WHOLE:
                if column >= depth:
                    column = 0
                    size = u32_of_i64(0)
            at = address + column * 2
            target = add_u32(ring, mul_u32(stage, stage_bytes()))
            mbarrier_wait_parity(add_u32(empty, shl_u32(stage, 3)), parity)
            for pair in range(min(CHUNK // 8, 16)):
                first = shfl_idx_u32(WARP, mine_row, 2 * pair)
                second = shfl_idx_u32(WARP, mine_row, 2 * pair + 1)
                under = add_u32(target, pair * 1024)
                cp_async_4(add_u32(under, even), at + i64_of_u32(first) * row_bytes_a, size)
                cp_async_4(add_u32(under, odd), at + i64_of_u32(second) * row_bytes_a, size)
            if CHUNK > 128:
                for pair in range(16, CHUNK // 8):
                    first = shfl_idx_u32(WARP, more_row, 2 * pair - 32)
                    second = shfl_idx_u32(WARP, more_row, 2 * pair - 31)
                    under = add_u32(target, pair * 1024)
                    cp_async_4(add_u32(under, even), at + i64_of_u32(first) * row_bytes_a, size)
                    cp_async_4(add_u32(under, odd), at + i64_of_u32(second) * row_bytes_a, size)
            cp_async_arrive(add_u32(brought, shl_u32(stage, 3)))
            stage, parity = next_stage(stage, parity)
            step = add_u32(step, 1)
        item = add_u32(item, beyond)


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
            step = add_u32(step, 1)
        item = add_u32(item, beyond)


def make_rows(
    a,
    a_scales,
    a_rows,
    ranges,
    item,
    items,
    beyond,
    across,
    a_stride,
    depth,
    steps,
    ring,
    brought,
    empty,
    mine,
    lane,
):
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
            at = add_u32(ring, mul_u32(stage, stage_bytes()))
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


# Consumers ---------------------------------------------------------------------------------------


def fetch(b, b_scales, at, header, code_slot, record_slot, lane):
    """Begin to copy a lane's codes and scales of a step to its own places in shared memory."""
    code = ptr_address(b, 0) + i64_of_u32(at) * step_bytes() + i64_of_u32(lane) * 16
    cp_async_16(code_slot, code, 16)
    if B_ELEMENT != "e2m1":
        cp_async_16(add_u32(code_slot, 512), code + 512, 16)
    record = i64_of_u32(at) * record_bytes() + i64_of_u32(header) + record_place(lane)
    cp_async_4(record_slot, ptr_address(b_scales, 0) + record, 4)


def fetch_stripes(b, b_scales, runs, code_slots, record_slots, number, lane):
    """Begin to copy a step of all stripes to the places of this number, as a group."""
    code_slot = add_u32(code_slots, mul_u32(number, STRIPES * slot_bytes()))
    record_slot = add_u32(record_slots, mul_u32(number, STRIPES * slot_bytes()))
    fetch(b, b_scales, runs[0], runs[2], code_slot, record_slot, lane)
    if STRIPES == 2:
        code_slot = add_u32(code_slot, slot_bytes())
        record_slot = add_u32(record_slot, slot_bytes())
        fetch(b, b_scales, runs[1], runs[2], code_slot, record_slot, lane)
    cp_async_commit_group()


def fetch_next(b, b_scales, places, coming, number, code_slots, record_slots):
    """Begin to copy the next step that a warp wants, perhaps of its next item; what comes then.

    `coming` is the item behind the one that is being fetched, steps of that which are left, where
    its stripes' steps are, and its header. Behind the last item, that one comes again.
    """
    ranges, items, beyond, across, row_blocks, steps, group, inner, lane = places
    item, left, first, second, header = coming
    if eq_u32(left, 0):
        here = locate(item, across, ranges, lane)
        first = run_of(here, 0, group, inner, row_blocks, steps)
        if STRIPES == 2:
            second = run_of(here, 1, group, inner, row_blocks, steps)
        header = header_of(here)
        left = steps
        item = min_u32(add_u32(item, beyond), sub_u32(items, 1))
    runs = (first, second, header)
    fetch_stripes(b, b_scales, runs, code_slots, record_slots, number, lane)
    return (item, sub_u32(left, 1), add_u32(first, 1), add_u32(second, 1), header)


def codes_of_slot(slot):
    """A lane's codes."""
    low = ld_shared_v4_u32(slot)
    if B_ELEMENT == "e2m1":
        return low
    else:
        high = ld_shared_v4_u32(add_u32(slot, 512))
        return (low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3])


def multiply(acc, w, rows):
    """Add a product; wait until no more than PENDING are under way."""
    wgmma_fence()
    acc = wgmma_rs_bf16(acc, w, rows, True)
    wgmma_commit_group()
    wgmma_wait_group(PENDING)
    return acc


def multiply_bytes(acc, w, rows):
    """The same of e4m3."""
    wgmma_fence()
    acc = wgmma_rs_e4m3(acc, w, rows, True)
    wgmma_commit_group()
    wgmma_wait_group(PENDING)
    return acc


def multipliers_of_slot(slot, less):
    """What a lane's codes of a step are multiplied by."""
    if COMPUTE == "fp8":
        return narrow_multipliers(ld_shared_u32(slot), less)
    else:
        return multipliers(ld_shared_u32(slot))


def descriptor_of_stage(at):
    """Of the rows of A of a stage."""
    if COMPUTE == "fp8":
        return wgmma_descriptor(at, 64, 16, 512)
    else:
        return wgmma_descriptor(at, 128, 16, 1024)


def factor_of_sums(b_scales, header):
    """What the sums of a matrix must be multiplied by."""
    if COMPUTE == "fp8":
        return narrow_factor(b_scales, header)
    else:
        return factor_of_matrix(b_scales, header)


def first_fragment(codes, scales):
    """Registers of the first product of a step."""
    if B_ELEMENT == "e2m1":
        return early_fragment(codes[0], codes[0], scales)
    else:
        return early_fragment(codes[0], codes[4], scales)


def second_fragment(codes, scales):
    """Of the second."""
    if B_ELEMENT == "e2m1":
        return early_fragment(codes[1], codes[1], scales)
    else:
        return early_fragment(codes[1], codes[5], scales)


def third_fragment(codes, scales):
    """Of the third."""
    if B_ELEMENT == "e2m1":
        return late_fragment(codes[2], codes[2], scales)
    else:
        return late_fragment(codes[2], codes[6], scales)


def fourth_fragment(codes, scales):
    """Of the fourth."""
    if B_ELEMENT == "e2m1":
        return late_fragment(codes[3], codes[3], scales)
    else:
        return late_fragment(codes[3], codes[7], scales)


def stripe_of(here, stripe, group, warp, row_blocks):
    """The block of 16 rows of the weights that a warp has of a stripe of its warpgroup."""
    block = here[4]
    if PAIR == "halves":
        half = shr_u32(row_blocks, 1)
        mine = add_u32(shl_u32(add_u32(shl_u32(block, 1), group), 2), warp)
        return add_u32(min_u32(mine, sub_u32(half, 1)), mul_u32(stripe, half))
    else:
        mine = add_u32(mul_u32(add_u32(shl_u32(block, 1), group), STRIPES), stripe)
        return min_u32(add_u32(shl_u32(mine, 2), warp), sub_u32(row_blocks, 1))


def run_of(here, stripe, group, warp, row_blocks, steps):
    """Where its steps begin."""
    expert = u32_of_i64(max(here[0], 0))
    mine = stripe_of(here, stripe, group, warp, row_blocks)
    return mul_u32(mad_u32(expert, row_blocks, mine), steps)


def header_of(here):
    """Bytes of the headers before the scales of an item's matrix."""
    return mul_u32(add_u32(u32_of_i64(max(here[0], 0)), 1), HEADER)


# Results -----------------------------------------------------------------------------------------


def columns_of_tile():
    """Columns of the result of a tile."""
    if PAIR == "none":
        return 128 * STRIPES
    else:
        return 64 * STRIPES


def columns_of_group():
    """Columns of the result of a warpgroup."""
    return columns_of_tile() // 2


def store_four(to, row, column, columns, v0, v1, v2, v3):
    """Store four neighbouring columns, those that there are."""
    width = result_columns(columns)
    at = row * width + column
    if OUTPUT != "float32" and width % 4 == 0 and ptr_address(to[0], 0) % 8 == 0:
        if column < width:
            if OUTPUT == "bfloat16":
                low = bf16x2_of_f32(v1, v0)
                high = bf16x2_of_f32(v3, v2)
            else:
                low = f16x2_of_f32(v1, v0)
                high = f16x2_of_f32(v3, v2)
            st_global_v2_u32(to[0], at * 2, low, high, "")
    else:
        if column < width:
            store_one(to[0], at, v0)
        if column + 1 < width:
            store_one(to[0], at + 1, v1)
        if column + 2 < width:
            store_one(to[0], at + 2, v2)
        if column + 3 < width:
            store_one(to[0], at + 3, v3)


def four_sums(base, stripe, local, n):
    """Sums of four neighbouring rows of the weights of a stripe for a row of A."""
    at = add_u32(base, mul_u32(stripe, piece_bytes()))
    words = ld_shared_v4_u32(add_u32(at, add_u32(mul_u32(local, PITCH), shl_u32(n, 2))))
    return (
        uint_as_float(words[0]),
        uint_as_float(words[1]),
        uint_as_float(words[2]),
        uint_as_float(words[3]),
    )


def four_values(to, base, row, column, columns, expert, factors, source, of_range, inside, n):
    """Values of four neighbouring columns, of sums; zeros beyond the columns."""
    if PAIR == "interleaved":
        s = four_sums(base, shr_u32(n, 5), inside, and_u32(shl_u32(n, 1), 63))
        u = four_sums(base, shr_u32(n, 5), inside, add_u32(and_u32(shl_u32(n, 1), 63), 4))
        g0, u0, g1, u1 = s[0], s[1], s[2], s[3]
        g2, u2, g3, u3 = u[0], u[1], u[2], u[3]
    elif PAIR == "halves":
        s = four_sums(base, 0, inside, n)
        u = four_sums(base, 1, inside, n)
        g0, g1, g2, g3 = s[0], s[1], s[2], s[3]
        u0, u1, u2, u3 = u[0], u[1], u[2], u[3]
    else:
        s = four_sums(base, shr_u32(n, 6), inside, and_u32(n, 63))
        g0, g1, g2, g3 = s[0], s[1], s[2], s[3]
        u0, u1, u2, u3 = g0, g1, g2, g3
    v0, v1, v2, v3 = ZERO, ZERO, ZERO, ZERO
    width = result_columns(columns)
    if column < width:
        v0 = final_value(to, row, column, columns, expert, g0, u0, factors, source, of_range)
    if column + 1 < width:
        v1 = final_value(to, row, column + 1, columns, expert, g1, u1, factors, source, of_range)
    if column + 2 < width:
        v2 = final_value(to, row, column + 2, columns, expert, g2, u2, factors, source, of_range)
    if column + 3 < width:
        v3 = final_value(to, row, column + 3, columns, expert, g3, u3, factors, source, of_range)
    return v0, v1, v2, v3


def store_piece(to, base, a_rows, factors, here, columns, piece, group, index):
    """Store the results of a piece whose sums the warpgroup has left at `base`."""
    expert, owner, first, count, block, _ = here
    row_indices, input_rows = a_rows
    begin = add_u32(mul_u32(block, columns_of_tile()), mul_u32(group, columns_of_group()))
    of_range = i64_of_u32(owner)
    fours = columns_of_group() // 4
    i = index
    while lt_u32(i, PIECE * fours):
        local = add_u32(div_u32(i, fours), piece * PIECE)
        n = shl_u32(rem_u32(i, fours), 2)
        if lt_u32(local, count):
            row = i64_of_u32(add_u32(first, local))
            source = -1
            if expert >= 0:
                source = source_row(row_indices, row, input_rows)
            column = i64_of_u32(add_u32(begin, n))
            inside = div_u32(i, fours)
            if source < 0:
                store_four(to, row, column, columns, ZERO, ZERO, ZERO, ZERO)
            else:
                v0, v1, v2, v3 = four_values(
                    to, base, row, column, columns, expert, factors, source, of_range, inside, n
                )
                store_four(to, row, column, columns, v0, v1, v2, v3)
        i = add_u32(i, 128)


def store_piece_codes(to, codes, ranges, base, a_rows, factors, here, columns, piece, group, index):
    """The same where the result is quantised."""
    expert, owner, first, count, block, _ = here
    row_indices, input_rows = a_rows
    begin = add_u32(mul_u32(block, columns_of_tile()), mul_u32(group, columns_of_group()))
    of_range = i64_of_u32(owner)
    width = result_columns(columns)
    scale_row = first_scale_row(codes, ranges, owner, first)
    fours = columns_of_group() // 4
    i = index
    while lt_u32(i, PIECE * fours):
        inside = div_u32(i, fours)
        local = add_u32(inside, piece * PIECE)
        n = shl_u32(rem_u32(i, fours), 2)
        row = i64_of_u32(add_u32(first, local))
        column = i64_of_u32(add_u32(begin, n))
        write = lt_u32(local, count) and column < width
        source = -1
        if write and expert >= 0:
            source = source_row(row_indices, row, input_rows)
        v = (ZERO, ZERO, ZERO, ZERO)
        if source >= 0:
            v = four_values(
                to, base, row, column, columns, expert, factors, source, of_range, inside, n
            )
        put_four(codes, to[0], row, column, width, v, write, scale_row + i64_of_u32(local))
        i = add_u32(i, 128)


def repeat_slowly(
    to, codes, ranges, a_rows, operands, scalars, here, columns, group, index, everything
):
    """Write a warpgroup's part of an item again, one product after the other, where it must be.

    With `everything` also its rows with extreme scales, and none of the others.
    """
    expert, owner, first, count, block, tile_row = here
    row_indices, input_rows = a_rows
    a, a_scales, b, b_scales, depth, a_stride = operands
    alpha, alpha_number, a_decode = scalars
    width = result_columns(columns)
    if expert >= 0:
        header = expert * matrix_records((columns + 15) // 16, (depth + 63) // 64)
        plain = factor_of_matrix(b_scales, header) == ZERO
        if everything or plain:
            factors = (alpha, alpha_number, a_decode, ZERO, decode_of_matrix(to[1], expert))
            begin = add_u32(mul_u32(block, columns_of_tile()), mul_u32(group, columns_of_group()))
            i = index
            while lt_u32(i, mul_u32(count, columns_of_group())):
                local = div_u32(i, columns_of_group())
                column = i64_of_u32(add_u32(begin, rem_u32(i, columns_of_group())))
                row = i64_of_u32(add_u32(first, local))
                source = -1
                if column < width:
                    source = source_row(row_indices, row, input_rows)
                scale_row = scale_row_of(source, tile_row, local)
                if source >= 0 and not plain:
                    at = source * row_bytes(a_stride)
                    if not row_is_extreme(a, a_scales, at, scale_row, depth):
                        source = -1
                v = ZERO
                if source >= 0:
                    given = (a, a_scales, b, b_scales, depth, a_stride, scale_row)
                    of_range = i64_of_u32(owner)
                    v = slow_value(
                        to, row, column, columns, expert, factors, source, of_range, given
                    )
                    if OUTPUT != "codes":
                        store_one(to[0], row * width + column, v)
                if OUTPUT == "codes":
                    result_row = first_scale_row(codes, ranges, owner, first) + i64_of_u32(local)
                    put_value(codes, to[0], row, column, width, v, source >= 0, result_row)
                i = add_u32(i, 128)


# Body --------------------------------------------------------------------------------------------


def matmul_sm90(
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
        across = div_u32(add_u32(row_blocks, 8 * STRIPES - 1), 8 * STRIPES)
    if eq_u32(thread, 0):
        st_shared_u32(flags, 0)
        st_shared_u32(add_u32(flags, 4), 0)
        stage = full
        while lt_u32(stage, empty):
            mbarrier_init(stage, 32)
            mbarrier_init(add_u32(stage, 16 * STAGES), producers_of_stage())
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
    if ge_u32(warp, CONSUMERS // 32 + PRODUCER_WARPS):
        setmaxnreg_dec(24)
        if eq_u32(warp, CONSUMERS // 32 + PRODUCER_WARPS):
            relay(item, items, beyond, steps, brought, full, lane)
    elif ge_u32(warp, CONSUMERS // 32):
        mine = sub_u32(warp, CONSUMERS // 32)
        if COMPUTE == "fp8":
            setmaxnreg_dec(40)
            copy_rows_of_bytes(
                a, a_rows, ranges, item, items, beyond, across, row_bytes(a_stride), depth, steps,
                ring, brought, empty, mine, lane,
            )  # fmt: skip
        elif BRING == "registers":
            setmaxnreg_dec(72)
            bring_rows(
                a, a_rows, ranges, item, items, beyond, across, a_stride, depth, steps, ring,
                brought, empty, mine, lane,
            )  # fmt: skip
        elif A_ELEMENT == "none":
            setmaxnreg_dec(40)
            copy_rows(
                a,
                a_rows,
                ranges,
                item,
                items,
                beyond,
                across,
                a_stride,
                depth,
                steps,
                ring,
                brought,
                empty,
                mine,
                lane,
            )
        else:
            setmaxnreg_dec(120)
            extreme = make_rows(
                a,
                a_scales,
                a_rows,
                ranges,
                item,
                items,
                beyond,
                across,
                a_stride,
                depth,
                steps,
                ring,
                brought,
                empty,
                mine,
                lane,
            )
            if may_be_extreme():
                if extreme:
                    atom_max_shared_u32(flags, 1)
        bar_arrive(3, CONSUMERS + 32 * PRODUCER_WARPS)
    else:
        if rows_are_copied():
            setmaxnreg_inc(208)
        else:
            setmaxnreg_inc(184)
        consume(
            b, b_scales, to, codes, a_rows, ranges, (alpha, alpha_number, a_decode), item, items,
            beyond, across, columns, row_blocks, steps, ring, full, empty, warp, lane, flags,
        )  # fmt: skip
        # What cannot be right is written again. Here, where no register is short.
        bar_sync(3, CONSUMERS + 32 * PRODUCER_WARPS)
        everything = ne_u32(ld_shared_u32(flags), 0)
        again = everything | ne_u32(ld_shared_u32(add_u32(flags, 4)), 0)
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


def consume(
    b, b_scales, to, codes, a_rows, ranges, scalars, item, items, beyond,
    across, columns, row_blocks, steps, ring, full, empty, warp, lane, flags,
):  # fmt: skip
    """What a consumer warp does."""
    alpha, alpha_number, a_decode = scalars
    group = shr_u32(warp, 2)
    inner = and_u32(warp, 3)
    g = shr_u32(lane, 2)
    t = and_u32(lane, 3)
    index = add_u32(shl_u32(inner, 5), lane)
    results = add_u32(ring, results_at())
    base = add_u32(results, mul_u32(group, STRIPES * piece_bytes()))
    corner = add_u32(mul_u32(shl_u32(t, 1), PITCH), shl_u32(add_u32(shl_u32(inner, 4), g), 2))
    corner = add_u32(base, corner)
    stage = sub_u32(warp, warp)
    parity = stage
    plain = False
    before = empty  # the mbarrier of the stage that the last step has read
    started = False
    none = u32_of_i64(0)
    # What is fetched is DEPTH steps ahead of what is multiplied, perhaps in a later item.
    weights = add_u32(weights_at(), mul_u32(warp, (DEPTH + 1) * STRIPES * slot_bytes()))
    weights = add_u32(ring, weights)
    code_slots = add_u32(weights, shl_u32(lane, 4))
    record_slots = add_u32(weights, add_u32(shl_u32(lane, 2), step_bytes()))
    places = (ranges, items, beyond, across, row_blocks, steps, group, inner, lane)
    coming = (item, none, none, none, none)
    slot = none
    ahead = none
    if lt_u32(item, items):
        while lt_u32(ahead, DEPTH):
            coming = fetch_next(b, b_scales, places, coming, ahead, code_slots, record_slots)
            ahead = add_u32(ahead, 1)
    fill = ahead
    while lt_u32(item, items):
        here = locate(item, across, ranges, lane)
        expert = here[0]
        acc0 = wgmma_zeros(HALF_TOKENS)
        acc1 = acc0
        if STRIPES == 2:
            acc1 = wgmma_zeros(HALF_TOKENS)
        step = none
        less = none
        if COMPUTE == "fp8":
            matrix_bytes = matrix_records(i64_of_u32(row_blocks), i64_of_u32(steps))
            less = less_of_matrix(b_scales, max(expert, 0) * matrix_bytes)
        while lt_u32(step, steps):
            # To the place that the step before has left.
            coming = fetch_next(b, b_scales, places, coming, fill, code_slots, record_slots)
            fill = add_u32(fill, 1)
            if lt_u32(DEPTH, fill):
                fill = none
            cp_async_wait_group(DEPTH)
            code_slot = add_u32(code_slots, mul_u32(slot, STRIPES * slot_bytes()))
            record_slot = add_u32(record_slots, mul_u32(slot, STRIPES * slot_bytes()))
            q0 = codes_of_slot(code_slot)
            scale0 = multipliers_of_slot(record_slot, less)
            p0 = q0
            scale1 = scale0
            if STRIPES == 2:
                p0 = codes_of_slot(add_u32(code_slot, slot_bytes()))
                scale1 = multipliers_of_slot(add_u32(record_slot, slot_bytes()), less)
            slot = add_u32(slot, 1)
            if lt_u32(DEPTH, slot):
                slot = none
            mbarrier_wait_parity(add_u32(full, shl_u32(stage, 3)), parity)
            rows = descriptor_of_stage(add_u32(ring, mul_u32(stage, stage_bytes())))
            if COMPUTE == "fp8":
                acc0 = multiply_bytes(acc0, early_bytes(q0[0], q0[1], scale0), rows)
                if STRIPES == 2:
                    acc1 = multiply_bytes(acc1, early_bytes(p0[0], p0[1], scale1), rows)
                acc0 = multiply_bytes(acc0, late_bytes(q0[2], q0[3], scale0), rows + 2)
                if STRIPES == 2:
                    acc1 = multiply_bytes(acc1, late_bytes(p0[2], p0[3], scale1), rows + 2)
            else:
                acc0 = multiply(acc0, first_fragment(q0, scale0), rows)
                if STRIPES == 2:
                    acc1 = multiply(acc1, first_fragment(p0, scale1), rows)
                acc0 = multiply(acc0, second_fragment(q0, scale0), rows + 2)
                if STRIPES == 2:
                    acc1 = multiply(acc1, second_fragment(p0, scale1), rows + 2)
            # Up to now a product of the step before may have been under way.
            if started and eq_u32(lane, 0):
                mbarrier_arrive(before)
            started = True
            before = add_u32(empty, shl_u32(stage, 3))
            if COMPUTE != "fp8":
                acc0 = multiply(acc0, third_fragment(q0, scale0), rows + 4)
                if STRIPES == 2:
                    acc1 = multiply(acc1, third_fragment(p0, scale1), rows + 4)
                acc0 = multiply(acc0, fourth_fragment(q0, scale0), rows + 6)
                if STRIPES == 2:
                    acc1 = multiply(acc1, fourth_fragment(p0, scale1), rows + 6)
            stage, parity = next_stage(stage, parity)
            step = add_u32(step, 1)
        acc0 = wgmma_wait(acc0, 0)
        if STRIPES == 2:
            acc1 = wgmma_keep(acc1)
        if eq_u32(lane, 0):
            mbarrier_arrive(before)
        started = False
        rebase = ZERO
        of_matrix = ZERO
        if expert >= 0:
            header_at = expert * matrix_records(i64_of_u32(row_blocks), i64_of_u32(steps))
            rebase = factor_of_sums(b_scales, header_at)
            of_matrix = decode_of_matrix(to[1], expert)
            if rebase == ZERO:
                plain = True
        factors = (alpha, alpha_number, a_decode, rebase, of_matrix)
        where = (base, corner, group, index)
        to_codes = (codes, ranges)
        leave_and_store(to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, 0, 0)
        if CHUNK > 32:
            leave_and_store(to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, 1, 32)
        if CHUNK > 64:
            leave_and_store(to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, 2, 64)
        if CHUNK > 96:
            leave_and_store(to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, 3, 96)
        if CHUNK > 128:
            leave_and_store(to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, 4, 128)
        item = add_u32(item, beyond)
    cp_async_wait_group(0)
    if plain:
        atom_max_shared_u32(add_u32(flags, 4), 1)


def leave_and_store(
    to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, piece, first: str
):
    """A piece of the results: `first` is its first row of A in the tile."""
    base, corner, group, index = where
    if lt_u32(piece * PIECE, here[3]):
        bar_sync(add_u32(group, 1), 128)
        st_shared_acc_columns(corner, acc0, PITCH, first, PIECE)
        if STRIPES == 2:
            st_shared_acc_columns(add_u32(corner, piece_bytes()), acc1, PITCH, first, PIECE)
        bar_sync(add_u32(group, 1), 128)
        if OUTPUT == "codes":
            codes, ranges = to_codes
            store_piece_codes(
                to, codes, ranges, base, a_rows, factors, here, columns, piece, group, index
            )
        else:
            store_piece(to, base, a_rows, factors, here, columns, piece, group, index)


# Kernels -----------------------------------------------------------------------------------------


def shared_bytes(
    *,
    tokens: int,
    stripes: int,
    stages: int,
    depth: int,
    step: int,
    groups: int | None,
    row: int = 128,
) -> int:
    """Bytes of shared memory of a block.

    `depth` is DEPTH, `step` the bytes of a step's codes, `row` those of a row of A in a stage;
    `groups` is None in a dense product.
    """
    weights = 8 * (depth + 1) * stripes * (step + 128)
    table = 0 if groups is None else table_bytes(groups) + 8 * (THREADS // 32)
    results = 2 * stripes * PIECE * PITCH
    return stages * tokens * row + results + weights + 16 + 24 * stages + table


_SHARED_WITH_NAIVE = (
    *("A_ELEMENT", "A_SCALE", "A_LAYOUT", "B_ELEMENT", "B_SCALE", "INPUT"),
    *("ALPHA", "DECODE_A", "DECODE_B", "PAIR", "OFFSETS", "IDS", "INDICES", "A_STARTS"),
    *("OUTPUT", "ELEMENT", "SCALE", "LAYOUT", "STARTS", "ROUNDING", "UNIT"),
)
_HERE = {
    "INPUT": ("bfloat16",),
    "GROUPED": (True, False),
    "CHUNK": tuple(range(16, 145, 8)),
    "HALF_TOKENS": tuple(range(8, 73, 4)),
    "STRIPES": (1, 2),
    "STAGES": tuple(range(2, 17)),
    "DEPTH": tuple(range(2, 13)),
    "PENDING": (1, 2, 3),
    "WHOLE": (True, False),
    "THREADS": (THREADS,),
    "A_SCALE": ("e4m3", "e8m0", "none"),
    "COMPUTE": ("bfloat16", "fp8"),
    "MATRICES": ("all", "narrow", "others"),
    "BRING": ("copies", "registers"),
}


@functools.cache
def matmul_sm90_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The kernel for an epilogue with arrays of these dtypes."""
    like = grouped_matmul_kernel(arrays)
    operands, rest = like.parameters[:12], like.parameters[16:]
    return Kernel(
        "matmul_sm90",
        matmul_sm90,
        (*operands, "u8*", *rest[:-1], *CODES_PARAMETERS),
        {name: like.constants[name] for name in _SHARED_WITH_NAIVE} | _HERE,
        architectures=("sm_90a",),
        blocks_per_sm=1,
    )


MATMUL_SM90 = matmul_sm90_kernel()


def variant(b: str = "mxfp4", tokens: int = 128, **more: object) -> dict:
    """Constants of a usual program, to be changed by name."""
    scale = "e4m3" if b == "nvfp4" else "e8m0"
    return {
        **{"A_ELEMENT": "none", "A_SCALE": "e8m0", "A_LAYOUT": "linear", "INPUT": "bfloat16"},
        **{"B_ELEMENT": "e2m1" if b.endswith("fp4") else b[-4:], "B_SCALE": scale},
        **{"ALPHA": "value", "DECODE_A": "none", "DECODE_B": "batch", "PAIR": "none"},
        **{"OFFSETS": "int32", "IDS": "none", "INDICES": "int32", "A_STARTS": "none"},
        **{"OUTPUT": "bfloat16", "GROUPED": True, "CHUNK": tokens, "HALF_TOKENS": tokens // 2},
        **{"STRIPES": 2, "STAGES": 5, "DEPTH": 4, "PENDING": 3, "WHOLE": True},
        **{"ELEMENT": "e2m1", "SCALE": "e8m0", "LAYOUT": "linear", "STARTS": "none"},
        **{"ROUNDING": "rceil", "UNIT": True, "THREADS": THREADS},
        **{"COMPUTE": "bfloat16", "MATRICES": "all", "BRING": "copies"},
        **more,
    }


_FP8: dict[str, Any] = {"A_ELEMENT": "e4m3", "A_SCALE": "none", "DECODE_A": "row"}

VARIANTS = {
    "matmul_sm90": (
        variant(),
        variant("nvfp4", 32, DEPTH=8),
        variant("mxfp8_e4m3", 64, GROUPED=False, DECODE_B="scalar", INDICES="none"),
        variant(tokens=144, BRING="registers", WHOLE=False, STAGES=4),
        variant(**_FP8, COMPUTE="fp8", MATRICES="narrow"),
        variant(PAIR="interleaved", **CODES_VARIANT),
    ),
}
_QUANTIZED: dict[str, Any] = {"A_LAYOUT": "tcgen", "DECODE_A": "group", "INDICES": "none"}
_QUANTIZED |= {"A_STARTS": "int32"}

SLOW_VARIANTS = {
    "matmul_sm90": (
        variant(**_FP8, MATRICES="others"),
        variant("nvfp4", 64, **{**_QUANTIZED, "A_ELEMENT": "e2m1", "A_SCALE": "e4m3"}),
        variant("mxfp4", 48, **_QUANTIZED, A_ELEMENT="e4m3", PAIR="interleaved"),
        variant("mxfp8_e4m3", 136),
    )
}
