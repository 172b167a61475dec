"""A row of the result, by a row of threads: what ``fused`` does once it knows the row.

Where something of the whole row is needed first (the norm's sum of squares, the maximum of
"row_amax"), HOLD says where the row waits: in "registers" (PER pieces a thread), in "shared"
memory, or not at all ("reread": it is read, and made, again); "none": nothing is needed. Sums have
the order of ``golden.hidden``: a piece's squares one after the other, then trees within a
group of 32 pieces and within a chunk of 32 groups, then chunk after chunk.

A warp has a group: threads take pieces one beside the other, and rows of threads are whole warps.

Compile-time constants: those of ``fused_pieces``; HOLD, PER, TASK, ENCODE, COUNTS.
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..ptx.arith import (
    add_rn,
    add_u32,
    div_rn,
    max_nan_f32,
    mul_rn,
    rcp_rn,
    select_f32,
    shl_u32,
    sqrt_rn,
    u32_of_i64,
)
from ..ptx.bits import float_as_uint, uint_as_float
from ..ptx.memory import (
    ld_shared_f32,
    ld_shared_u32,
    ld_shared_v4_u32,
    shared_base,
    st_shared_f32,
    st_shared_u32,
    st_shared_v4_u32,
)
from ..ptx.warp import redux_max_u32, shfl_xor_f32
from .fused_pieces import (
    add_residual,
    amax_if,
    finish_dead,
    finish_live,
    front_piece,
    load_front,
    load_piece_written,
    load_residual,
    normalised_piece,
    piece_bytes,
    store_piece,
)
from .groups import load_index
from .hidden import squares, zero_half
from .scales import SIXTH, encode_scale_of_amax

INPUT = "bfloat16"
ENCODE = "none"
COUNTS = "none"
FRONT = "rms"
TASK = "quantize"
HOLD = "registers"
RESIDUAL = "none"
PER = 1

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
WARP = 0xFFFFFFFF
#: Shared memory of a row of threads: sums of 32 groups, maxima of up to 32 warps, the norm.
ROW_STATE = 288
MAXIMA = 128
INVERSE = 256
CHUNK = 1024  # pieces


# Shared memory -----------------------------------------------------------------------------------


def row_state():
    """Address of this row's part of the shared memory."""
    return add_u32(shared_base(), u32_of_i64(cuda.threadIdx.y * ROW_STATE))


def held_piece(piece, sizes):
    """Address of a piece of this row."""
    before = cuda.threadIdx.y * sizes[0] + piece
    return add_u32(shared_base(), u32_of_i64(cuda.blockDim.y * ROW_STATE + before * piece_bytes()))


def hold_half(address, raw):
    """Keep half a piece."""
    if INPUT == "float32":
        a = float_as_uint(raw[0])
        b = float_as_uint(raw[1])
        c = float_as_uint(raw[2])
        d = float_as_uint(raw[3])
        st_shared_v4_u32(address, a, b, c, d)
        a = float_as_uint(raw[4])
        b = float_as_uint(raw[5])
        c = float_as_uint(raw[6])
        d = float_as_uint(raw[7])
        st_shared_v4_u32(add_u32(address, 16), a, b, c, d)
    else:
        st_shared_v4_u32(address, raw[0], raw[1], raw[2], raw[3])


def held_half(address):
    """Half a piece that was kept."""
    if INPUT == "float32":
        a = ld_shared_v4_u32(address)
        b = ld_shared_v4_u32(add_u32(address, 16))
        return (
            uint_as_float(a[0]),
            uint_as_float(a[1]),
            uint_as_float(a[2]),
            uint_as_float(a[3]),
            uint_as_float(b[0]),
            uint_as_float(b[1]),
            uint_as_float(b[2]),
            uint_as_float(b[3]),
        )
    else:
        return ld_shared_v4_u32(address)


# Sums and maxima ---------------------------------------------------------------------------------


def sum_of_lanes(value):
    """Sum over a warp, halves of it added to each other."""
    value = add_rn(value, shfl_xor_f32(WARP, value, 16))
    value = add_rn(value, shfl_xor_f32(WARP, value, 8))
    value = add_rn(value, shfl_xor_f32(WARP, value, 4))
    value = add_rn(value, shfl_xor_f32(WARP, value, 2))
    return add_rn(value, shfl_xor_f32(WARP, value, 1))


