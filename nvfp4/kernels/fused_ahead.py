"""Rows of a dense matrix, each fetched while the one before is worked on: ``fused``, faster.

The operations are those of ``fused``. A block serves four rows, one after the other, and a thread
has the same two pieces of 16 columns in all of them. Once all threads have a row in registers, a
bulk copy brings the next one to shared memory: what waits for memory is neither a register nor a
thread. A grid has several times the blocks that a card takes at once: they even out what
multiprocessors differ in.

In the tcgen layout the rows of a block are r, r + 32, r + 64 and r + 96 of a tile, whose scales lie
one behind the other, 16 bytes a tile of columns: they are collected in shared memory and stored
together. (Stored byte by byte as they are made, they cost a tenth of the time.) Rows of padding are
not read; their scales become 0.

Of a stack, gridDim.z matrices; with `row_counts` (COUNTS is their dtype) the rows of each from its
count on are zero.

Constraints: ALIGNED; 2 * blockDim.x at least the pieces of a row, padding included, and at most
1024; blockDim.x a multiple of 32; rows of all matrices below 2^31, and bytes from one to the next
below 2^32. Shared memory: STATE bytes, 4 for each block of a padded row, up to a multiple of 128
(where a bulk copy begins elsewhere, it is slower); a row of the input.

Compile-time constants beside those of ``fused_pieces`` and ``hidden``: ENCODE; COUNTS; THREADS and
BLOCKS_PER_SM (launch bounds).
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import (
    add_rn,
    add_u32,
    and_u32,
    eq_u32,
    i64_of_u32,
    lt_u32,
    mad_u32,
    max_nan_f32,
    mul_rn,
    mul_u32,
    or_u32,
    rcp_rn,
    select_f32,
    select_u32,
    shl_u32,
    shr_u32,
    u32_of_i64,
    xor_u32,
)
from ..ptx.bits import float_as_uint, uint_as_float
from ..ptx.bulk import bulk_load
from ..ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from ..ptx.memory import (
    ld_shared_f32,
    ld_shared_u32,
    ld_shared_v4_u32,
    ptr_address,
    shared_base,
    st_global_u8_if,
    st_global_v2_u32,
    st_global_v4_u32,
    st_shared_f32,
    st_shared_u8,
    st_shared_u32,
)
from ..ptx.warp import redux_max_u32, shfl_xor_f32
from .fused_pieces import amax_of_block, piece_bytes, store_piece, store_quantised
from .fused_rows import held_half, root_of_mean, rows_with_data, sum_of_lanes
from .hidden import gated_halves, load_weight, normalised_half, squares, zero_half
from .quantize import ELEMENT_CONSTANTS, encode_scale_for
from .scales import SIXTH, encode_scale_of_amax

INPUT = "bfloat16"
ELEMENT = "e2m1"
LAYOUT = "tcgen"
SCALE = "e4m3"
ENCODE = "none"
COUNTS = "none"
FRONT = "rms"
HALVES = "split"
HIDDEN = False

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
WARP = 0xFFFFFFFF
#: Shared memory before scales and row: sums of 32 groups, maxima of 16 warps twice, the norm's
#: factor, the row's mbarrier.
STATE = 272
MAXIMA, INVERSE, BARRIER = 128, 256, 264


# Rows --------------------------------------------------------------------------------------------


def row_bytes(pieces):
    """Bytes of a row of the input."""
    if FRONT == "silu" or FRONT == "gpt-oss":
        return mul_u32(pieces, 2 * piece_bytes())
    else:
        return mul_u32(pieces, piece_bytes())


def first_row(unit):
    """The first row of a block; the others come in steps of ``row_step``."""
    if LAYOUT == "linear":
        return shl_u32(unit, 2)
    else:
        return or_u32(shl_u32(shr_u32(unit, 5), 7), and_u32(unit, 31))


def row_step():
    """From a row of a block to the next."""
    if LAYOUT == "linear":
        return 1
    else:
        return 32


def fetch(x, matrix_at, row, x_row, there, pieces):
    """Let a row of the matrix that begins at a byte come; for one thread."""
    count = row_bytes(pieces)
    barrier = add_u32(shared_base(), BARRIER)
    mbarrier_arrive_expect_tx(barrier, count)
    at = matrix_at + i64_of_u32(row) * i64_of_u32(x_row)
    bulk_load(there, ptr_address(x, at), count, barrier)


def held_piece(row, piece, pieces):
    """A piece of the row at an address, as it is or gated."""
    half = piece_bytes() >> 1
    if FRONT == "plain" or FRONT == "rms":
        at = add_u32(row, mul_u32(piece, piece_bytes()))
        return held_half(at), held_half(add_u32(at, half))
    elif HALVES == "split":
        at = add_u32(row, mul_u32(piece, piece_bytes()))
        up = add_u32(at, mul_u32(pieces, piece_bytes()))
        return gated_halves(
            held_half(at),
            held_half(up),
            held_half(add_u32(at, half)),
            held_half(add_u32(up, half)),
        )
    else:
        at = add_u32(row, mul_u32(piece, 2 * piece_bytes()))
        return gated_halves(
            held_half(at),
            held_half(add_u32(at, half)),
            held_half(add_u32(at, 2 * half)),
            held_half(add_u32(at, 3 * half)),
        )


# What belongs to a row ---------------------------------------------------------------------------


def keep_squares(first, second, lane, warp, warps):
    """Keep the sums of squares of this warp's two groups, a piece of each a lane."""
    # Both at once, as ``sum_of_lanes`` adds: half of the lanes has one, half the other.
    low = lt_u32(lane, 16)
    mine = select_f32(low, first, second)
    total = add_rn(mine, shfl_xor_f32(WARP, select_f32(low, second, first), 16))
    total = add_rn(total, shfl_xor_f32(WARP, total, 8))
    total = add_rn(total, shfl_xor_f32(WARP, total, 4))
    total = add_rn(total, shfl_xor_f32(WARP, total, 2))
    total = add_rn(total, shfl_xor_f32(WARP, total, 1))
    if eq_u32(and_u32(lane, 15), 0):
        group = mad_u32(shr_u32(lane, 4), warps, warp)
        st_shared_f32(add_u32(shared_base(), shl_u32(group, 2)), total)


