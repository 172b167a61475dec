"""Products of a few rows with prepared weights, at the speed of memory: ``mma.sync`` of bfloat16.

The weights are the first operand of the tensor cores, the rows the second: an item of work is 16
rows of a weight matrix and CHUNK rows of A. The warps of a block share the depth, steps of 64
columns in runs that depend on the depth alone, read their weights straight to registers, and add
up what they have in shared memory, in the order of the warps: so the bytes of a row depend neither
on the other rows nor on the grid. Blocks stay, and take every gridDim.x-th item.

Matrices whose scales could not be rebased, and blocks of A with scales that bfloat16 does not hold,
are multiplied one element after the other, as ``matmul_naive`` does.

A quantised result is made of items as wide as a block at least. Where two halves of an item make 16
columns only, and a block is one of 32, an item has two PASSES, whose sums wait side by side.

Constraints: ALIGNED; B prepared (docs/decisions.md D13); rows below 2^31; with PAIR "halves", half
of the columns a multiple of 16; quantised, the columns of the result are a multiple of its block,
and an item has a whole block. Grid: any number of blocks. Shared memory: :func:`shared_bytes`.

Compile-time constants: those of ``grouped_matmul_naive`` for operands, epilogue and result;
GROUPED; CHUNK, rows of A of an item, 8 or 16; WARPS; WHOLE, whether the depth is a multiple of 64;
PASSES, 2 where pairs (and STRIPES 2) make blocks of 32.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import (
    add_rn,
    add_u32,
    and_u32,
    div_u32,
    eq_u32,
    i64_of_u32,
    lt_u32,
    mad_u32,
    min_u32,
    mul_u32,
    ne_u32,
    or_u32,
    select_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
    xor_u32,
)
from ..ptx.control import bar_sync, griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.memory import ld_shared_f32, ld_shared_u32, shared_base, st_shared_f32, st_shared_u32
from ..ptx.mma import mma_m16n8k16_bf16
from ..ptx.warp import syncwarp, vote_any
from .activations import chunk, may_be_extreme, row_bytes, row_is_extreme
from .elements import store_one
from .groups import source_row
from .matmul_naive import grouped_matmul_kernel
from .mma_tiles import lower_half, upper_half
from .prepared_codes import blank_rest, first_scale_row, put_value
from .prepared_items import (
    blank_rows_of_none,
    decode_of_matrix,
    final_value,
    locate,
    row_of_item,
    scale_row_of,
    slow_value,
)
from .prepared_mma import (
    HEADER,
    code_place,
    factor_of_matrix,
    fragments,
    load_codes,
    load_record,
    matrix_records,
    multipliers,
    record_bytes,
    record_place,
    step_bytes,
)
from .products import (
    result_columns,
)
from .schedule import chunk_count, make_table, table_bytes

A_ELEMENT = "none"
A_LAYOUT = "linear"
A_STARTS = "none"
INPUT = "bfloat16"
PAIR = "none"
DECODE_B = "scalar"
GROUPED = True
CHUNK = 8
WARPS = 8
WHOLE = True
SLOTS = 4
TEAM = 8
STRIPES = 1
EVEN = True
PASSES = 1
OUTPUT = "bfloat16"

ZERO = np.float32(0.0)
#: Floats from one row of A to the next in what a warp leaves in shared memory: 16 would make four
#: lanes meet in each bank.
PITCH = 20
WARP = 0xFFFFFFFF


def sum_bytes():
    """What a warp leaves of an item in shared memory: its sums of all stripes."""
    return STRIPES * CHUNK * PITCH * 4


# Sums --------------------------------------------------------------------------------------------


def row_words(a, a_scales, row, column, depth):
    """Eight elements of a row from a column, zeros beyond the depth."""
    at, scale_row = row
    if WHOLE:
        return chunk(a, a_scales, at, scale_row, column, depth)
    else:
        none = u32_of_i64(0)
        words = (none, none, none, none)
        extreme = False
        if column < depth:
            words, extreme = chunk(a, a_scales, at, scale_row, column, depth)
        return words, extreme


def halves(words):
    """Eight float16 elements as bfloat16, and what is left of them."""
    upper = (
        upper_half(words[0]),
        upper_half(words[1]),
        upper_half(words[2]),
        upper_half(words[3]),
    )
    lower = (
        lower_half(words[0], upper[0]),
        lower_half(words[1], upper[1]),
        lower_half(words[2], upper[2]),
        lower_half(words[3], upper[3]),
    )
    return upper, lower


def add_products(w, low, high, c):
    """The products of a step with eight rows, whose columns from 8t and 32 + 8t a lane has."""
    c = mma_m16n8k16_bf16(w[0], (low[0], low[1]), c)
    c = mma_m16n8k16_bf16(w[1], (low[2], low[3]), c)
    c = mma_m16n8k16_bf16(w[2], (high[0], high[1]), c)
    return mma_m16n8k16_bf16(w[3], (high[2], high[3]), c)


def add_row_products(w, low, high, c):
    """The products of a step with eight rows, which may be of float16."""
    if A_ELEMENT == "none" and INPUT == "float16":
        low, low_rest = halves(low)
        high, high_rest = halves(high)
        c = add_products(w, low_rest, high_rest, c)
    return add_products(w, low, high, c)


def rows_of_step(a, a_scales, row0, row1, column, depth):
    """What a lane has of the rows of an item for a step: up to four times eight elements."""
    low0, one = row_words(a, a_scales, row0, column, depth)
    high0, other = row_words(a, a_scales, row0, column + 32, depth)
    extreme = one | other
    low1 = low0
    high1 = high0
    if CHUNK == 16:
        low1, one = row_words(a, a_scales, row1, column, depth)
        high1, other = row_words(a, a_scales, row1, column + 32, depth)
        extreme = extreme | one | other
    return low0, high0, low1, high1, extreme


def add_step(codes, record, x, c0, c1):
    """The products of a step of a stripe with all rows of an item."""
    scales = multipliers(record)
    w = fragments(codes, scales, scales)
    c0 = add_row_products(w, x[0], x[1], c0)
    if CHUNK == 16:
        c1 = add_row_products(w, x[2], x[3], c1)
    return c0, c1


def lane_of_step(run, lane):
    """Where a lane's codes and its scales of the first step of a run are, in bytes."""
    at, header = run
    code = i64_of_u32(at) * step_bytes() + i64_of_u32(code_place(lane))
    record = i64_of_u32(at) * record_bytes() + i64_of_u32(header) + record_place(lane)
    return code, record