def keep_squares(state, a, b, live, piece, sizes, group, groups):
    """Keep the sum of squares of this warp's group, one of `groups`."""
    mine = live & (piece < sizes[0])
    total = sum_of_lanes(select_f32(mine, squares(a, b), ZERO))
    if (cuda.threadIdx.x & 31) == 0 and group < groups:
        st_shared_f32(add_u32(state, u32_of_i64(group * 4)), total)


def chunk_sum(state, groups):
    """Sum of a chunk of so many groups, for the lanes of one warp."""
    total = ZERO
    lane = cuda.threadIdx.x & 31
    if lane < groups:
        total = ld_shared_f32(add_u32(state, u32_of_i64(lane * 4)))
    return sum_of_lanes(total)


def root_of_mean(total, pieces, eps):
    """1 / sqrt(total / columns + eps)."""
    mean = div_rn(total, np.float32(pieces << 4))
    return rcp_rn(sqrt_rn(add_rn(mean, eps)))


def keep_inverse(state, total, sizes, eps):
    """Keep the factor of the norm."""
    if cuda.threadIdx.x == 0:
        st_shared_f32(add_u32(state, INVERSE), root_of_mean(total, sizes[0], eps))


def inverse_of_row(state, sizes, eps):
    """The factor of the norm, of the sums of one chunk that the threads of a row have kept."""
    cuda.syncthreads()
    if cuda.threadIdx.x < 32:
        keep_inverse(state, chunk_sum(state, (sizes[0] + 31) >> 5), sizes, eps)
    cuda.syncthreads()
    return ld_shared_f32(add_u32(state, INVERSE))


def largest_of_row(amax):
    """The largest over the threads of a row; NaN if there is one."""
    at = add_u32(row_state(), MAXIMA)
    warp = cuda.threadIdx.x >> 5
    lane = cuda.threadIdx.x & 31
    # The patterns of magnitudes are ordered as the values, NaN above infinity.
    pattern = redux_max_u32(WARP, float_as_uint(amax))
    if lane == 0:
        st_shared_u32(add_u32(at, u32_of_i64(warp * 4)), pattern)
    cuda.syncthreads()
    pattern = shl_u32(0, 0)
    if lane < cuda.blockDim.x >> 5:
        pattern = ld_shared_u32(add_u32(at, u32_of_i64(lane * 4)))
    pattern = redux_max_u32(WARP, pattern)
    cuda.syncthreads()
    return uint_as_float(pattern)


# Rows --------------------------------------------------------------------------------------------


def rows_with_data(row_counts, batch, rows):
    """How many rows of a matrix count."""
    if COUNTS == "none":
        return rows
    else:
        return min(max(load_index(row_counts, batch, COUNTS), 0), rows)


def encode_factors(g):
    """RN(g * RN(1/6)) and RN(1/g)."""
    if ENCODE == "none":
        return SIXTH, ONE
    else:
        return mul_rn(g, SIXTH), rcp_rn(g)


def store_row_scale(decode_scale, row, r, written):
    """Store the decode scale of a row, where there is one a row."""
    if (ENCODE == "row" or ENCODE == "row_amax") and TASK == "quantize":
        if written and cuda.threadIdx.x == 0:
            decode_scale[row] = r


def finish_dead_row(outputs, places, sizes, written, stored):
    """A row without an input."""
    piece = cuda.threadIdx.x + 0
    while piece < sizes[1]:
        if RESIDUAL == "out":
            if written and piece < sizes[0]:
                place = places[2] + piece * piece_bytes()
                store_piece(outputs[0], place, zero_half(), zero_half())
        finish_dead(outputs, places, piece, sizes, written, stored)
        piece += cuda.blockDim.x


def finish(a, b, c, r, outputs, places, piece, sizes, stored):
    """Finish a piece of a row with an input; its largest magnitude for TASK "amax"."""
    if TASK == "amax":
        return amax_if(a, b, True, piece, sizes)
    else:
        finish_live(a, b, c, r, outputs, places, piece, sizes, stored)
        return ZERO