def keep_inverse(lane, groups, pieces, eps):
    """Keep 1 / sqrt(mean of squares + eps); for one warp."""
    total = ZERO
    if lt_u32(lane, groups):
        total = ld_shared_f32(add_u32(shared_base(), shl_u32(lane, 2)))
    inverse = root_of_mean(sum_of_lanes(total), i64_of_u32(pieces), eps)
    if eq_u32(lane, 0):
        st_shared_f32(add_u32(shared_base(), INVERSE), inverse)


def largest_of_row(amax, lane, warp, warps, odd):
    """The largest over the block; NaN if there is one. `odd` is 0 and 1 in turns, row by row."""
    at = add_u32(add_u32(shared_base(), MAXIMA), shl_u32(odd, 6))
    # The patterns of magnitudes are ordered as the values, NaN above infinity.
    pattern = redux_max_u32(WARP, float_as_uint(amax))
    if eq_u32(lane, 0):
        st_shared_u32(add_u32(at, shl_u32(warp, 2)), pattern)
    cuda.syncthreads()
    pattern = shl_u32(0, 0)
    if lt_u32(lane, warps):
        pattern = ld_shared_u32(add_u32(at, shl_u32(lane, 2)))
    return uint_as_float(redux_max_u32(WARP, pattern))


# Pieces ------------------------------------------------------------------------------------------


def owns_scale(piece, pieces, all_pieces):
    """Whether a piece's thread stores the scale of its block."""
    owner = lt_u32(piece, all_pieces)
    if LAYOUT == "linear":
        owner = lt_u32(piece, pieces)
    if SCALE == "e8m0":
        owner = owner & eq_u32(and_u32(piece, 1), 0)
    return owner


def block_of(piece):
    """The block that a piece belongs to."""
    if SCALE == "e4m3":
        return piece
    else:
        return shr_u32(piece, 1)