def load_step(b, b_scales, place, i):
    """A lane's codes and scales of step `i` of a run that is at `place`."""
    code = place[0] + i * step_bytes()
    return load_codes(b, code), load_record(b_scales, place[1] + i * record_bytes())


def load_stripes(b, b_scales, run, apart, last, i, lane):
    """The same of both stripes of an item, which are `apart` steps from each other."""
    at, header = run
    if EVEN:
        q, s = load_step(b, b_scales, lane_of_step(run, lane), i)
    else:
        # What is beyond the weights is the last step once more, and not used.
        at = min_u32(add_u32(at, i), last)
        q, s = load_step(b, b_scales, lane_of_step((at, header), lane), 0)
    r, t = q, s
    if STRIPES == 2:
        at = add_u32(run[0], apart)
        if EVEN:
            # The second stripe of the last item may be beyond the weights: any other, not used.
            at = min_u32(at, sub_u32(last, i))
            r, t = load_step(b, b_scales, lane_of_step((at, header), lane), i)
        else:
            at = min_u32(add_u32(at, i), last)
            r, t = load_step(b, b_scales, lane_of_step((at, header), lane), 0)
    return q, s, r, t


def counts(number, i, share):
    """Whether step `i` of a batch is one of this warp's."""
    if EVEN:
        return True
    else:
        return lt_u32(add_u32(number, i), share)


def leave(base, row, g, c):
    """Leave the sums of eight rows of A in shared memory, each row's 16 side by side."""
    at = add_u32(base, mul_u32(add_u32(mul_u32(row, PITCH), g), 4))
    st_shared_f32(at, c[0])
    st_shared_f32(add_u32(at, 4 * PITCH), c[1])
    st_shared_f32(add_u32(at, 32), c[2])
    st_shared_f32(add_u32(at, 4 * PITCH + 32), c[3])


def total(base, row, stripe, n):
    """The sum of all warps of a team for a row of A and one of 16 rows of a stripe."""
    at = add_u32(mul_u32(stripe, CHUNK * PITCH), add_u32(mul_u32(row, PITCH), n))
    at = add_u32(base, shl_u32(at, 2))
    value = ld_shared_f32(at)
    for warp in range(1, TEAM):
        value = add_rn(value, ld_shared_f32(add_u32(at, warp * sum_bytes())))
    return value


