"""Quantisers that make what they quantise: gated activations, norms; rows up to a count; ranges.

A row of blockDim.x threads, whole warps, serves a row of the result; a thread takes pieces of 16
columns. FRONT says what becomes of the input on its way: nothing ("plain"), a gated activation, or
a sum with a residual and a norm. Where something of the whole row is needed first (the norm's sum,
the maximum of "row_amax"), HOLD says where the row waits: in "registers" (a piece a thread), in
"shared" memory, or not at all ("reread": it is read, and made, again). Sums have the order of
``golden.hidden`` whatever the number of threads.

A unit is `lines` rows of one tile, by one block. In the tcgen layout rows come in groups of 8,
{2i, 2i + 1} + {0, 32, 64, 96} of a tile, because the scales of these share 32-byte sectors, which
then leave the L2 cache complete. Dense rows with `row_counts` (COUNTS) are zero from the count of
their matrix on. With RANGES a block finds the range of its tile as ``grouped_quantize`` does.

TASK "amax" leaves the largest magnitude in decode_scale, and writes nothing else.

Constraints: columns a multiple of the format's block; blockDim.x a multiple of 32, `lines` one of
blockDim.y; with RANGES 128 = lines * 2^shift; with HOLD "registers" blockDim.x at least the
pieces of a row with its padding. Shared memory: ROW_STATE bytes a row of threads, then with HOLD
"shared" a row of the input's dtype. Ranges: rows < 2^32; gridDim.z 1.

Compile-time constants beside those of ``quantize``, ``groups`` and ``hidden``: RANGES, COUNTS
("none" or a dtype), TASK, HOLD, RESIDUAL ("none", "in", "out": also stored), HIDDEN (store h),
THREADS and BLOCKS_PER_SM (launch bounds).
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..program import Kernel
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
from ..ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.memory import (
    ld_shared_f32,
    ld_shared_u32,
    ld_shared_v4_u32,
    red_max_global_u32,
    shared_base,
    st_global_u8_if,
    st_global_v2_u32,
    st_global_v4_u32,
    st_shared_f32,
    st_shared_u32,
    st_shared_v4_u32,
)
from ..ptx.warp import redux_max_u32, shfl_xor_f32
from .elements import code_bytes, store_codes, store_word
from .grouped_quantize import INDEX_DTYPES, clear_tile, encode_scale_of, store_range_scales
from .groups import expert_of, find_tile, load_index, row_of_none, source_row
from .hidden import (
    added_half,
    element_bytes,
    gated_piece,
    load_half,
    load_half_written,
    load_weight,
    normalised_half,
    squares,
    store_half,
    zero_half,
)
from .quantize import (
    ELEMENT_CONSTANTS,
    block_of_piece,
    encode_scale_for,
    padded_pieces,
    scale_bytes,
    tiles_across,
)
from .scales import SIXTH, block_scale, encode_scale_of_amax, usable
from .stream import amax_piece, quick_scale, scaled_codes, widen
from .warps import thread_index

INPUT = "bfloat16"
ELEMENT = "e2m1"
SCALE = "e4m3"
LAYOUT = "tcgen"
ENCODE = "none"
ALIGNED = True
FRONT = "silu"
RANGES = False
COUNTS = "none"
STARTS = "none"
TASK = "quantize"
HOLD = "none"
RESIDUAL = "none"
HIDDEN = False

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
WARP = 0xFFFFFFFF
#: Shared memory of a row of threads: sums of 32 groups, maxima of 16 warps or more, the norm.
ROW_STATE = 288
MAXIMA = 128
INVERSE = 256
CHUNK = 1024  # pieces whose sums form a tree


# What a row needs --------------------------------------------------------------------------------


def row_state():
    """Address of this row's sums in shared memory."""
    return add_u32(shared_base(), u32_of_i64(cuda.threadIdx.y * ROW_STATE))


def held_piece(piece, pieces):
    """Address of a piece of this row in shared memory."""
    size = element_bytes() * 16
    before = cuda.blockDim.y * ROW_STATE + (cuda.threadIdx.y * pieces + piece) * size
    return add_u32(shared_base(), u32_of_i64(before))