def put_scale(scales, row, blocks, turn, piece, byte, owner):
    """Store the scale of a piece's block; in the tcgen layout beside those of the block's rows.

    row: of all matrices.
    """
    block = block_of(piece)
    if LAYOUT == "linear":
        at = i64_of_u32(row) * i64_of_u32(blocks) + i64_of_u32(block)
        st_global_u8_if(scales, at, byte, owner)
    else:
        tile = shl_u32(shr_u32(block, 2), 4)
        at = add_u32(add_u32(tile, and_u32(block, 3)), shl_u32(turn, 2))
        if owner:
            st_shared_u8(add_u32(add_u32(shared_base(), STATE), at), byte)


def store_scales(scales, unit, thread, tiles):
    """Store the scales of a block in the tcgen layout.

    unit: number of the block, in all matrices; tiles: of a row of tiles.
    """
    at = i64_of_u32(shr_u32(unit, 5)) * (i64_of_u32(tiles) << 9)
    at += i64_of_u32(shl_u32(and_u32(unit, 31), 4))
    tile = thread
    while lt_u32(tile, tiles):
        words = ld_shared_v4_u32(add_u32(add_u32(shared_base(), STATE), shl_u32(tile, 4)))
        place = at + (i64_of_u32(tile) << 9)
        st_global_v4_u32(scales, place, words[0], words[1], words[2], words[3], "")
        tile = add_u32(tile, u32_of_i64(cuda.blockDim.x))


def finish(a, b, amax, c, r, outputs, places, piece, real):
    """Quantise a piece, and store h; `places`: a row's first byte in h and in codes.

    Returns the scale byte.
    """
    hidden, codes = outputs
    if HIDDEN:
        if real:
            store_piece(hidden, places[0] + i64_of_u32(mul_u32(piece, piece_bytes())), a, b)
    at = places[1] + i64_of_u32(mul_u32(piece, 8 if ELEMENT == "e2m1" else 16))
    return store_quantised(a, b, amax, c, r, codes, at, real)


def finish_zero(outputs, places, piece, real):
    """The zeros of a piece of a row that does not count."""
    hidden, codes = outputs
    if real:
        if HIDDEN:
            place = places[0] + i64_of_u32(mul_u32(piece, piece_bytes()))
            store_piece(hidden, place, zero_half(), zero_half())
        if ELEMENT == "e2m1":
            st_global_v2_u32(codes, places[1] + i64_of_u32(mul_u32(piece, 8)), 0, 0, "")
        else:
            st_global_v4_u32(codes, places[1] + i64_of_u32(mul_u32(piece, 16)), 0, 0, 0, 0, "")


def weights(weight, piece):
    """The weights of a piece."""
    column = i64_of_u32(shl_u32(piece, 4))
    return load_weight(weight, column), load_weight(weight, column + 8)


# Blocks ------------------------------------------------------------------------------------------