def leave_flag(base, extreme):
    """Leave, where no sum is, whether this warp has met an extreme scale."""
    met = vote_any(WARP, extreme)
    st_shared_u32(add_u32(base, 64), select_u32(met, 1, 0))


def some_flag(base):
    """Whether a warp of the team has left one."""
    some = ld_shared_u32(add_u32(base, 64))
    for warp in range(1, TEAM):
        some = or_u32(some, ld_shared_u32(add_u32(base, 64 + warp * sum_bytes())))
    return ne_u32(some, 0)


# Items -------------------------------------------------------------------------------------------


def run_of(here, matrix, steps, first_step):
    """Where this warp's steps of an item begin, and the headers before their scales."""
    expert = u32_of_i64(max(here[0], 0))
    stripe = here[4]
    if PAIR != "halves" and STRIPES == 2:
        stripe = shl_u32(stripe, 1)
    at = mad_u32(expert, matrix, mad_u32(stripe, steps, first_step))
    return at, mul_u32(add_u32(expert, 1), HEADER)


def meet(team):
    """Wait for the warps of this team, and see what they have left."""
    if TEAM == 1:
        syncwarp(WARP)
    elif TEAM == WARPS:
        cuda.syncthreads()
    else:
        bar_sync(add_u32(team, 1), TEAM * 32)


def at_pass(here, number):
    """An item as one pass over its columns has it."""
    if PASSES == 1:
        return here
    else:
        expert, owner, first, count, block, tile_row = here
        return expert, owner, first, count, add_u32(shl_u32(block, 1), number), tile_row


def width_of_pass():
    """Columns of the result of a pass over an item."""
    if PAIR == "interleaved":
        return 8 * STRIPES
    elif PAIR == "halves":
        return 16
    else:
        return 16 * STRIPES


def width_of_item():
    """Columns of the result of an item."""
    return PASSES * width_of_pass()


def sums_of(bases, local, n):
    """The sum of a column `n` of the item for a row of A; of pairs also that of up.

    `bases` are where the sums of the first and of the last pass are.
    """
    base = bases[0]
    if PASSES == 2:
        base = select_u32(lt_u32(n, width_of_pass()), base, bases[1])
        n = and_u32(n, width_of_pass() - 1)
    if PAIR == "interleaved":
        at = shl_u32(n, 1)
        s0 = total(base, local, shr_u32(at, 4), and_u32(at, 15))
        s1 = total(base, local, shr_u32(at, 4), add_u32(and_u32(at, 15), 1))
    elif PAIR == "halves":
        s0 = total(base, local, 0, n)
        s1 = total(base, local, 1, n)
    else:
        s0 = total(base, local, shr_u32(n, 4), and_u32(n, 15))
        s1 = s0
    return s0, s1


def finish(to, bases, a_rows, factors, here, columns, index):
    """Add up what the warps have left of an item, and store the results."""
    expert, owner, first, count, block, _ = here
    row_indices, input_rows = a_rows
    width = result_columns(columns)
    i = index
    while lt_u32(i, CHUNK * width_of_item()):
        local = div_u32(i, width_of_item())
        n = and_u32(i, width_of_item() - 1)
        column = i64_of_u32(add_u32(mul_u32(block, width_of_item()), n))
        if lt_u32(local, count) and column < width:
            row = i64_of_u32(add_u32(first, local))
            source = -1
            if expert >= 0:
                source = source_row(row_indices, row, input_rows)
            if source < 0:
                store_one(to[0], row * width + column, ZERO)
            else:
                s0, s1 = sums_of(bases, local, n)
                of_range = i64_of_u32(owner)
                v = final_value(to, row, column, columns, expert, s0, s1, factors, source, of_range)
                store_one(to[0], row * width + column, v)
        i = add_u32(i, TEAM * 32)


