"""Products of a few rows with prepared weights, at the speed of memory: ``mma.sync`` of bfloat16.

The weights are the first operand of the tensor cores, the rows the second: an item of work is 16
rows of a weight matrix and CHUNK rows of A. The warps of a block share the depth, steps of 64
columns in runs that depend on the depth alone, read their weights straight to registers, and add
up what they have in shared memory, in the order of the warps: so the bytes of a row depend neither
on the other rows nor on the grid. Blocks stay, and take every gridDim.x-th item.

Matrices whose scales could not be rebased, and blocks of A with scales that bfloat16 does not hold,
are multiplied one element after the other, as ``matmul_naive`` does.

Constraints: ALIGNED; B prepared (docs/decisions.md D13); rows below 2^31; OUTPUT is not "codes";
with PAIR "halves", half of the columns a multiple of 16. Grid: any number of blocks. Shared memory:
:func:`shared_bytes`.

Compile-time constants: those of ``grouped_matmul_naive`` for operands and epilogue; GROUPED; CHUNK,
rows of A of an item, 8 or 16; WARPS; WHOLE, whether the depth is a multiple of 64.
"""

from __future__ import annotations

import functools

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import (
    add_rn,
    add_u32,
    and_u32,
    div_u32,
    ge_u32,
    i64_of_u32,
    lt_u32,
    mad_u32,
    min_u32,
    mul_rn,
    mul_u32,
    ne_u32,
    rem_u32,
    select_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.memory import ld_shared_f32, ld_shared_u32, shared_base, st_shared_f32
from ..ptx.mma import mma_m16n8k16_bf16
from .activations import chunk, may_be_extreme, row_bytes
from .elements import store_one
from .groups import expert_of, load_index, row_of_none, source_row
from .matmul_naive import grouped_matmul_kernel
from .mma_tiles import lower_half, upper_half
from .prepared_mma import (
    HEADER,
    factor_of_matrix,
    fragments,
    load_codes,
    load_record,
    matrix_codes,
    matrix_records,
    multipliers,
    record_bytes,
    record_place,
    step_bytes,
)
from .products import (
    decode_of_b,
    epilogue,
    factor_of_row,
    pair_epilogue,
    result_columns,
)
from .schedule import chunk_count, make_table, range_of_chunk, rows_of_chunk, table_bytes

A_ELEMENT = "none"
A_LAYOUT = "linear"
A_STARTS = "none"
INPUT = "bfloat16"
PAIR = "none"
GROUPED = True
CHUNK = 8
WARPS = 8
WHOLE = True

ZERO = np.float32(0.0)
#: Floats from one row of A to the next in what a warp leaves in shared memory: 16 would make four
#: lanes meet in each bank.
PITCH = 20


def parts():
    """Blocks of 16 weight rows of an item: gate and up have one each."""
    if PAIR == "halves":
        return 2
    else:
        return 1


def part_floats():
    """Floats of the sums of all warps for one part."""
    return WARPS * CHUNK * PITCH


# Sums --------------------------------------------------------------------------------------------


def row_words(a, a_scales, at, scale_row, column, depth):
    """Eight elements from a column, zeros beyond the depth."""
    if WHOLE:
        return chunk(a, a_scales, at, scale_row, i64_of_u32(column), depth)
    else:
        none = sub_u32(column, column)
        words = (none, none, none, none)
        extreme = False
        if i64_of_u32(column) < depth:
            words, extreme = chunk(a, a_scales, at, scale_row, i64_of_u32(column), depth)
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
    c = mma_m16n8k16_bf16(w[0], (low[0], high[0]), c)
    c = mma_m16n8k16_bf16(w[1], (low[1], high[1]), c)
    c = mma_m16n8k16_bf16(w[2], (low[2], high[2]), c)
    return mma_m16n8k16_bf16(w[3], (low[3], high[3]), c)


def add_row_products(w, a, a_scales, row, column, depth, c):
    """The products of a step with the eight rows of which this lane's quad has one."""
    low, one = row_words(a, a_scales, row[0], row[1], column, depth)
    high, other = row_words(a, a_scales, row[0], row[1], add_u32(column, 32), depth)
    if A_ELEMENT == "none" and INPUT == "float16":
        low, low_rest = halves(low)
        high, high_rest = halves(high)
        c = add_products(w, low_rest, high_rest, c)
    return add_products(w, low, high, c), one | other


def step(codes, record, a, a_scales, row0, row1, column, depth, c0, c1, extreme):
    """The products of a step with all rows of an item."""
    w = fragments(codes, multipliers(record))
    c0, some = add_row_products(w, a, a_scales, row0, column, depth, c0)
    extreme = extreme | some
    if CHUNK == 16:
        c1, some = add_row_products(w, a, a_scales, row1, column, depth, c1)
        extreme = extreme | some
    return c0, c1, extreme


def sums(b, b_scales, code, record, left, a, a_scales, row0, row1, x, depth):
    """Sums of a lane over a run of `left` steps; `x` is its first column."""
    c0 = (ZERO, ZERO, ZERO, ZERO)
    c1 = c0
    extreme = False
    while ge_u32(left, 4):
        q0 = load_codes(b, code)
        q1 = load_codes(b, code + step_bytes())
        q2 = load_codes(b, code + 2 * step_bytes())
        q3 = load_codes(b, code + 3 * step_bytes())
        s0 = load_record(b_scales, record)
        s1 = load_record(b_scales, record + record_bytes())
        s2 = load_record(b_scales, record + 2 * record_bytes())
        s3 = load_record(b_scales, record + 3 * record_bytes())
        x1 = add_u32(x, 64)
        x2 = add_u32(x, 128)
        x3 = add_u32(x, 192)
        c0, c1, extreme = step(q0, s0, a, a_scales, row0, row1, x, depth, c0, c1, extreme)
        c0, c1, extreme = step(q1, s1, a, a_scales, row0, row1, x1, depth, c0, c1, extreme)
        c0, c1, extreme = step(q2, s2, a, a_scales, row0, row1, x2, depth, c0, c1, extreme)
        c0, c1, extreme = step(q3, s3, a, a_scales, row0, row1, x3, depth, c0, c1, extreme)
        code += 4 * step_bytes()
        record += 4 * record_bytes()
        x = add_u32(x, 256)
        left = sub_u32(left, 4)
    if ne_u32(left, 0):
        # One to three steps; what is beyond them is the last once more, and not used.
        second = i64_of_u32(min_u32(1, sub_u32(left, 1)))
        third = i64_of_u32(min_u32(2, sub_u32(left, 1)))
        q0 = load_codes(b, code)
        q1 = load_codes(b, code + second * step_bytes())
        q2 = load_codes(b, code + third * step_bytes())
        s0 = load_record(b_scales, record)
        s1 = load_record(b_scales, record + second * record_bytes())
        s2 = load_record(b_scales, record + third * record_bytes())
        c0, c1, extreme = step(q0, s0, a, a_scales, row0, row1, x, depth, c0, c1, extreme)
        if ge_u32(left, 2):
            x = add_u32(x, 64)
            c0, c1, extreme = step(q1, s1, a, a_scales, row0, row1, x, depth, c0, c1, extreme)
        if ge_u32(left, 3):
            x = add_u32(x, 64)
            c0, c1, extreme = step(q2, s2, a, a_scales, row0, row1, x, depth, c0, c1, extreme)
    return c0, c1, extreme


def leave(base, row, g, c):
    """Leave the sums of eight rows of A in shared memory, each row's 16 side by side."""
    at = add_u32(base, mul_u32(add_u32(mul_u32(row, PITCH), g), 4))
    st_shared_f32(at, c[0])
    st_shared_f32(add_u32(at, 4 * PITCH), c[1])
    st_shared_f32(add_u32(at, 32), c[2])
    st_shared_f32(add_u32(at, 4 * PITCH + 32), c[3])


def total(base, row, n):
    """The sum of all warps for a row of A and one of 16 rows of weights."""
    at = add_u32(base, mul_u32(add_u32(mul_u32(row, PITCH), n), 4))
    value = ld_shared_f32(at)
    for warp in range(1, WARPS):
        value = add_rn(value, ld_shared_f32(add_u32(at, warp * CHUNK * PITCH * 4)))
    return value


# Items -------------------------------------------------------------------------------------------


def row_of_item(a_rows, local, count, first, tile_row, a_stride):
    """Where the row of A of number `local` begins, in bytes, and the row of its scales.

    Beyond the count, and where there is no such row, any row: its sums are not used.
    """
    row_indices, input_rows = a_rows
    local = min_u32(local, sub_u32(count, 1))
    row = i64_of_u32(add_u32(first, local))
    source = max(source_row(row_indices, row, input_rows), 0)
    scale_row = source
    if A_LAYOUT == "tcgen":
        scale_row = tile_row + i64_of_u32(local)
    return source * row_bytes(a_stride), scale_row


def store_value(to, row, column, columns, expert, sums0, sums1, factors, source, owner):
    """Finish and store a value of the result; of pairs, `sums1` belongs to up."""
    out, b_decode, e0, e1, e2, e3 = to
    alpha, alpha_number, a_decode, rebase = factors
    width = result_columns(columns)
    factor = factor_of_row(alpha, alpha_number, a_decode, expert, source, owner)
    if PAIR == "none":
        v = mul_rn(sums0, rebase)
        v = mul_rn(v, mul_rn(factor, decode_of_b(b_decode, expert, column, columns)))
        v = np.float32(epilogue(v, row, column, expert, e0, e1, e2, e3))
    else:
        if PAIR == "halves":
            gate_row = column
            up_row = column + width
        else:
            gate_row = column * 2
            up_row = column * 2 + 1
        gate = mul_rn(sums0, rebase)
        gate = mul_rn(gate, mul_rn(factor, decode_of_b(b_decode, expert, gate_row, columns)))
        up = mul_rn(sums1, rebase)
        up = mul_rn(up, mul_rn(factor, decode_of_b(b_decode, expert, up_row, columns)))
        v = np.float32(pair_epilogue(gate, up, row, column, expert, e0, e1, e2, e3))
    store_one(out, row * width + column, v)


def width_of_item():
    """Columns of the result of an item."""
    if PAIR == "interleaved":
        return 8
    else:
        return 16


def finish(to, base, a_rows, factors, first, count, block, columns, expert, owner, slowly):
    """Add up what the warps have left of an item, and store the results."""
    row_indices, input_rows = a_rows
    width = result_columns(columns)
    i = cuda.threadIdx.x + 0
    while i < CHUNK * width_of_item():
        local = i // width_of_item()
        n = i % width_of_item()
        column = i64_of_u32(block) * width_of_item() + n
        if local < i64_of_u32(count) and column < width:
            row = i64_of_u32(first) + local
            source = source_row(row_indices, row, input_rows)
            if source < 0:
                store_one(to[0], row * width + column, ZERO)
            else:
                r = u32_of_i64(local)
                if PAIR == "interleaved":
                    s0 = total(base, r, u32_of_i64(n * 2))
                    s1 = total(base, r, u32_of_i64(n * 2 + 1))
                elif PAIR == "halves":
                    s0 = total(base, r, u32_of_i64(n))
                    s1 = total(add_u32(base, part_floats() * 4), r, u32_of_i64(n))
                else:
                    s0 = total(base, r, u32_of_i64(n))
                    s1 = s0
                owner64 = i64_of_u32(owner)
                store_value(to, row, column, columns, expert, s0, s1, factors, source, owner64)
        i += WARPS * 32


def blank(out, first, count, block, width):
    """Write an item of zeros."""
    i = cuda.threadIdx.x + 0
    while i < CHUNK * width_of_item():
        column = i64_of_u32(block) * width_of_item() + i % width_of_item()
        local = i // width_of_item()
        if local < i64_of_u32(count) and column < width:
            store_one(out, (i64_of_u32(first) + local) * width + column, ZERO)
        i += WARPS * 32


def blank_rows_of_none(out, table, groups, rows, width):
    """Write zeros to the rows that belong to no range."""
    head = i64_of_u32(ld_shared_u32(table))
    tail = i64_of_u32(ld_shared_u32(add_u32(table, shl_u32(u32_of_i64(groups), 4))))
    k = cuda.blockIdx.x + 0
    row = row_of_none(k, head, tail)
    while row < rows:
        column = cuda.threadIdx.x + 0
        while column < width:
            store_one(out, row * width + column, ZERO)
            column += WARPS * 32
        k += cuda.gridDim.x
        row = row_of_none(k, head, tail)


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
):
    griddepcontrol_wait()
    griddepcontrol_launch_dependents()
    thread = u32_of_i64(cuda.threadIdx.x)
    warp = shr_u32(thread, 5)
    lane = and_u32(thread, 31)
    g = shr_u32(lane, 2)
    table = shared_base()
    base = table
    across = div_u32(shr_u32(add_u32(u32_of_i64(columns), 15), 4), parts())
    steps = shr_u32(add_u32(u32_of_i64(depth), 63), 6)
    if GROUPED:
        base = add_u32(table, u32_of_i64(table_bytes(groups)))
        make_table(row_offsets, groups, rows, table, thread)
        items = mul_u32(chunk_count(u32_of_i64(groups), table), across)
    else:
        items = mul_u32(div_u32(add_u32(u32_of_i64(rows), CHUNK - 1), CHUNK), across)
    # Steps of this warp: the first ones have one more.
    share = div_u32(steps, WARPS)
    rest = sub_u32(steps, mul_u32(share, WARPS))
    first_step = add_u32(mul_u32(warp, share), min_u32(warp, rest))
    share = add_u32(share, select_u32(lt_u32(warp, rest), 1, 0))
    to = (out, b_decode, e0, e1, e2, e3)
    a_rows = (row_indices, input_rows)
    item = u32_of_i64(cuda.blockIdx.x)
    turn = base
    other = add_u32(base, parts() * part_floats() * 4)
    while lt_u32(item, items):
        expert = 0
        owner = sub_u32(item, item)
        tile_row = 0
        if GROUPED:
            owner = range_of_chunk(u32_of_i64(groups), table, div_u32(item, across))
            entry = add_u32(table, shl_u32(owner, 4))
            start = ld_shared_u32(entry)
            length = sub_u32(ld_shared_u32(add_u32(entry, 16)), start)
            first_chunk = ld_shared_u32(add_u32(entry, 4))
            chunks = sub_u32(ld_shared_u32(add_u32(entry, 20)), first_chunk)
            # Chunks of a range that share weights come one after the other.
            place = sub_u32(item, mul_u32(first_chunk, across))
            block = div_u32(place, chunks)
            skip, count = rows_of_chunk(length, chunks, rem_u32(place, chunks))
            first = add_u32(start, skip)
            expert = expert_of(expert_ids, i64_of_u32(owner), experts)
            if A_LAYOUT == "tcgen":
                tile = i64_of_u32(ld_shared_u32(add_u32(entry, 8)))
                if A_STARTS != "none":
                    tile = load_index(tile_starts, i64_of_u32(owner), A_STARTS)
                if tile < 0 or tile + ((i64_of_u32(length) + 127) >> 7) > tiles:
                    expert = -1
                tile_row = (tile << 7) + i64_of_u32(skip)
        else:
            chunk_number = div_u32(item, across)
            block = sub_u32(item, mul_u32(chunk_number, across))
            first = mul_u32(chunk_number, CHUNK)
            count = min_u32(sub_u32(u32_of_i64(rows), first), CHUNK)
            tile_row = i64_of_u32(first)
        if expert >= 0:
            row_blocks = (columns + 15) // 16
            record_at = expert * matrix_records(row_blocks, i64_of_u32(steps))
            row0 = row_of_item(a_rows, g, count, first, tile_row, a_stride)
            row1 = row0
            if CHUNK == 16:
                row1 = row_of_item(a_rows, add_u32(g, 8), count, first, tile_row, a_stride)
            extreme = False
            for part in range(parts()):
                stripe = i64_of_u32(
                    mad_u32(add_u32(block, mul_u32(part, across)), steps, first_step)
                )
                code = expert * matrix_codes(row_blocks, i64_of_u32(steps))
                code += stripe * step_bytes() + i64_of_u32(lane) * 16
                record = record_at + HEADER + stripe * record_bytes() + record_place(lane)
                x = add_u32(shl_u32(first_step, 6), shl_u32(and_u32(lane, 3), 3))
                c0, c1, some = sums(
                    b, b_scales, code, record, share, a, a_scales, row0, row1, x, depth
                )
                extreme = extreme | some
                mine = add_u32(turn, mul_u32(warp, CHUNK * PITCH * 4))
                mine = add_u32(mine, part * part_floats() * 4)
                pair = shl_u32(and_u32(lane, 3), 1)
                leave(mine, pair, g, c0)
                if CHUNK == 16:
                    leave(mine, add_u32(pair, 8), g, c1)
            if may_be_extreme():
                extreme = cuda.syncthreads_or(np.int32(extreme)) != 0
            else:
                cuda.syncthreads()
            rebase = factor_of_matrix(b_scales, record_at)
            factors = (alpha, alpha_number, a_decode, rebase)
            slowly = extreme | (rebase == ZERO)
            finish(to, turn, a_rows, factors, first, count, block, columns, expert, owner, slowly)
        else:
            blank(out, first, count, block, result_columns(columns))
        # The next item leaves its sums elsewhere; the one after it behind another barrier.
        turn, other = other, turn
        item = add_u32(item, u32_of_i64(cuda.gridDim.x))
    if GROUPED:
        blank_rows_of_none(out, table, groups, rows, result_columns(columns))


