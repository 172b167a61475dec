"""Products of a few rows with prepared weights, at the speed of memory: ``mma.sync`` of bfloat16.

The weights are the first operand of the tensor cores, the rows the second: an item of work is 16
rows of a weight matrix and CHUNK rows of A. The warps of a block share the depth, steps of 64
columns in runs that depend on the depth alone, read their weights straight to registers, and add
up what they have in shared memory, in the order of the warps: so the bytes of a row depend neither
on the other rows nor on the grid. Blocks stay, and take every gridDim.x-th item. Registers are for
weights under way: what a warp must know of an item waits in shared memory, its *note*.

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
    add_u32,
    and_u32,
    div_u32,
    eq_u32,
    i64_of_i32,
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
from ..ptx.memory import (
    ld_shared_u32,
    ld_shared_v2_u32,
    ld_shared_v4_u32,
    shared_base,
    st_shared_u32,
    st_shared_v4_u32,
)
from ..ptx.warp import syncwarp
from .activations import may_be_extreme
from .decode_results import (
    PITCH,
    finish,
    finish_codes,
    leave,
    leave_flag,
    repeat_slowly,
    some_flag,
    sum_bytes,
)
from .decode_steps import (
    bare_batch,
    empty_slots,
    fetch_rows,
    full_batch,
    last_batch,
    load_slots,
    place_ahead,
    place_of,
    rows_ahead,
    rows_from,
    steps_ahead,
)
from .matmul_naive import grouped_matmul_kernel
from .prepared_codes import blank_rest
from .prepared_items import blank_rows_of_none, decode_of_matrix, locate, row_of_item
from .prepared_mma import HEADER, factor_of_matrix, matrix_records
from .products import result_columns
from .schedule import (
    chunk_count,
    ends_of_thread,
    has_changed,
    make_table,
    make_table_of_ranges,
    table_bytes,
)

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
AHEAD = False
OUTPUT = "bfloat16"

ZERO = np.float32(0.0)
WARP = 0xFFFFFFFF
#: Bytes of a note; of all that a warp notes: two items, facts that hold for all, what to repeat.
NOTE = 48
FACTS = 96
AGAIN = 128
NOTES = 144


# Items -------------------------------------------------------------------------------------------


def run_of(here, matrix, steps, first_step, apart):
    """Where this warp's steps of an item begin, headers before their scales, the second stripe."""
    expert = u32_of_i64(max(here[0], 0))
    stripe = here[4]
    if PAIR != "halves" and STRIPES == 2:
        stripe = shl_u32(stripe, 1)
    at = mad_u32(expert, matrix, mad_u32(stripe, steps, first_step))
    if PAIR != "halves" and STRIPES == 2:
        # The last item of an odd number of stripes has the same twice, and does not use the second.
        inside = lt_u32(mul_u32(add_u32(stripe, 1), steps), matrix)
        apart = select_u32(inside, apart, 0)
    return at, mul_u32(add_u32(expert, 1), HEADER), apart


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


# Notes -------------------------------------------------------------------------------------------


def put_note(note, here, run, item, lane):
    """Note what an item is and where its run is; a warp sees it behind its next ``syncwarp``."""
    if eq_u32(lane, 0):
        expert, owner, first, count, block, tile_row = here
        st_shared_v4_u32(note, u32_of_i64(expert), owner, first, count)
        low, high = u32_of_i64(tile_row), u32_of_i64(tile_row >> 32)
        st_shared_v4_u32(add_u32(note, 16), run[0], run[1], run[2], block)
        st_shared_v4_u32(add_u32(note, 32), low, high, item, item)