def fused_ahead(
    x,
    weight,
    hidden,
    codes,
    scales,
    row_counts,
    encode_scale,
    encode_number,
    decode_scale,
    eps,
    rows,
    pieces,
    all_pieces,
    x_row,
    x_matrix,
    codes_row,
    blocks,
):
    # rows: of a matrix. pieces, all_pieces: of a row, without and with the padding of its last
    # tile. x_row, codes_row: bytes from a row to the next; x_matrix: from a matrix. blocks: of a
    # padded row.
    griddepcontrol_launch_dependents()
    thread = u32_of_i64(cuda.threadIdx.x)
    lane = and_u32(thread, 31)
    warp = shr_u32(thread, 5)
    warps = shr_u32(u32_of_i64(cuda.blockDim.x), 5)
    leader = eq_u32(thread, 0)
    if leader:
        mbarrier_init(add_u32(shared_base(), BARRIER), 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    # The row, behind the scales.
    there = add_u32(STATE + 127, shl_u32(blocks, 2))
    there = add_u32(shared_base(), and_u32(there, 0xFFFFFF80))
    piece0 = thread
    piece1 = add_u32(thread, u32_of_i64(cuda.blockDim.x))
    real0 = lt_u32(piece0, pieces)
    real1 = lt_u32(piece1, pieces)
    owner0 = owns_scale(piece0, pieces, all_pieces)
    owner1 = owns_scale(piece1, pieces, all_pieces)
    # Threads without a piece work on the first one.
    from0 = select_u32(real0, piece0, 0)
    from1 = select_u32(real1, piece1, 0)
    outputs = (hidden, codes)
    plain_row = i64_of_u32(mul_u32(pieces, piece_bytes()))
    batch = u32_of_i64(cuda.blockIdx.z)
    before = mul_u32(batch, rows)
    matrix_at = i64_of_u32(batch) * x_matrix
    unit = u32_of_i64(cuda.blockIdx.x)
    row = first_row(unit)
    zero = shl_u32(0, 0)
    parity = zero
    griddepcontrol_wait()
    count = u32_of_i64(rows_with_data(row_counts, i64_of_u32(batch), i64_of_u32(rows)))
    if leader and lt_u32(row, count):
        fetch(x, matrix_at, row, x_row, there, pieces)
    if FRONT == "rms":
        v0, w0 = weights(weight, from0)
        v1, w1 = weights(weight, from1)
    c = SIXTH
    r = ONE
    if ENCODE == "scalar" or ENCODE == "array" or ENCODE == "batch":
        g = encode_scale_for(encode_scale, encode_number, decode_scale, i64_of_u32(batch), 0)
        c = mul_rn(g, SIXTH)
        r = rcp_rn(g)
    if ENCODE == "batch":
        if leader and cuda.blockIdx.x == 0:
            decode_scale[i64_of_u32(batch)] = r
    elif ENCODE != "row" and ENCODE != "row_amax":
        if leader and cuda.blockIdx.x == 0 and cuda.blockIdx.z == 0:
            decode_scale[0] = r
    turn = zero
    while lt_u32(turn, 4):
        byte0 = zero
        byte1 = zero
        flat = add_u32(before, row)
        places = (i64_of_u32(flat) * plain_row, i64_of_u32(flat) * i64_of_u32(codes_row))
        if ENCODE == "row":
            if lt_u32(row, rows):
                at = i64_of_u32(flat)
                g = encode_scale_for(encode_scale, encode_number, decode_scale, 0, at)
        if lt_u32(row, count):
            behind = add_u32(row, row_step())
            fetching = leader & lt_u32(turn, 3) & lt_u32(behind, count)
            mbarrier_wait_parity(add_u32(shared_base(), BARRIER), parity)
            parity = xor_u32(parity, 1)
            a0, b0 = held_piece(there, from0, pieces)
            a1, b1 = held_piece(there, from1, pieces)
            if FRONT == "rms":
                first = select_f32(real0, squares(a0, b0), ZERO)
                second = select_f32(real1, squares(a1, b1), ZERO)
                keep_squares(first, second, lane, warp, warps)
            if FRONT == "rms" or ENCODE != "row_amax":
                cuda.syncthreads()
                # Everybody has this row in registers.
                if fetching:
                    fetch(x, matrix_at, behind, x_row, there, pieces)
            if FRONT == "rms":
                if eq_u32(warp, 0):
                    keep_inverse(lane, shl_u32(warps, 1), pieces, eps)
                cuda.syncthreads()
                inverse = ld_shared_f32(add_u32(shared_base(), INVERSE))
                a0 = normalised_half(a0, inverse, v0)
                b0 = normalised_half(b0, inverse, w0)
                a1 = normalised_half(a1, inverse, v1)
                b1 = normalised_half(b1, inverse, w1)
            amax0 = amax_of_block(a0, b0, real0)
            amax1 = amax_of_block(a1, b1, real1)
            if ENCODE == "row_amax":
                largest = max_nan_f32(amax0, amax1)
                odd = and_u32(turn, 1)
                g = encode_scale_of_amax(largest_of_row(largest, lane, warp, warps, odd))
                if FRONT != "rms" and fetching:
                    fetch(x, matrix_at, behind, x_row, there, pieces)
            if ENCODE == "row" or ENCODE == "row_amax":
                c = mul_rn(g, SIXTH)
                r = rcp_rn(g)
                if leader:
                    decode_scale[i64_of_u32(flat)] = r
            byte0 = finish(a0, b0, amax0, c, r, outputs, places, piece0, real0)
            byte1 = finish(a1, b1, amax1, c, r, outputs, places, piece1, real1)
        elif COUNTS != "none":
            if lt_u32(row, rows):
                if ENCODE == "row" or ENCODE == "row_amax":
                    if leader:
                        decode_scale[i64_of_u32(flat)] = rcp_rn(g) if ENCODE == "row" else ONE
                finish_zero(outputs, places, piece0, real0)
                finish_zero(outputs, places, piece1, real1)
        if LAYOUT == "tcgen" or lt_u32(row, rows):
            put_scale(scales, flat, blocks, turn, piece0, byte0, owner0)
            put_scale(scales, flat, blocks, turn, piece1, byte1, owner1)
        row = add_u32(row, row_step())
        turn = add_u32(turn, 1)
    if LAYOUT == "tcgen":
        cuda.syncthreads()
        unit = add_u32(unit, mul_u32(batch, u32_of_i64(cuda.gridDim.x)))
        store_scales(scales, unit, thread, shr_u32(blocks, 2))


FUSED_AHEAD = Kernel(
    "fused_ahead_quantize",
    fused_ahead,
    (
        *("u8*", "u8*", "u8*", "u8*", "u8*", "u8*", "f32*", "f32", "f32*", "f32"),
        *("u32", "u32", "u32", "u32", "i64", "u32", "u32"),
    ),
    {
        **ELEMENT_CONSTANTS,
        "ALIGNED": (True,),
        "ENCODE": ("none", "scalar", "array", "batch", "row", "row_amax"),
        "COUNTS": ("none", "int32", "int64", "uint32"),
        "FRONT": ("plain", "silu", "gpt-oss", "rms"),
        "HALVES": ("split", "interleaved"),
        "WEIGHT": ("none", "same", "float32"),
        "HIDDEN": (False, True),
        "THREADS": (),
        "BLOCKS_PER_SM": (),
    },
    min_cc=(9, 0),
    architectures=("sm_90a", "sm_100a", "sm_103a"),
)

_COMMON = {
    **{"INPUT": "bfloat16", "ROUNDING": "rceil", "ALIGNED": True, "LAYOUT": "tcgen"},
    **{"HALVES": "split", "HIDDEN": False, "COUNTS": "none", "THREADS": 224, "BLOCKS_PER_SM": 4},
}
_NVFP4 = {"ELEMENT": "e2m1", "SCALE": "e4m3"}
_MXFP8 = {"ELEMENT": "e4m3", "SCALE": "e8m0"}
_NORM = {**_COMMON, "FRONT": "rms", "WEIGHT": "same", "UNIT": True, "ENCODE": "none"}
_GATES = {**_COMMON, "FRONT": "silu", "WEIGHT": "none", "UNIT": True, "ENCODE": "none"}
_ROWS = {**_COMMON, "FRONT": "plain", "WEIGHT": "none", "UNIT": False, "ENCODE": "row_amax"}
_HOPPER = {"ARCHITECTURES": ("sm_90a",)}
_BLACKWELL = {"ARCHITECTURES": ("sm_100a", "sm_103a"), "BLOCKS_PER_SM": 2}

VARIANTS = (
    {**_NORM, **_NVFP4, **_HOPPER},
    {**_NORM, **_NVFP4, **_BLACKWELL},
    {**_GATES, **_MXFP8, **_HOPPER},
    {**_ROWS, **_NVFP4, **_HOPPER},
)
_COUNTED = {**_COMMON, "FRONT": "plain", "WEIGHT": "none", "COUNTS": "int32"}
SLOW_VARIANTS = (
    {**_GATES, **_NVFP4, **_BLACKWELL},
    {**_GATES, **_NVFP4, **_HOPPER, "FRONT": "gpt-oss", "HALVES": "interleaved"},
    {**_ROWS, **_NVFP4, **_BLACKWELL, "INPUT": "float32"},
    {**_COUNTED, **_NVFP4, **_HOPPER, "UNIT": False, "ENCODE": "batch"},
    {**_COUNTED, **_MXFP8, **_BLACKWELL, "UNIT": True, "ENCODE": "none", "LAYOUT": "linear"},
    {**_NORM, **_MXFP8, **_HOPPER, "BLOCKS_PER_SM": 2, "INPUT": "float32"},
    {**_NORM, **_NVFP4, **_HOPPER, "THREADS": 512, "BLOCKS_PER_SM": 2, "HIDDEN": True},
)