def row_at_once(inputs, outputs, decode_scale, g, eps, places, sizes, row, live, written, stored):
    """A row of which nothing need be known before: piece after piece."""
    c, r = encode_factors(g)
    store_row_scale(decode_scale, row, r, written)
    largest = ZERO
    if live:
        base = 0
        while base < sizes[1]:
            piece = base + cuda.threadIdx.x
            a, b = front_piece(inputs, outputs, places, piece, sizes)
            found = finish(a, b, c, r, outputs, places, piece, sizes, stored)
            largest = max_nan_f32(largest, found)
            base += cuda.blockDim.x
    elif TASK == "quantize":
        finish_dead_row(outputs, places, sizes, written, stored)
    return largest


def row_in_registers(
    inputs, outputs, decode_scale, g, eps, places, sizes, row, live, written, stored
):
    """A row of PER pieces a thread: all loads first, then everything of one kind for all pieces."""
    p0 = cuda.threadIdx.x + 0
    p1 = p0 + cuda.blockDim.x
    p2 = p1 + cuda.blockDim.x
    p3 = p2 + cuda.blockDim.x
    a0 = zero_half()
    b0 = zero_half()
    a1 = zero_half()
    b1 = zero_half()
    a2 = zero_half()
    b2 = zero_half()
    a3 = zero_half()
    b3 = zero_half()
    if live:
        a0, b0 = load_front(inputs, places, p0, sizes)
        if PER > 1:
            a1, b1 = load_front(inputs, places, p1, sizes)
        if PER > 2:
            a2, b2 = load_front(inputs, places, p2, sizes)
        if PER > 3:
            a3, b3 = load_front(inputs, places, p3, sizes)
        if RESIDUAL != "none":
            v0, w0 = load_residual(inputs, places, p0, sizes)
            if PER > 1:
                v1, w1 = load_residual(inputs, places, p1, sizes)
            a0, b0 = add_residual(a0, b0, v0, w0, outputs, places, p0, sizes)
            if PER > 1:
                a1, b1 = add_residual(a1, b1, v1, w1, outputs, places, p1, sizes)
    if FRONT == "rms":
        state = row_state()
        groups = (sizes[0] + 31) >> 5
        keep_squares(state, a0, b0, live, p0, sizes, p0 >> 5, groups)
        if PER > 1:
            keep_squares(state, a1, b1, live, p1, sizes, p1 >> 5, groups)
        if PER > 2:
            keep_squares(state, a2, b2, live, p2, sizes, p2 >> 5, groups)
        if PER > 3:
            keep_squares(state, a3, b3, live, p3, sizes, p3 >> 5, groups)
        inverse = inverse_of_row(state, sizes, eps)
        if live:
            a0, b0 = normalised_piece(a0, b0, inputs, inverse, p0, sizes)
            if PER > 1:
                a1, b1 = normalised_piece(a1, b1, inputs, inverse, p1, sizes)
            if PER > 2:
                a2, b2 = normalised_piece(a2, b2, inputs, inverse, p2, sizes)
            if PER > 3:
                a3, b3 = normalised_piece(a3, b3, inputs, inverse, p3, sizes)
    if ENCODE == "row_amax":
        largest = amax_if(a0, b0, live, p0, sizes)
        if PER > 1:
            largest = max_nan_f32(largest, amax_if(a1, b1, live, p1, sizes))
        if PER > 2:
            largest = max_nan_f32(largest, amax_if(a2, b2, live, p2, sizes))
        if PER > 3:
            largest = max_nan_f32(largest, amax_if(a3, b3, live, p3, sizes))
        g = encode_scale_of_amax(largest_of_row(largest))
    c, r = encode_factors(g)
    store_row_scale(decode_scale, row, r, written)
    found = ZERO
    if live:
        found = finish(a0, b0, c, r, outputs, places, p0, sizes, stored)
        if PER > 1:
            more = finish(a1, b1, c, r, outputs, places, p1, sizes, stored)
            found = max_nan_f32(found, more)
        if PER > 2:
            more = finish(a2, b2, c, r, outputs, places, p2, sizes, stored)
            found = max_nan_f32(found, more)
        if PER > 3:
            more = finish(a3, b3, c, r, outputs, places, p3, sizes, stored)
            found = max_nan_f32(found, more)
    elif TASK == "quantize":
        finish_dead_row(outputs, places, sizes, written, stored)
    return found