def hold_half(address, raw):
    """Keep half a piece in shared memory."""
    if INPUT == "float32":
        st_shared_v4_u32(
            address,
            float_as_uint(raw[0]),
            float_as_uint(raw[1]),
            float_as_uint(raw[2]),
            float_as_uint(raw[3]),
        )
        st_shared_v4_u32(
            add_u32(address, 16),
            float_as_uint(raw[4]),
            float_as_uint(raw[5]),
            float_as_uint(raw[6]),
            float_as_uint(raw[7]),
        )
    else:
        st_shared_v4_u32(address, raw[0], raw[1], raw[2], raw[3])


def held_half(address):
    """Half a piece out of shared memory."""
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


def sum_of_lanes(value):
    """Sum over a warp, halves of it added to each other."""
    value = add_rn(value, shfl_xor_f32(WARP, value, 16))
    value = add_rn(value, shfl_xor_f32(WARP, value, 8))
    value = add_rn(value, shfl_xor_f32(WARP, value, 4))
    value = add_rn(value, shfl_xor_f32(WARP, value, 2))
    return add_rn(value, shfl_xor_f32(WARP, value, 1))


def store_group_sum(state, group, total):
    """Keep the sum of a group of 32 pieces, which this warp has."""
    if (cuda.threadIdx.x & 31) == 0:
        st_shared_f32(add_u32(state, u32_of_i64(group * 4)), total)


def chunk_sum(state, groups):
    """Sum of a chunk, for the lanes of one warp, of its groups' sums."""
    total = ZERO
    lane = cuda.threadIdx.x & 31
    if lane < groups:
        total = ld_shared_f32(add_u32(state, u32_of_i64(lane * 4)))
    return sum_of_lanes(total)


def store_inverse(state, total, columns, eps):
    """Keep 1 / sqrt(total / columns + eps)."""
    if cuda.threadIdx.x == 0:
        mean = div_rn(total, np.float32(columns))
        st_shared_f32(add_u32(state, INVERSE), rcp_rn(sqrt_rn(add_rn(mean, eps))))


def inverse_of_row(total, pieces, eps):
    """The factor of the norm, of the sum of squares that each thread has of its one piece."""
    state = row_state()
    warp = cuda.threadIdx.x >> 5
    total = sum_of_lanes(total)
    store_group_sum(state, warp, total)
    cuda.syncthreads()
    if warp == 0:
        store_inverse(state, chunk_sum(state, (pieces + 31) >> 5), pieces * 16, eps)
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


# Pieces ------------------------------------------------------------------------------------------


def front_piece(x, residual, residual_out, x_at, residual_at, out_at, piece, real, columns):
    """A piece of a row as it is normalised or quantised; for one that is not `real`, the first.

    x_at, residual_at and out_at: the row's first byte in x, residual and residual_out.
    """
    size = element_bytes() * 16
    half = element_bytes() * 8
    at = piece if real else 0
    if FRONT == "plain" or FRONT == "rms":
        a = load_half(x, x_at + at * size)
        b = load_half(x, x_at + at * size + half)
        if RESIDUAL != "none":
            place = residual_at + at * size
            a = added_half(a, load_half_written(residual, place))
            b = added_half(b, load_half_written(residual, place + half))
            if RESIDUAL == "out":
                if real:
                    store_half(residual_out, out_at + at * size, a)
                    store_half(residual_out, out_at + at * size + half, b)
        return a, b
    else:
        return gated_piece(x, x_at, at, columns)


def front_piece_again(x, residual, residual_out, x_at, residual_at, out_at, piece, real, pieces):
    """The same piece a second time."""
    size = element_bytes() * 16
    half = element_bytes() * 8
    at = piece if real else 0
    if HOLD == "shared":
        address = held_piece(at, pieces)
        return held_half(address), held_half(add_u32(address, half))
    elif RESIDUAL == "out":
        # residual may be the same memory, and overwritten by now.
        place = out_at + at * size
        return (
            load_half_written(residual_out, place),
            load_half_written(residual_out, place + half),
        )
    else:
        return front_piece(
            x, residual, residual_out, x_at, residual_at, out_at, piece, real, pieces * 16
        )


def normalised_piece(a, b, weight, inverse, piece, real):
    """A piece after the norm."""
    column = piece * 16 if real else 0
    v = load_weight(weight, column)
    w = load_weight(weight, column + 8)
    return normalised_half(a, inverse, v), normalised_half(b, inverse, w)