def finish_codes(to, codes, ranges, bases, a_rows, factors, here, columns, index):
    """The same where the result is quantised: the lanes of a block are beside each other."""
    expert, owner, first, count, block, _ = here
    row_indices, input_rows = a_rows
    width = result_columns(columns)
    scale_row = first_scale_row(codes, ranges, owner, first)
    i = index
    while lt_u32(i, CHUNK * width_of_item()):
        local = div_u32(i, width_of_item())
        n = and_u32(i, width_of_item() - 1)
        column = i64_of_u32(add_u32(mul_u32(block, width_of_item()), n))
        row = i64_of_u32(add_u32(first, local))
        write = lt_u32(local, count) and column < width
        source = -1
        if write and expert >= 0:
            source = source_row(row_indices, row, input_rows)
        v = ZERO
        if source >= 0:
            s0, s1 = sums_of(bases, local, n)
            of_range = i64_of_u32(owner)
            v = final_value(to, row, column, columns, expert, s0, s1, factors, source, of_range)
        put_value(codes, to[0], row, column, width, v, write, scale_row + i64_of_u32(local))
        i = add_u32(i, TEAM * 32)


def repeat_slowly(
    to,
    codes,
    ranges,
    a_rows,
    operands,
    alpha,
    alpha_number,
    a_decode,
    here,
    columns,
    index,
    everything,
):
    """Write an item one product after the other if its matrix is plain.

    With `everything` also its rows with extreme scales: none of the other rows, which must not know
    of these.
    """
    expert, owner, first, count, block, tile_row = here
    row_indices, input_rows = a_rows
    a, a_scales, b, b_scales, depth, a_stride = operands
    width = result_columns(columns)
    if expert >= 0:
        row_blocks = (columns + 15) // 16
        header = expert * matrix_records(row_blocks, (depth + 63) // 64)
        plain = factor_of_matrix(b_scales, header) == ZERO
        if everything or plain:
            of_matrix = decode_of_matrix(to[1], expert)
            factors = (alpha, alpha_number, a_decode, ZERO, of_matrix)
            i = index
            while lt_u32(i, CHUNK * width_of_item()):
                local = div_u32(i, width_of_item())
                n = and_u32(i, width_of_item() - 1)
                column = i64_of_u32(add_u32(mul_u32(block, width_of_item()), n))
                row = i64_of_u32(add_u32(first, local))
                source = -1
                if lt_u32(local, count) and column < width:
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
                i = add_u32(i, TEAM * 32)


def matmul_decode(
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
    g = shr_u32(lane, 2)
    table = shared_base()
    base = table
    row_blocks = shr_u32(add_u32(u32_of_i64(columns), 15), 4)
    steps = shr_u32(add_u32(u32_of_i64(depth), 63), 6)
    across = row_blocks
    apart = steps
    if PAIR == "halves":
        across = shr_u32(row_blocks, 1)
        apart = mul_u32(across, steps)
    elif STRIPES == 2:
        across = shr_u32(add_u32(row_blocks, 1), 1)
    if PASSES == 2:
        across = shr_u32(across, 1)  # an even number: the columns of the result fill blocks of 32
    if GROUPED:
        base = add_u32(table, u32_of_i64(table_bytes(groups)))
        make_table(row_offsets, groups, rows, table, base, thread)
        items = mul_u32(chunk_count(u32_of_i64(groups), table), across)
    else:
        items = mul_u32(div_u32(add_u32(u32_of_i64(rows), CHUNK - 1), CHUNK), across)
    # Steps of this warp of its team: the first ones have one more.
    team = div_u32(warp, TEAM)
    member = sub_u32(warp, mul_u32(team, TEAM))
    share = div_u32(steps, TEAM)
    rest = sub_u32(steps, mul_u32(share, TEAM))
    batches = div_u32(add_u32(share, select_u32(ne_u32(rest, 0), SLOTS, SLOTS - 1)), SLOTS)
    first_step = add_u32(mul_u32(member, share), min_u32(member, rest))
    share = add_u32(share, select_u32(lt_u32(member, rest), 1, 0))
    matrix = mul_u32(row_blocks, steps)
    last = sub_u32(mul_u32(matrix, u32_of_i64(experts)), 1)
    x_first = i64_of_u32(add_u32(shl_u32(first_step, 6), shl_u32(and_u32(lane, 3), 3)))
    index = sub_u32(thread, mul_u32(team, TEAM * 32))
    to = (out, b_decode, e0, e1, e2, e3)
    codes = (out_scales, out_decode, out_tile_starts, out_tiles)
    a_rows = (row_indices, input_rows)
    ranges = (expert_ids, tile_starts, table, groups, experts, tiles, rows)
    # Scratch of the table is used no more: all threads have met behind it.
    turn = add_u32(base, mul_u32(team, 2 * TEAM * sum_bytes()))
    other = add_u32(turn, TEAM * sum_bytes())
    item = add_u32(mul_u32(u32_of_i64(cuda.blockIdx.x), WARPS // TEAM), team)
    beyond = mul_u32(u32_of_i64(cuda.gridDim.x), WARPS // TEAM)
    if lt_u32(item, items) and ne_u32(steps, 0):
        # Weights are always on their way: a step's registers take a later step's as soon as they
        # are used, those of the next item while the sums of this one are made ready.
        here = at_pass(locate(item, across, ranges, lane), 0)
        run = run_of(here, matrix, steps, first_step)
        q0, s0, r0, t0 = load_stripes(b, b_scales, run, apart, last, 0, lane)
        q1, s1, r1, t1 = load_stripes(b, b_scales, run, apart, last, 1, lane)
        q2, s2, r2, t2 = q0, s0, r0, t0
        q3, s3, r3, t3 = q0, s0, r0, t0
        if SLOTS >= 3:
            q2, s2, r2, t2 = load_stripes(b, b_scales, run, apart, last, 2, lane)
        if SLOTS >= 4:
            q3, s3, r3, t3 = load_stripes(b, b_scales, run, apart, last, 3, lane)
    turns = sub_u32(item, item)  # passes made of the item
    again = sub_u32(item, item)  # 1: a matrix is plain; 3: also rows have extreme scales
    while lt_u32(item, items):
        whole = locate(item, across, ranges, lane)
        here = at_pass(whole, turns)
        expert, _, first, count, _, tile_row = here
        rebase = ZERO
        of_matrix = ZERO
        if expert >= 0:
            record_at = expert * matrix_records(i64_of_u32(row_blocks), i64_of_u32(steps))
            rebase = factor_of_matrix(b_scales, record_at)
            of_matrix = decode_of_matrix(b_decode, expert)
        row0 = row_of_item(a_rows, g, count, first, tile_row, a_stride)
        row1 = row0
        if CHUNK == 16:
            row1 = row_of_item(a_rows, add_u32(g, 8), count, first, tile_row, a_stride)
        run = run_of(here, matrix, steps, first_step)
        following = min_u32(add_u32(item, beyond), sub_u32(items, 1))
        if PASSES == 2:
            following = select_u32(eq_u32(turns, 0), item, following)
        following_here = at_pass(locate(following, across, ranges, lane), xor_u32(turns, 1))
        after = run_of(following_here, matrix, steps, first_step)
        c0 = (ZERO, ZERO, ZERO, ZERO)
        c1 = c0
        d0 = c0
        d1 = c0
        extreme = False
        x = x_first
        number = sub_u32(item, item)
        batch = batches
        while ne_u32(batch, 0):
            batch = sub_u32(batch, 1)
            more = ne_u32(batch, 0)
            run = (
                select_u32(more, add_u32(run[0], SLOTS), after[0]),
                select_u32(more, run[1], after[1]),
            )
            if counts(number, 0, share):
                some = rows_of_step(a, a_scales, row0, row1, x, depth)
                extreme = extreme | some[4]
                c0, c1 = add_step(q0, s0, some, c0, c1)
                if STRIPES == 2:
                    d0, d1 = add_step(r0, t0, some, d0, d1)
            q0, s0, r0, t0 = load_stripes(b, b_scales, run, apart, last, 0, lane)
            if counts(number, 1, share):
                some = rows_of_step(a, a_scales, row0, row1, x + 64, depth)
                extreme = extreme | some[4]
                c0, c1 = add_step(q1, s1, some, c0, c1)
                if STRIPES == 2:
                    d0, d1 = add_step(r1, t1, some, d0, d1)
            q1, s1, r1, t1 = load_stripes(b, b_scales, run, apart, last, 1, lane)
            if SLOTS >= 3:
                if counts(number, 2, share):
                    some = rows_of_step(a, a_scales, row0, row1, x + 128, depth)
                    extreme = extreme | some[4]
                    c0, c1 = add_step(q2, s2, some, c0, c1)
                    if STRIPES == 2:
                        d0, d1 = add_step(r2, t2, some, d0, d1)
                q2, s2, r2, t2 = load_stripes(b, b_scales, run, apart, last, 2, lane)
            if SLOTS >= 4:
                if counts(number, 3, share):
                    some = rows_of_step(a, a_scales, row0, row1, x + 192, depth)
                    extreme = extreme | some[4]
                    c0, c1 = add_step(q3, s3, some, c0, c1)
                    if STRIPES == 2:
                        d0, d1 = add_step(r3, t3, some, d0, d1)
                q3, s3, r3, t3 = load_stripes(b, b_scales, run, apart, last, 3, lane)
            number = add_u32(number, SLOTS)
            x += SLOTS * 64
        mine = add_u32(turn, mul_u32(member, sum_bytes()))
        pair = shl_u32(and_u32(lane, 3), 1)
        leave(mine, pair, g, c0)
        if CHUNK == 16:
            leave(mine, add_u32(pair, 8), g, c1)
        if STRIPES == 2:
            under = add_u32(mine, CHUNK * PITCH * 4)
            leave(under, pair, g, d0)
            if CHUNK == 16:
                leave(under, add_u32(pair, 8), g, d1)
        if may_be_extreme():
            leave_flag(mine, extreme)
        meet(team)
        if may_be_extreme():
            extreme = some_flag(turn)
        factors = (alpha, alpha_number, a_decode, rebase, of_matrix)
        if OUTPUT != "codes":
            finish(to, (turn, turn), a_rows, factors, here, columns, index)
        elif PASSES == 1:
            finish_codes(to, codes, ranges, (turn, turn), a_rows, factors, here, columns, index)
        elif ne_u32(turns, 0):
            finish_codes(to, codes, ranges, (other, turn), a_rows, factors, whole, columns, index)
            meet(team)  # both places of sums have been read, and the next pass takes one
        slowly = extreme | ((expert >= 0) & (rebase == ZERO))
        again = or_u32(again, select_u32(slowly, select_u32(extreme, 3, 1), 0))
        # The next item leaves its sums elsewhere; the one after it behind another barrier.
        turn, other = other, turn
        if PASSES == 1:
            item = add_u32(item, beyond)
        else:
            item = add_u32(item, select_u32(eq_u32(turns, 0), 0, beyond))
            turns = xor_u32(turns, 1)
    if ne_u32(again, 0):
        # What cannot be right is written again. Here, where no register is short.
        item = add_u32(mul_u32(u32_of_i64(cuda.blockIdx.x), WARPS // TEAM), team)
        operands = (a, a_scales, b, b_scales, depth, a_stride)
        while lt_u32(item, items):
            here = locate(item, across, ranges, lane)
            repeat_slowly(
                to,
                codes,
                ranges,
                a_rows,
                operands,
                alpha,
                alpha_number,
                a_decode,
                here,
                columns,
                index,
                eq_u32(again, 3),
            )
            item = add_u32(item, beyond)
    if OUTPUT == "codes":
        blank_rest(codes, out, table, groups, rows, result_columns(columns))
    elif GROUPED:
        blank_rows_of_none(out, table, groups, rows, result_columns(columns))


# Kernels -----------------------------------------------------------------------------------------


def shared_bytes(*, chunk: int, warps: int, stripes: int, groups: int | None) -> int:
    """Bytes of shared memory of a block; `groups` is None in a dense product."""
    table = 0 if groups is None else table_bytes(groups)
    return table + 2 * warps * stripes * chunk * PITCH * 4


#: Types of what a quantised result adds to the arguments: scales, decode scale, tile starts, tiles.
CODES_PARAMETERS = ("u8*", "f32*", "u8*", "i64")
_SHARED_WITH_NAIVE = (
    *("A_ELEMENT", "A_SCALE", "A_LAYOUT", "B_ELEMENT", "B_SCALE", "INPUT"),
    *("ALPHA", "DECODE_A", "DECODE_B", "PAIR", "OFFSETS", "IDS", "INDICES", "A_STARTS"),
    *("OUTPUT", "ELEMENT", "SCALE", "LAYOUT", "STARTS", "ROUNDING", "UNIT"),
)
_HERE = {
    "A_SCALE": ("e4m3", "e8m0", "none"),
    "GROUPED": (True, False),
    "CHUNK": (8, 16),
    "WARPS": tuple(range(1, 17)),
    "TEAM": tuple(range(1, 17)),
    "STRIPES": (1, 2),
    "SLOTS": (2, 3, 4),
    "PASSES": (1, 2),
    "EVEN": (True, False),
    "WHOLE": (True, False),
    "THREADS": tuple(range(32, 513, 32)),
    "BLOCKS_PER_SM": tuple(range(1, 17)),
}


@functools.cache
def matmul_decode_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The kernel for an epilogue with arrays of these dtypes."""
    like = grouped_matmul_kernel(arrays)
    operands, rest = like.parameters[:12], like.parameters[16:]
    return Kernel(
        "matmul_decode",
        matmul_decode,
        (*operands, "u8*", *rest[:-1], *CODES_PARAMETERS),
        {name: like.constants[name] for name in _SHARED_WITH_NAIVE} | _HERE,
    )


MATMUL_DECODE = matmul_decode_kernel()


def variant(
    b: str = "mxfp4", a: str = "bfloat16", chunk: int = 8, warps: int = 8, **more: Any
) -> dict:
    """Constants of a usual program, to be changed by name."""
    scale = "e4m3" if b == "nvfp4" else "e8m0"
    return {
        **{"A_ELEMENT": "none", "A_SCALE": "e8m0", "A_LAYOUT": "linear", "INPUT": a},
        **{"B_ELEMENT": "e2m1" if b.endswith("fp4") else b[-4:], "B_SCALE": scale},
        **{"ALPHA": "value", "DECODE_A": "none", "DECODE_B": "batch", "PAIR": "none"},
        **{"OFFSETS": "int32", "IDS": "none", "INDICES": "int32", "A_STARTS": "none"},
        **{"OUTPUT": "bfloat16", "GROUPED": True, "CHUNK": chunk, "WARPS": warps, "WHOLE": True},
        **{"TEAM": warps, "STRIPES": 1, "SLOTS": 4, "EVEN": True, "PASSES": 1},
        **{"ELEMENT": "e2m1", "SCALE": "e8m0", "LAYOUT": "linear", "STARTS": "none"},
        **{"ROUNDING": "rceil", "UNIT": True},
        **{"THREADS": warps * 32, "BLOCKS_PER_SM": 32 // warps if chunk == 8 else 24 // warps},
        **more,
    }


#: Constants of a quantised result whose blocks are of 32 columns.
CODES_VARIANT: dict = {"OUTPUT": "codes", "ELEMENT": "e4m3", "LAYOUT": "tcgen", "STARTS": "int32"}
_NVFP4_CODES = CODES_VARIANT | {"ELEMENT": "e2m1", "SCALE": "e4m3", "STARTS": "none"}
_QUANTIZED_A: dict = {"A_ELEMENT": "e4m3", "A_LAYOUT": "tcgen", "DECODE_A": "group", "IDS": "int32"}
VARIANTS = {
    "matmul_decode": (
        variant(SLOTS=2, ARCHITECTURES=("sm_80", "sm_89", "sm_90a", "sm_100a")),
        variant(SLOTS=2, BLOCKS_PER_SM=3),
        variant("nvfp4", chunk=16, STRIPES=2, SLOTS=2, TEAM=4, BLOCKS_PER_SM=2),
        variant("mxfp8_e4m3", GROUPED=False, DECODE_B="scalar", SLOTS=2, BLOCKS_PER_SM=3),
        variant("mxfp8_e5m2", "float16", EVEN=False, PAIR="interleaved", SLOTS=2, BLOCKS_PER_SM=2),
        variant(INDICES="none", PAIR="halves", STRIPES=2, SLOTS=2, **_QUANTIZED_A, BLOCKS_PER_SM=1),
        variant(SLOTS=2, **_NVFP4_CODES, ARCHITECTURES=("sm_90a",)),
        variant(
            chunk=16,
            PAIR="interleaved",
            PASSES=2,
            EVEN=False,
            STRIPES=2,
            SLOTS=2,
            BLOCKS_PER_SM=2,
            **CODES_VARIANT,
            ARCHITECTURES=("sm_80", "sm_90a", "sm_100a", "sm_120a"),
        ),
    ),
}
SLOW_VARIANTS = {
    "matmul_decode": (
        variant(SLOTS=2, BLOCKS_PER_SM=3, OFFSETS="counts_int64", INDICES="none"),
        variant(SLOTS=2, OFFSETS="counts_int32", **{**_NVFP4_CODES, "BLOCKS_PER_SM": 3}),
    ),
}