def piece_again(inputs, outputs, places, inverse, piece, sizes):
    """A piece as it is quantised, a second time."""
    at = piece if piece < sizes[0] else 0
    if HOLD == "shared":
        address = held_piece(at, sizes)
        half = piece_bytes() >> 1
        a = held_half(address)
        b = held_half(add_u32(address, half))
    elif RESIDUAL == "out":
        # residual may be the same memory, and overwritten by now.
        a, b = load_piece_written(outputs[0], places[2] + at * piece_bytes())
    else:
        a, b = front_piece(inputs, outputs, places, piece, sizes)
    if FRONT == "rms":
        return normalised_piece(a, b, inputs, inverse, piece, sizes)
    else:
        return a, b


def row_read_twice(
    inputs, outputs, decode_scale, g, eps, places, sizes, row, live, written, stored
):
    """A row that waits in shared memory, or is made again."""
    state = row_state()
    warp = cuda.threadIdx.x >> 5
    total = ZERO
    inverse = ONE
    largest = ZERO
    first = 0
    while first < sizes[0]:
        last = min(first + CHUNK, sizes[0])
        base = first + 0
        while base < last:
            piece = base + cuda.threadIdx.x
            # The next chunk's pieces are not this one's.
            mine = live & (piece < last)
            a = zero_half()
            b = zero_half()
            if mine:
                a, b = front_piece(inputs, outputs, places, piece, sizes)
                if HOLD == "shared":
                    address = held_piece(piece, sizes)
                    hold_half(address, a)
                    hold_half(add_u32(address, piece_bytes() >> 1), b)
            if FRONT == "rms":
                groups = (last - first + 31) >> 5
                keep_squares(state, a, b, mine, piece, sizes, (piece - first) >> 5, groups)
            elif ENCODE == "row_amax":
                largest = max_nan_f32(largest, amax_if(a, b, mine, piece, sizes))
            base += cuda.blockDim.x
        if FRONT == "rms":
            cuda.syncthreads()
            if warp == 0:
                total = add_rn(total, chunk_sum(state, (last - first + 31) >> 5))
            cuda.syncthreads()
        first += CHUNK
    if FRONT == "rms":
        if warp == 0:
            keep_inverse(state, total, sizes, eps)
    # Also for the pieces: another thread than now may have put them there.
    cuda.syncthreads()
    if FRONT == "rms":
        inverse = ld_shared_f32(add_u32(state, INVERSE))
    if ENCODE == "row_amax":
        if FRONT == "rms" and live:
            piece = cuda.threadIdx.x + 0
            while piece < sizes[0]:
                a, b = piece_again(inputs, outputs, places, inverse, piece, sizes)
                largest = max_nan_f32(largest, amax_if(a, b, live, piece, sizes))
                piece += cuda.blockDim.x
        g = encode_scale_of_amax(largest_of_row(largest))
    c, r = encode_factors(g)
    store_row_scale(decode_scale, row, r, written)
    found = ZERO
    if live:
        base = 0
        while base < sizes[1]:
            piece = base + cuda.threadIdx.x
            a, b = piece_again(inputs, outputs, places, inverse, piece, sizes)
            more = finish(a, b, c, r, outputs, places, piece, sizes, stored)
            found = max_nan_f32(found, more)
            base += cuda.blockDim.x
    elif TASK == "quantize":
        finish_dead_row(outputs, places, sizes, written, stored)
    # The next row comes into the same shared memory.
    cuda.syncthreads()
    return found


def quantize_row(inputs, outputs, decode_scale, g, eps, places, sizes, row, live, written, stored):
    """Do everything for a row of the result; returns its largest magnitude for TASK "amax".

    The threads of a block call it together, those of a row with the same arguments. g: the encode
    scale; row: its number in the result; live: it has an input; written: it is a row of the result;
    stored: it has scales.
    """
    if HOLD == "none":
        return row_at_once(
            inputs, outputs, decode_scale, g, eps, places, sizes, row, live, written, stored
        )
    elif HOLD == "registers":
        return row_in_registers(
            inputs, outputs, decode_scale, g, eps, places, sizes, row, live, written, stored
        )
    else:
        return row_read_twice(
            inputs, outputs, decode_scale, g, eps, places, sizes, row, live, written, stored
        )