def store_scale(scales, row_at, piece, all_pieces, byte, real, stored):
    """Store the scale of a piece's block, of a row whose scales begin at `row_at`."""
    block = block_of_piece(piece)
    if SCALE == "e4m3":
        mine = stored
    else:
        mine = stored & (piece & 1 == 0)
    if LAYOUT == "linear":
        st_global_u8_if(scales, row_at + block, byte, mine & real)
    else:
        place = row_at + (block >> 2 << 9) + (block & 3)
        st_global_u8_if(scales, place, byte, mine & (piece < all_pieces))


def quantize_piece(
    a, b, c, r, codes, codes_at, scales, scales_at, piece, pieces, all_pieces, stored
):
    """Quantise a piece of a row; a piece beyond the last one has a scale of 0."""
    real = piece < pieces
    amax = select_f32(real, amax_piece(a, b), ZERO)
    if SCALE == "e8m0":
        amax = max_nan_f32(amax, shfl_xor_f32(WARP, amax, 1))
    at = codes_at + code_bytes(piece * 16)
    if ELEMENT == "e2m1":
        byte, q, holds = quick_scale(amax, c, r)
        if holds:
            low = scaled_codes(a, q)
            high = scaled_codes(b, q)
            if real:
                if ALIGNED:
                    st_global_v2_u32(codes, at, low, high, "")
                else:
                    store_word(codes, at, low)
                    store_word(codes, at + 4, high)
        else:
            byte, q = block_scale(amax, c, r)
            if real:
                store_codes(codes, at, widen(a), widen(b), q)
    else:
        byte, q = block_scale(amax, c, r)
        if real:
            store_codes(codes, at, widen(a), widen(b), q)
    store_scale(scales, scales_at, piece, all_pieces, byte, real, stored)


def zero_piece(codes, codes_at, scales, scales_at, piece, pieces, all_pieces, written, stored):
    """Zero codes, where the row is `written`, and a zero scale, where it is `stored`."""
    real = piece < pieces
    if written and real:
        at = codes_at + code_bytes(piece * 16)
        if ALIGNED:
            if ELEMENT == "e2m1":
                st_global_v2_u32(codes, at, 0, 0, "")
            else:
                st_global_v4_u32(codes, at, 0, 0, 0, 0, "")
        else:
            store_word(codes, at, 0)
            store_word(codes, at + 4, 0)
            if ELEMENT != "e2m1":
                store_word(codes, at + 8, 0)
                store_word(codes, at + 12, 0)
    store_scale(scales, scales_at, piece, all_pieces, 0, real, stored)


def store_piece(out, at, a, b):
    """Store a piece of plain values."""
    store_half(out, at, a)
    store_half(out, at + element_bytes() * 8, b)


# Rows --------------------------------------------------------------------------------------------


def finish_piece(
    a,
    b,
    live,
    c,
    r,
    hidden,
    out_at,
    codes,
    codes_at,
    scales,
    scales_at,
    piece,
    pieces,
    all_pieces,
    written,
    stored,
):
    """Write what belongs to a piece; returns its largest magnitude for TASK "amax"."""
    real = piece < pieces
    size = element_bytes() * 16
    if TASK == "amax":
        return select_f32(live & real, amax_piece(a, b), ZERO)
    else:
        if live:
            if HIDDEN:
                if real:
                    store_piece(hidden, out_at + piece * size, a, b)
            quantize_piece(
                a, b, c, r, codes, codes_at, scales, scales_at, piece, pieces, all_pieces, stored
            )
        else:
            if HIDDEN:
                if written and real:
                    store_piece(hidden, out_at + piece * size, zero_half(), zero_half())
            zero_piece(
                codes, codes_at, scales, scales_at, piece, pieces, all_pieces, written, stored
            )
        return ZERO


def clear_residual(residual_out, out_at, pieces, live, written):
    """Zero the row of residual_out that has no input."""
    if RESIDUAL == "out":
        if written and not live:
            piece = cuda.threadIdx.x + 0
            while piece < pieces:
                store_piece(
                    residual_out, out_at + piece * (element_bytes() * 16), zero_half(), zero_half()
                )
                piece += cuda.blockDim.x


def encode_factors(g):
    """RN(g * RN(1/6)) and RN(1/g)."""
    if ENCODE == "none":
        return SIXTH, ONE
    else:
        return mul_rn(g, SIXTH), rcp_rn(g)