def put_facts(notes, mine, common, lane, member):
    """Note what holds for all items of a warp, and that none must be repeated yet.

    Every item has it from there: computed ahead of the loop it would be in registers all the time.
    """
    if eq_u32(lane, 0):
        at = add_u32(notes, FACTS)
        st_shared_v4_u32(at, mine[0], mine[1], mine[2], mine[3])
        st_shared_v4_u32(add_u32(at, 16), common[0], common[1], common[2], common[3])
        beyond = mul_u32(u32_of_i64(cuda.gridDim.x), WARPS // TEAM)
        st_shared_v4_u32(add_u32(notes, AGAIN), 0, 0, beyond, member)


def unknown(number, notes):
    """A number, of which the compiler does not know that it is the same.

    What follows from it is computed again then, where it would take registers from weights.
    """
    return add_u32(number, ld_shared_u32(add_u32(notes, AGAIN + 4)))


def put_again(notes, why, lane):
    """Note that items must be repeated: 1, a matrix is plain; 3, rows have extreme scales too."""
    if eq_u32(lane, 0):
        at = add_u32(notes, AGAIN)
        st_shared_u32(at, or_u32(ld_shared_u32(at), why))


def noted(note):
    """What an item is, as ``locate`` says it."""
    w = ld_shared_v4_u32(note)
    block = ld_shared_v4_u32(add_u32(note, 16))[3]
    tile = ld_shared_v2_u32(add_u32(note, 32))
    tile_row = i64_of_u32(tile[0]) + (i64_of_i32(tile[1]) << 32)
    return noted_expert(note), w[1], w[2], w[3], block, tile_row


def item_behind(notes, note, turns):
    """The number of the item behind the noted one; its own where another pass is to be made.

    Asked for wherever it is needed: a register for it would be one less for weights.
    """
    item = ld_shared_u32(add_u32(note, 40))
    following = add_u32(item, ld_shared_u32(add_u32(notes, AGAIN + 8)))
    if PASSES == 2:
        following = select_u32(eq_u32(turns, 0), item, following)
    return following


def noted_expert(note):
    """Its expert, or -1."""
    if GROUPED:
        return i64_of_i32(ld_shared_u32(note))
    else:
        return 0


def noted_run(note):
    """Where its run is."""
    w = ld_shared_v4_u32(add_u32(note, 16))
    return w[0], w[1], w[2]


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
    thread = u32_of_i64(cuda.threadIdx.x)
    if AHEAD:
        of_a = input_rows
        if not GROUPED:
            of_a = rows
        if depth > 0:
            fetch_rows(a, of_a, depth, a_stride, thread)
    else:
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
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
    items = mul_u32(div_u32(add_u32(u32_of_i64(rows), CHUNK - 1), CHUNK), across)
    if GROUPED:
        base = add_u32(table, u32_of_i64(table_bytes(groups)))
    # Steps of this warp of its team: the first ones have one more.
    team = div_u32(warp, TEAM)
    member = sub_u32(warp, mul_u32(team, TEAM))
    share = div_u32(steps, TEAM)
    rest = sub_u32(steps, mul_u32(share, TEAM))
    first_step = add_u32(mul_u32(member, share), min_u32(member, rest))
    share = add_u32(share, select_u32(lt_u32(member, rest), 1, 0))
    batches = div_u32(add_u32(share, SLOTS - 1), SLOTS)
    of_last = sub_u32(add_u32(share, SLOTS), mul_u32(batches, SLOTS))
    matrix = mul_u32(row_blocks, steps)
    index = sub_u32(thread, mul_u32(team, TEAM * 32))
    to = (out, b_decode, e0, e1, e2, e3)
    codes = (out_scales, out_decode, out_tile_starts, out_tiles)
    a_rows = (row_indices, input_rows)
    ranges = (expert_ids, tile_starts, table, groups, experts, tiles, rows)
    # Scratch of the table is used no more: all threads have met behind it.
    sums_at = add_u32(base, mul_u32(team, 2 * TEAM * sum_bytes()))
    notes = add_u32(add_u32(base, 2 * WARPS * sum_bytes()), mul_u32(warp, NOTES))
    item = add_u32(mul_u32(u32_of_i64(cuda.blockIdx.x), WARPS // TEAM), team)
    slots = empty_slots()
    ahead = AHEAD
    ready = False
    while not ready:
        # Before the kernels ahead in the stream have ended, if AHEAD: weights are not theirs, and
        # ranges are looked at again.
        ends = (groups - groups, groups - groups)
        if GROUPED:
            if AHEAD:
                ends = ends_of_thread(row_offsets, groups, thread)
                make_table_of_ranges(row_offsets, groups, rows, table, base, thread, ends)
            else:
                make_table(row_offsets, groups, rows, table, base, thread)
            items = mul_u32(chunk_count(u32_of_i64(groups), table), across)
        if lt_u32(item, items):
            # Weights are always on their way: a step's registers take a later step's as soon as
            # they are used, those of the next item while the sums of this one are made ready.
            here = at_pass(locate(item, across, ranges, lane), 0)
            run = run_of(here, matrix, steps, first_step, apart)
            put_note(notes, here, run, item, lane)
            if ne_u32(steps, 0):
                slots = load_slots(b, b_scales, place_of(run, lane))
        ready = True
        if AHEAD:
            if ahead:
                griddepcontrol_wait()
                griddepcontrol_launch_dependents()
                if GROUPED:
                    ready = not has_changed(row_offsets, groups, rows, thread, ends)
            ahead = False
    mine = (items, first_step, batches, of_last)
    put_facts(notes, mine, (across, apart, row_blocks, steps), lane, member)
    turns = u32_of_i64(0)  # passes made of the item
    phase = turns  # which note, and which place of sums, is this item's
    goes_on = lt_u32(item, items)
    while goes_on:
        syncwarp(WARP)
        facts = add_u32(notes, FACTS)
        lane = unknown(lane, notes)
        g = shr_u32(lane, 2)
        note = add_u32(notes, mul_u32(phase, NOTE))
        other_note = add_u32(notes, mul_u32(xor_u32(phase, 1), NOTE))
        here = noted(note)
        _, _, first, count, _, tile_row = here
        row0 = row_of_item(a_rows, g, count, first, tile_row, a_stride)
        row1 = row0
        if CHUNK == 16:
            row1 = row_of_item(a_rows, add_u32(g, 8), count, first, tile_row, a_stride)
        x_first = shl_u32(ld_shared_u32(add_u32(facts, 4)), 6)
        x_first = add_u32(x_first, shl_u32(and_u32(lane, 3), 3))
        x = rows_from(row0, row1, i64_of_u32(x_first))
        following = item_behind(notes, note, turns)
        if lt_u32(following, ld_shared_u32(facts)):
            across, apart, row_blocks, steps = ld_shared_v4_u32(add_u32(facts, 16))
            first_step = ld_shared_u32(add_u32(facts, 4))
            then = at_pass(locate(following, across, ranges, lane), xor_u32(turns, 1))
            run = run_of(then, mul_u32(row_blocks, steps), steps, first_step, apart)
            put_note(other_note, then, run, following, lane)
        zeros = (ZERO, ZERO, ZERO, ZERO)
        sums = (zeros, zeros, zeros, zeros, False)
        batch, of_last = ld_shared_v2_u32(add_u32(facts, 8))
        place = place_of(noted_run(note), lane)
        while lt_u32(1, batch):
            forward = steps_ahead(batch, of_last)
            place = place_ahead(place, forward)
            slots, sums = full_batch(a, a_scales, b, b_scales, x, slots, sums, place, depth)
            x = rows_ahead(x, forward)
            batch = sub_u32(batch, 1)
        if depth > 0:
            syncwarp(WARP)
            note = add_u32(notes, mul_u32(phase, NOTE))
            other_note = add_u32(notes, mul_u32(xor_u32(phase, 1), NOTE))
            goes_on = lt_u32(item_behind(notes, note, turns), ld_shared_u32(add_u32(notes, FACTS)))
            if GROUPED:
                lane = unknown(lane, notes)
                g = shr_u32(lane, 2)
            if goes_on:
                then_at = place_of(noted_run(other_note), lane)
                slots, sums = last_batch(
                    a, a_scales, b, b_scales, x, slots, sums, then_at, depth, of_last
                )
            else:
                sums = bare_batch(a, a_scales, x, slots, sums, depth, of_last)
        rebase = ZERO
        of_matrix = ZERO
        note = add_u32(notes, mul_u32(phase, NOTE))
        expert = noted_expert(note)
        if expert >= 0:
            row_blocks, steps = ld_shared_v2_u32(add_u32(notes, FACTS + 24))
            records = matrix_records(i64_of_u32(row_blocks), i64_of_u32(steps))
            rebase = factor_of_matrix(b_scales, expert * records)
            of_matrix = decode_of_matrix(b_decode, expert)
        c0, c1, d0, d1, extreme = sums
        turn = add_u32(sums_at, mul_u32(phase, TEAM * sum_bytes()))
        if GROUPED:
            member = ld_shared_u32(add_u32(notes, AGAIN + 12))
            index = add_u32(shl_u32(member, 5), lane)
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
        here = noted(note)
        factors = (alpha, alpha_number, a_decode, rebase, of_matrix)
        if OUTPUT != "codes":
            finish(to, (turn, turn), a_rows, factors, here, columns, index)
        elif PASSES == 1:
            finish_codes(to, codes, ranges, (turn, turn), a_rows, factors, here, columns, index)
        elif ne_u32(turns, 0):
            expert, owner, first, count, block, tile_row = here
            whole = (expert, owner, first, count, shr_u32(block, 1), tile_row)
            other = add_u32(sums_at, mul_u32(xor_u32(phase, 1), TEAM * sum_bytes()))
            finish_codes(to, codes, ranges, (other, turn), a_rows, factors, whole, columns, index)
            meet(team)  # both places of sums have been read, and the next pass takes one
        if extreme | ((here[0] >= 0) & (rebase == ZERO)):
            put_again(notes, select_u32(extreme, 3, 1), lane)
        goes_on = lt_u32(item_behind(notes, note, turns), ld_shared_u32(add_u32(notes, FACTS)))
        # The next item leaves its sums elsewhere; the one after it behind another barrier.
        phase = xor_u32(phase, 1)
        if PASSES == 2:
            turns = xor_u32(turns, 1)
    syncwarp(WARP)
    again = ld_shared_u32(add_u32(notes, AGAIN))
    if ne_u32(again, 0):
        # What cannot be right is written again. Here, where no register is short.
        items = ld_shared_u32(add_u32(notes, FACTS))
        across = ld_shared_u32(add_u32(notes, FACTS + 16))
        if GROUPED:
            thread = unknown(thread, notes)
            team = div_u32(shr_u32(thread, 5), TEAM)
            index = sub_u32(thread, mul_u32(team, TEAM * 32))
        item = add_u32(mul_u32(u32_of_i64(cuda.blockIdx.x), WARPS // TEAM), team)
        beyond = ld_shared_u32(add_u32(notes, AGAIN + 8))
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
    return table + 2 * warps * (stripes * chunk * PITCH * 4) + warps * NOTES


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
    "SLOTS": (1, 2, 3, 4),
    "PASSES": (1, 2),
    "AHEAD": (True, False),
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
        **{"TEAM": warps, "STRIPES": 1, "SLOTS": 4, "EVEN": True, "PASSES": 1, "AHEAD": False},
        **{"ELEMENT": "e2m1", "SCALE": "e8m0", "LAYOUT": "linear", "STARTS": "none"},
        **{"ROUNDING": "rceil", "UNIT": True},
        **{"THREADS": warps * 32, "BLOCKS_PER_SM": 32 // warps if chunk == 8 else 24 // warps},
        **more,
    }


#: Constants of a quantised result whose blocks are of 32 columns.
CODES_VARIANT: dict = {"OUTPUT": "codes", "ELEMENT": "e4m3", "LAYOUT": "tcgen", "STARTS": "int32"}
_NVFP4_CODES = CODES_VARIANT | {"ELEMENT": "e2m1", "SCALE": "e4m3", "STARTS": "none"}
_COUNTED_CODES: dict = {"SLOTS": 2, "OFFSETS": "counts_int32", **_NVFP4_CODES}
_QUANTIZED_A: dict = {"A_ELEMENT": "e4m3", "A_LAYOUT": "tcgen", "DECODE_A": "group", "IDS": "int32"}
_SMALL_TEAMS: dict = {"AHEAD": True, "warps": 6, "TEAM": 3, "STRIPES": 2, "SLOTS": 3}
_SMALL_BLOCKS: dict = {"AHEAD": True, "warps": 4, "STRIPES": 2, "SLOTS": 2, "GROUPED": False}
VARIANTS = {
    "matmul_decode": (
        variant(ARCHITECTURES=("sm_80", "sm_89")),
        variant(AHEAD=True, ARCHITECTURES=("sm_90a",)),
        variant(AHEAD=True, SLOTS=3, ARCHITECTURES=("sm_100a",)),
        variant(**_SMALL_TEAMS, BLOCKS_PER_SM=4, ARCHITECTURES=("sm_90a",)),
        variant(**_SMALL_BLOCKS, BLOCKS_PER_SM=7, ARCHITECTURES=("sm_90a",)),
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
        variant(**_COUNTED_CODES, BLOCKS_PER_SM=3, ARCHITECTURES=("sm_80", "sm_90a", "sm_120a")),
        variant(**_COUNTED_CODES, BLOCKS_PER_SM=2, ARCHITECTURES=("sm_100a",)),
    ),
}
