"""Steps of ``matmul_decode``: weights on their way to registers, rows of A, their products.

A step is 64 columns of 16 rows of a matrix, a *stripe* (docs/decisions.md D13). A warp has a run of
them, SLOTS at a time, whose registers take later steps as soon as they are used.

Compile-time constants: those of ``activations`` and ``prepared_mma``; CHUNK, SLOTS, STRIPES, EVEN,
WHOLE as in ``matmul_decode``.
"""

from __future__ import annotations

from .._numba import cuda
from ..ptx.arith import (
    add_u32,
    div_u32,
    i64_of_u32,
    lt_u32,
    mul_u32,
    select_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.memory import prefetch_l2
from ..ptx.mma import mma_m16n8k16_bf16
from .activations import chunk, row_bytes
from .mma_tiles import lower_half, upper_half
from .prepared_mma import (
    code_place,
    fragments,
    load_codes,
    load_record,
    multipliers,
    record_bytes,
    record_place,
    step_bytes,
)
from .products import row_units

A_ELEMENT = "none"
B_ELEMENT = "e2m1"
INPUT = "bfloat16"
CHUNK = 8
SLOTS = 4
STRIPES = 1
EVEN = True
WHOLE = True
THREADS = 256


# Rows of A ---------------------------------------------------------------------------------------


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


def rows_of_step(a, a_scales, rows, i, depth):
    """What a lane has of the rows of an item for a step, `i` steps from where they are."""
    row0, row1, x = rows
    if moves():
        column = x - x + i * 64
    else:
        column = x + i * 64
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


def moves():
    """Whether places in rows go along with the steps, instead of a column."""
    if A_ELEMENT == "none" and WHOLE:
        return True
    else:
        return False


def rows_from(row0, row1, x):
    """The rows of an item as a lane reads them from column `x` on."""
    if moves():
        return (row0[0] + x * 2, row0[1]), (row1[0] + x * 2, row1[1]), x
    else:
        return row0, row1, x


def rows_ahead(rows, steps):
    """The same, so many steps on."""
    row0, row1, x = rows
    if moves():
        return (row0[0] + steps * 128, row0[1]), (row1[0] + steps * 128, row1[1]), x
    else:
        return row0, row1, x + steps * 64


def fetch_rows(a, input_rows, depth, a_stride, thread):
    """Let the rows of A come to the second level cache, a line a thread of the grid.

    This may be done while they are still written: no value is read.
    """
    line = add_u32(u32_of_i64(cuda.blockIdx.x * THREADS), thread)
    lines = shr_u32(add_u32(u32_of_i64(row_bytes(row_units(depth, A_ELEMENT))), 127), 7)
    row = div_u32(line, lines)
    if i64_of_u32(row) < input_rows:
        in_row = sub_u32(line, mul_u32(row, lines))
        prefetch_l2(a, i64_of_u32(row) * row_bytes(a_stride) + i64_of_u32(shl_u32(in_row, 7)))


# Products ----------------------------------------------------------------------------------------


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


def add_stripe(codes, record, x, c0, c1):
    """The products of a step of a stripe with all rows of an item."""
    scales = multipliers(record)
    w = fragments(codes, scales, scales)
    c0 = add_row_products(w, x[0], x[1], c0)
    if CHUNK == 16:
        c1 = add_row_products(w, x[2], x[3], c1)
    return c0, c1


def add_step(slot, x, sums):
    """The products of a step of all stripes of an item."""
    q, s, r, t = slot
    c0, c1, d0, d1, extreme = sums
    c0, c1 = add_stripe(q, s, x, c0, c1)
    if STRIPES == 2:
        d0, d1 = add_stripe(r, t, x, d0, d1)
    return c0, c1, d0, d1, extreme | x[4]


# Weights -----------------------------------------------------------------------------------------


def place_of(run, lane):
    """Where a lane's codes and its scales of the first step of a run are, in bytes; twice.

    A run begins at step `at` of all, behind headers of so many bytes; that of the second stripe is
    `far` steps behind it.
    """
    at, header, far = run
    code = i64_of_u32(at) * step_bytes() + i64_of_u32(code_place(lane))
    record = i64_of_u32(at) * record_bytes() + i64_of_u32(header) + record_place(lane)
    if STRIPES == 2:
        far = i64_of_u32(far)
        return code, record, code + far * step_bytes(), record + far * record_bytes()
    else:
        return code, record, code, record


def place_ahead(place, steps):
    """The same, so many steps on."""
    q, s, r, t = place
    codes = steps * step_bytes()
    records = steps * record_bytes()
    return q + codes, s + records, r + codes, t + records


def load_slot(b, b_scales, place, i):
    """A lane's codes and scales of step `i` of a run that is at `place`, of both stripes."""
    code, record, far_code, far_record = place
    q = load_codes(b, code + i * step_bytes())
    s = load_record(b_scales, record + i * record_bytes())
    r, t = q, s
    if STRIPES == 2:
        r = load_codes(b, far_code + i * step_bytes())
        t = load_record(b_scales, far_record + i * record_bytes())
    return q, s, r, t


def empty_slots():
    """Of the types of :func:`load_slots`."""
    none = u32_of_i64(0)
    codes = (none, none, none, none)
    if B_ELEMENT != "e2m1":
        codes = (none, none, none, none, none, none, none, none)
    slot = (codes, none, codes, none)
    return slot, slot, slot, slot


def load_slots(b, b_scales, place):
    """The first SLOTS steps of a run."""
    s0 = load_slot(b, b_scales, place, 0)
    s1, s2, s3 = s0, s0, s0
    if SLOTS >= 2:
        s1 = load_slot(b, b_scales, place, 1)
    if SLOTS >= 3:
        s2 = load_slot(b, b_scales, place, 2)
    if SLOTS >= 4:
        s3 = load_slot(b, b_scales, place, 3)
    return s0, s1, s2, s3


# Batches -----------------------------------------------------------------------------------------


def steps_ahead(batches_left, rest):
    """Steps from a batch to the next one. The last has `rest` new ones, behind others once more."""
    if EVEN:
        return SLOTS
    else:
        return i64_of_u32(select_u32(lt_u32(batches_left, 3), rest, SLOTS))


def is_new(i, rest):
    """Whether step `i` of the last batch, which has `rest` new ones, is one of them."""
    if EVEN:
        return True
    else:
        return lt_u32(SLOTS - 1 - i, rest)


def full_batch(a, a_scales, b, b_scales, rows, slots, sums, place, depth):
    """A batch that is followed by one of the same item, which is at `place`."""
    s0, s1, s2, s3 = slots
    sums = add_step(s0, rows_of_step(a, a_scales, rows, 0, depth), sums)
    s0 = load_slot(b, b_scales, place, 0)
    if SLOTS >= 2:
        sums = add_step(s1, rows_of_step(a, a_scales, rows, 1, depth), sums)
        s1 = load_slot(b, b_scales, place, 1)
    if SLOTS >= 3:
        sums = add_step(s2, rows_of_step(a, a_scales, rows, 2, depth), sums)
        s2 = load_slot(b, b_scales, place, 2)
    if SLOTS >= 4:
        sums = add_step(s3, rows_of_step(a, a_scales, rows, 3, depth), sums)
        s3 = load_slot(b, b_scales, place, 3)
    return (s0, s1, s2, s3), sums


def last_batch(a, a_scales, b, b_scales, rows, slots, sums, place, depth, rest):
    """The last batch of an item, where another item follows, which is at `place`."""
    s0, s1, s2, s3 = slots
    if is_new(0, rest):
        sums = add_step(s0, rows_of_step(a, a_scales, rows, 0, depth), sums)
    s0 = load_slot(b, b_scales, place, 0)
    if SLOTS >= 2:
        if is_new(1, rest):
            sums = add_step(s1, rows_of_step(a, a_scales, rows, 1, depth), sums)
        s1 = load_slot(b, b_scales, place, 1)
    if SLOTS >= 3:
        if is_new(2, rest):
            sums = add_step(s2, rows_of_step(a, a_scales, rows, 2, depth), sums)
        s2 = load_slot(b, b_scales, place, 2)
    if SLOTS >= 4:
        if is_new(3, rest):
            sums = add_step(s3, rows_of_step(a, a_scales, rows, 3, depth), sums)
        s3 = load_slot(b, b_scales, place, 3)
    return (s0, s1, s2, s3), sums


def bare_batch(a, a_scales, rows, slots, sums, depth, rest):
    """The last batch of the last item: nothing more is loaded."""
    if is_new(0, rest):
        sums = add_step(slots[0], rows_of_step(a, a_scales, rows, 0, depth), sums)
    if SLOTS >= 2:
        if is_new(1, rest):
            sums = add_step(slots[1], rows_of_step(a, a_scales, rows, 1, depth), sums)
    if SLOTS >= 3:
        if is_new(2, rest):
            sums = add_step(slots[2], rows_of_step(a, a_scales, rows, 2, depth), sums)
    if SLOTS >= 4:
        if is_new(3, rest):
            sums = add_step(slots[3], rows_of_step(a, a_scales, rows, 3, depth), sums)
    return sums