def store_row_scale(decode_scale, flat, r, written):
    """Store the decode scale of a row, where there is one a row."""
    if ENCODE == "row" or ENCODE == "row_amax":
        if TASK == "quantize":
            if written and cuda.threadIdx.x == 0:
                decode_scale[flat] = r


def quantize_row(
    x,
    weight,
    residual,
    residual_out,
    hidden,
    codes,
    scales,
    decode_scale,
    g,
    eps,
    columns,
    live,
    written,
    stored,
    x_at,
    residual_at,
    flat,
    scales_at,
):
    """Do everything for a row of the result, number `flat` of all; returns its largest for "amax".

    The threads of a block call it together. live: the row has an input; written: it is a row of the
    result; stored: it has scales in the tcgen layout. x_at, residual_at, scales_at: first bytes.
    """
    pieces = columns >> 4
    all_pieces = padded_pieces(columns)
    size = element_bytes() * 16
    out_at = flat * (pieces * size)
    codes_at = flat * code_bytes(columns)
    largest = ZERO
    clear_residual(residual_out, out_at, pieces, live, written)
    if HOLD == "none":
        c, r = encode_factors(g)
        store_row_scale(decode_scale, flat, r, written)
        base = 0
        while base < all_pieces:
            piece = base + cuda.threadIdx.x
            a = zero_half()
            b = zero_half()
            if live:
                a, b = front_piece(
                    x,
                    residual,
                    residual_out,
                    x_at,
                    residual_at,
                    out_at,
                    piece,
                    piece < pieces,
                    columns,
                )
            found = finish_piece(
                a,
                b,
                live,
                c,
                r,
                hidden,
                out_at,
                codes,
                codes_at,
                scales,
                scales_at,
                piece,
                pieces,
                all_pieces,
                written,
                stored,
            )
            largest = max_nan_f32(largest, found)
            base += cuda.blockDim.x
        return largest
    elif HOLD == "registers":
        piece = cuda.threadIdx.x + 0
        real = piece < pieces
        a = zero_half()
        b = zero_half()
        if live:
            a, b = front_piece(
                x, residual, residual_out, x_at, residual_at, out_at, piece, real, columns
            )
        if FRONT == "rms":
            total = select_f32(live & real, squares(a, b), ZERO)
            inverse = inverse_of_row(total, pieces, eps)
            if live:
                a, b = normalised_piece(a, b, weight, inverse, piece, real)
        if ENCODE == "row_amax":
            largest = largest_of_row(select_f32(live & real, amax_piece(a, b), ZERO))
            g = encode_scale_of_amax(largest)
        c, r = encode_factors(g)
        store_row_scale(decode_scale, flat, r, written)
        return finish_piece(
            a,
            b,
            live,
            c,
            r,
            hidden,
            out_at,
            codes,
            codes_at,
            scales,
            scales_at,
            piece,
            pieces,
            all_pieces,
            written,
            stored,
        )
    else:
        state = row_state()
        warp = cuda.threadIdx.x >> 5
        total = ZERO
        inverse = ONE
        first = 0
        while first < pieces:
            last = min(first + CHUNK, pieces)
            base = first + 0
            while base < last:
                piece = base + cuda.threadIdx.x
                real = piece < last
                a = zero_half()
                b = zero_half()
                if live:
                    a, b = front_piece(
                        x, residual, residual_out, x_at, residual_at, out_at, piece, real, columns
                    )
                if HOLD == "shared":
                    if real:
                        address = held_piece(piece, pieces)
                        hold_half(address, a)
                        hold_half(add_u32(address, size >> 1), b)
                if FRONT == "rms":
                    part = sum_of_lanes(select_f32(live & real, squares(a, b), ZERO))
                    group = (piece - first) >> 5
                    if group < CHUNK >> 5:
                        store_group_sum(state, group, part)
                elif ENCODE == "row_amax":
                    part = select_f32(live & real, amax_piece(a, b), ZERO)
                    largest = max_nan_f32(largest, part)
                base += cuda.blockDim.x
            if FRONT == "rms":
                cuda.syncthreads()
                if warp == 0:
                    total = add_rn(total, chunk_sum(state, (last - first + 31) >> 5))
                cuda.syncthreads()
            first += CHUNK
        if FRONT == "rms":
            if warp == 0:
                store_inverse(state, total, columns, eps)
        # Also for the pieces in shared memory: another thread than now may have put them there.
        cuda.syncthreads()
        if FRONT == "rms":
            inverse = ld_shared_f32(add_u32(state, INVERSE))
        if ENCODE == "row_amax":
            if FRONT == "rms" and live:
                base = 0
                while base < pieces:
                    piece = base + cuda.threadIdx.x
                    real = piece < pieces
                    a, b = front_piece_again(
                        x, residual, residual_out, x_at, residual_at, out_at, piece, real, pieces
                    )
                    a, b = normalised_piece(a, b, weight, inverse, piece, real)
                    largest = max_nan_f32(largest, select_f32(real, amax_piece(a, b), ZERO))
                    base += cuda.blockDim.x
            largest = largest_of_row(largest)
            g = encode_scale_of_amax(largest)
            largest = ZERO
        c, r = encode_factors(g)
        store_row_scale(decode_scale, flat, r, written)
        base = 0
        while base < all_pieces:
            piece = base + cuda.threadIdx.x
            real = piece < pieces
            a = zero_half()
            b = zero_half()
            if live:
                a, b = front_piece_again(
                    x, residual, residual_out, x_at, residual_at, out_at, piece, real, pieces
                )
                if FRONT == "rms":
                    a, b = normalised_piece(a, b, weight, inverse, piece, real)
            found = finish_piece(
                a,
                b,
                live,
                c,
                r,
                hidden,
                out_at,
                codes,
                codes_at,
                scales,
                scales_at,
                piece,
                pieces,
                all_pieces,
                written,
                stored,
            )
            largest = max_nan_f32(largest, found)
            base += cuda.blockDim.x
        # The next row comes into the same shared memory.
        cuda.syncthreads()
        return largest