# Kernels -----------------------------------------------------------------------------------------


def shared_bytes(chunk: int, warps: int, groups: int | None, pair: str) -> int:
    """Bytes of shared memory of a block; `groups` is None in a dense product."""
    table = 0 if groups is None else table_bytes(groups)
    return table + 2 * (2 if pair == "halves" else 1) * warps * chunk * PITCH * 4


_SHARED_WITH_NAIVE = (
    *("A_ELEMENT", "A_SCALE", "A_LAYOUT", "B_ELEMENT", "B_SCALE", "INPUT"),
    *("ALPHA", "DECODE_A", "DECODE_B", "PAIR", "OFFSETS", "IDS", "INDICES", "A_STARTS"),
)
_HERE = {
    "OUTPUT": ("bfloat16", "float16", "float32"),
    "GROUPED": (True, False),
    "CHUNK": (8, 16),
    "WARPS": (2, 4, 8, 16),
    "WHOLE": (True, False),
    "THREADS": (64, 128, 256, 512),
    "BLOCKS_PER_SM": (1, 2, 3, 4, 6, 8, 12, 16),
}


@functools.cache
def matmul_decode_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The kernel for an epilogue with arrays of these dtypes."""
    like = grouped_matmul_kernel(arrays)
    operands, rest = like.parameters[:12], like.parameters[16:]
    return Kernel(
        "matmul_decode",
        matmul_decode,
        (*operands, "u8*", *rest[:-1]),
        {name: like.constants[name] for name in _SHARED_WITH_NAIVE} | _HERE,
    )


MATMUL_DECODE = matmul_decode_kernel()


def variant(
    b: str = "mxfp4", a: str = "bfloat16", chunk: int = 8, warps: int = 8, **more: object
) -> dict:
    """Constants of a usual program, to be changed by name."""
    scale = "e4m3" if b == "nvfp4" else "e8m0"
    return {
        **{"A_ELEMENT": "none", "A_SCALE": "e8m0", "A_LAYOUT": "linear", "INPUT": a},
        **{"B_ELEMENT": "e2m1" if b.endswith("fp4") else b[-4:], "B_SCALE": scale},
        **{"ALPHA": "value", "DECODE_A": "none", "DECODE_B": "batch", "PAIR": "none"},
        **{"OFFSETS": "int32", "IDS": "none", "INDICES": "int32", "A_STARTS": "none"},
        **{"OUTPUT": "bfloat16", "GROUPED": True, "CHUNK": chunk, "WARPS": warps, "WHOLE": True},
        **{"THREADS": warps * 32, "BLOCKS_PER_SM": 32 // warps if chunk == 8 else 24 // warps},
        **more,
    }


_QUANTIZED_A = {"A_ELEMENT": "e4m3", "A_LAYOUT": "tcgen", "DECODE_A": "group", "IDS": "int32"}
VARIANTS = {
    "matmul_decode": (
        variant(),
        variant("nvfp4", chunk=16),
        variant("mxfp8_e4m3", GROUPED=False, DECODE_B="scalar", INDICES="none"),
        variant("mxfp8_e5m2", "float16", WHOLE=False, PAIR="interleaved"),
        variant(INDICES="none", PAIR="halves", **_QUANTIZED_A, BLOCKS_PER_SM=2),
    ),
}