# The grid ----------------------------------------------------------------------------------------


def row_of_line(line):
    """The row of a matrix, or of a tile, that is served in this turn."""
    if LAYOUT == "linear":
        return line
    else:
        return (line >> 7 << 7) + ((line & 127) >> 3 << 1) + (line & 1) + ((line >> 1 & 3) << 5)


def scale_row_place(row, columns):
    """First byte of the scales of a row, in those of its matrix."""
    if LAYOUT == "linear":
        return row * block_of_piece(columns >> 4)
    else:
        tile = (row >> 7) * tiles_across(columns)
        return (tile << 9) + ((row & 31) << 4) + ((row & 127) >> 5 << 2)


def rows_with_data(row_counts, batch, rows):
    """How many rows of a matrix count."""
    if COUNTS == "none":
        return rows
    else:
        return min(max(load_index(row_counts, batch, COUNTS), 0), rows)


def serve_dense(
    x,
    weight,
    residual,
    residual_out,
    hidden,
    codes,
    scales,
    row_counts,
    encode_scale,
    encode_number,
    decode_scale,
    eps,
    rows,
    columns,
    batches,
    x_row,
    x_matrix,
    units,
    lines,
):
    """All rows of this block, of a stack of matrices; returns the largest magnitude for "amax"."""
    largest = ZERO
    first = cuda.blockIdx.x == 0 and thread_index() == 0
    size = element_bytes()
    if TASK == "quantize" and (ENCODE == "none" or ENCODE == "scalar" or ENCODE == "array"):
        if first and cuda.blockIdx.z == 0:
            g = encode_scale_for(encode_scale, encode_number, decode_scale, 0, 0)
            decode_scale[0] = rcp_rn(g)
    batch = cuda.blockIdx.z + 0
    while batch < batches:
        if TASK == "quantize" and ENCODE == "batch":
            if first:
                decode_scale[batch] = rcp_rn(usable(encode_scale[batch]))
        count = rows_with_data(row_counts, batch, rows)
        unit = cuda.blockIdx.x + 0
        while unit < units:
            turn = 0
            while turn < lines:
                row = row_of_line(unit * lines + turn + cuda.threadIdx.y)
                written = row < rows
                stored = row < (rows + 127) >> 7 << 7
                if LAYOUT == "linear":
                    stored = written
                flat = batch * rows + row
                g = ONE
                if ENCODE != "row_amax" and TASK == "quantize":
                    if written:
                        g = encode_scale_for(encode_scale, encode_number, decode_scale, batch, flat)
                found = quantize_row(
                    x,
                    weight,
                    residual,
                    residual_out,
                    hidden,
                    codes,
                    scales,
                    decode_scale,
                    g,
                    eps,
                    columns,
                    row < count,
                    written,
                    stored,
                    (batch * x_matrix + row * x_row) * size,
                    flat * (columns * size),
                    flat,
                    batch * scale_bytes(rows, columns) + scale_row_place(row, columns),
                )
                largest = max_nan_f32(largest, found)
                turn += cuda.blockDim.y
            unit += cuda.gridDim.x
        batch += cuda.gridDim.z
    return largest


def serve_ranges(
    x,
    weight,
    residual,
    residual_out,
    hidden,
    codes,
    scales,
    row_offsets,
    expert_ids,
    row_indices,
    tile_starts,
    encode_scale,
    encode_number,
    decode_scale,
    eps,
    input_rows,
    rows,
    columns,
    x_row,
    units,
    lines,
    shift,
    groups,
    experts,
    tiles,
):
    """All rows of this block, of ranges."""
    size = element_bytes()
    if ENCODE != "row" and ENCODE != "row_amax":
        store_range_scales(decode_scale, encode_scale, encode_number, expert_ids, groups, experts)
    unit = cuda.blockIdx.x + 0
    while unit < units:
        tile = unit >> shift
        part = unit - (tile << shift)
        owner, first_tile, start, stop, used, head, tail, taken = find_tile(
            row_offsets, tile_starts, groups, rows, tile
        )
        expert = -1
        scale_tile = tile
        if owner >= 0:
            expert = expert_of(expert_ids, owner, experts)
            if STARTS != "none":
                scale_tile = load_index(tile_starts, owner, STARTS) + tile - first_tile
        elif STARTS != "none":
            scale_tile = -1
        has_scales = scale_tile >= 0 and scale_tile < tiles
        shared_g = encode_scale_of(encode_scale, encode_number, expert)
        turn = 0
        while turn < lines:
            local = row_of_line(part * lines + turn + cuda.threadIdx.y)
            if owner >= 0:
                row = start + ((tile - first_tile) << 7) + local
                written = row < stop
            else:
                row = row_of_none(((tile - used) << 7) + local, head, tail)
                written = row < rows
            source = -1
            if written and expert >= 0:
                source = source_row(row_indices, row, input_rows)
            g = shared_g
            if ENCODE == "row":
                g = usable(encode_scale[row]) if written and expert >= 0 else ONE
            if LAYOUT == "linear":
                stored = written
                scales_at = scale_row_place(row, columns)
            else:
                stored = has_scales
                scales_at = scale_row_place((scale_tile << 7) + local, columns)
            quantize_row(
                x,
                weight,
                residual,
                residual_out,
                hidden,
                codes,
                scales,
                decode_scale,
                g,
                eps,
                columns,
                source >= 0,
                written,
                stored,
                source * x_row * size,
                source * columns * size,
                row,
                scales_at,
            )
            turn += cuda.blockDim.y
        if LAYOUT == "tcgen" and STARTS != "none":
            if taken == 0 and tile < tiles and part == 0:
                clear_tile(scales, tile, columns)
        unit += cuda.gridDim.x


def fused(
    x,
    weight,
    residual,
    residual_out,
    hidden,
    codes,
    scales,
    row_offsets,
    expert_ids,
    row_indices,
    tile_starts,
    row_counts,
    encode_scale,
    encode_number,
    decode_scale,
    eps,
    input_rows,
    rows,
    columns,
    batches,
    x_row,
    x_matrix,
    units,
    lines,
    shift,
    groups,
    experts,
    tiles,
):
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    if RANGES:
        serve_ranges(
            x,
            weight,
            residual,
            residual_out,
            hidden,
            codes,
            scales,
            row_offsets,
            expert_ids,
            row_indices,
            tile_starts,
            encode_scale,
            encode_number,
            decode_scale,
            eps,
            input_rows,
            rows,
            columns,
            x_row,
            units,
            lines,
            shift,
            groups,
            experts,
            tiles,
        )
    else:
        largest = serve_dense(
            x,
            weight,
            residual,
            residual_out,
            hidden,
            codes,
            scales,
            row_counts,
            encode_scale,
            encode_number,
            decode_scale,
            eps,
            rows,
            columns,
            batches,
            x_row,
            x_matrix,
            units,
            lines,
        )
        if TASK == "amax":
            pattern = redux_max_u32(WARP, float_as_uint(largest))
            if (thread_index() & 31) == 0:
                red_max_global_u32(decode_scale, 0, pattern)


FUSED = Kernel(
    "fused_quantize",
    fused,
    (
        *("u8*", "u8*", "u8*", "u8*", "u8*", "u8*", "u8*"),
        *("u8*", "u8*", "u8*", "u8*", "u8*", "f32*", "f32", "f32*", "f32"),
        *("i64", "i64", "i64", "i64", "i64", "i64", "i64", "i64", "i64", "i64", "i64", "i64"),
    ),
    {
        **ELEMENT_CONSTANTS,
        "ENCODE": ("none", "scalar", "array", "batch", "expert", "row", "amax", "row_amax"),
        "FRONT": ("plain", "silu", "gpt-oss", "rms"),
        "HALVES": ("split", "interleaved"),
        "WEIGHT": ("none", "same", "float32"),
        "RESIDUAL": ("none", "in", "out"),
        "HIDDEN": (False, True),
        "HOLD": ("none", "registers", "shared", "reread"),
        "TASK": ("quantize", "amax"),
        "RANGES": (False, True),
        "COUNTS": ("none", "int32", "int64"),
        "OFFSETS": INDEX_DTYPES,
        "IDS": ("none", "int32", "int64"),
        "INDICES": ("none", "int32", "int64"),
        "STARTS": ("none", *INDEX_DTYPES),
        "THREADS": (),
        "BLOCKS_PER_SM": (),
    },
)

_OUTPUT = {"INPUT": "bfloat16", "ROUNDING": "rceil", "ALIGNED": True, "LAYOUT": "tcgen"}
_NVFP4 = {**_OUTPUT, "ELEMENT": "e2m1", "SCALE": "e4m3"}
_MXFP4 = {**_OUTPUT, "ELEMENT": "e2m1", "SCALE": "e8m0"}
_MXFP8 = {**_OUTPUT, "ELEMENT": "e4m3", "SCALE": "e8m0"}
_PLAIN = {
    **{"UNIT": True, "ENCODE": "none", "HALVES": "split", "WEIGHT": "none", "RESIDUAL": "none"},
    **{"HIDDEN": False, "HOLD": "none", "TASK": "quantize", "RANGES": False, "COUNTS": "none"},
    **{"OFFSETS": "int32", "IDS": "none", "INDICES": "none", "STARTS": "none"},
    **{"THREADS": 256, "BLOCKS_PER_SM": 5},
}
_NORM = {"FRONT": "rms", "WEIGHT": "same", "HOLD": "registers", "THREADS": 448, "BLOCKS_PER_SM": 2}
_ALL_ARRAYS = {"OFFSETS": "int64", "IDS": "int64", "INDICES": "int32", "STARTS": "uint32"}

VARIANTS = {
    "fused_quantize": (
        {**_PLAIN, **_NVFP4, "FRONT": "silu"},
        {**_PLAIN, **_NVFP4, **_NORM, "RESIDUAL": "out"},
        {**_PLAIN, **_MXFP8, **_ALL_ARRAYS, "FRONT": "gpt-oss", "RANGES": True, "BLOCKS_PER_SM": 4},
    ),
}
SLOW_VARIANTS = {
    "fused_quantize": (
        {**_PLAIN, **_MXFP4, "FRONT": "plain", "COUNTS": "int32"},
        {**_PLAIN, **_NVFP4, "FRONT": "gpt-oss", "HALVES": "interleaved"},
        {**_PLAIN, **_NVFP4, "FRONT": "silu", "TASK": "amax"},
        {**_PLAIN, **_NVFP4, **_NORM, "HOLD": "shared", "UNIT": False, "ENCODE": "row_amax"},
        {
            **{**_PLAIN, **_NVFP4, **_NORM, "HOLD": "reread", "RESIDUAL": "out", "HIDDEN": True},
            **{"INPUT": "float32", "ALIGNED": False, "LAYOUT": "linear"},
        },
        {
            **{**_PLAIN, **_MXFP8, **_NORM, **_ALL_ARRAYS, "RANGES": True, "WEIGHT": "float32"},
            **{"INPUT": "float16", "ELEMENT": "e5m2", "ENCODE": "none"},
        },
    ),
}
