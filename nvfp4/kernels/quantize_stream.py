"""Dense quantisation at the speed of memory: the same bytes as ``quantize``, for aligned arrays.

One thread takes a piece of 16 columns (as in ``quantize``) of ROWS rows; all its loads are issued
before the first is used. The threads of the grid are numbered along the pieces of a row and then
along rows, so that a block reads 4 KB in a row. In the tcgen layout rows come in groups of 8,
{2i, 2i + 1} + {0, 32, 64, 96} of a tile, because their scales fill whole 32-byte sectors, which
then leave the L2 cache complete.

For elements of e2m1 the blocks of a thread that are in range, as all ordinary ones are, take
``ptx.scaled`` and a short form of the scale (``stream``); else the thread does all its blocks
again by the general rules.

An encode scale is read once, together with the input, and its factors are made without a branch
(``stream.quick_factors``): one that is read again behind a store costs the latency of memory once
more. Of one row a thread, warps without any row write their scales and are done.

Constraints: ALIGNED; the pieces of a matrix, padding included, below 2^31, and of an MX format an
even number; rows at least 1; a row of x below 4 GB. Grid: (pieces / ROWS / 128, 1, matrices).

Compile-time constants beside those of ``quantize``: ROWS; STACK: whether there may be more than one
matrix; and the launch bound BLOCKS_PER_SM. ENCODE "row_amax" is not taken.
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import (
    add_u32,
    and_u32,
    eq_u32,
    i64_of_u32,
    lt_u32,
    max_nan_f32,
    mul_u32,
    mulhi_u32,
    select_f32,
    shf_r,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.memory import ld_global_f32, st_global_u8_if, st_global_v2_u32_if
from ..ptx.warp import shfl_xor_f32, vote_any
from .elements import store_codes
from .quantize import ELEMENT_CONSTANTS, encode_scale_for
from .scales import block_scale
from .stream import (
    amax_piece,
    exact_factors,
    load_half_piece,
    quick_factors,
    quick_scale,
    scaled_codes,
    widen,
)

INPUT = "bfloat16"
ELEMENT = "e2m1"
SCALE = "e4m3"
LAYOUT = "tcgen"
ENCODE = "none"
ROUNDING = "rceil"
STACK = True
ROWS = 2

ZERO = np.float32(0.0)
GROUP = 8  # rows of a group
THREADS = 128
WARP = 0xFFFFFFFF


def scale_of_piece(a, b, live, scales, scale_at, owner, row, rows, c, r):
    """Store the scale of a piece, 0 where it is not `live`; return q, whether it holds, amax."""
    amax = select_f32(live, amax_piece(a, b), ZERO)
    if SCALE == "e8m0":
        amax = max_nan_f32(amax, shfl_xor_f32(WARP, amax, 1))
    byte, q, holds = quick_scale(amax, c, r)
    store_scale(scales, scale_at, byte, owner, row, rows)
    return q, holds, amax


def store_scale(scales, at, byte, owner, row, rows):
    """Store the scale of a block; in the tcgen layout that of a padding row too."""
    if LAYOUT == "linear":
        owner = owner & lt_u32(row, rows)
    st_global_u8_if(scales, at, byte, owner)


def encode_scale_at(encode_scale, encode_number, decode_scale, batch, row):
    """The encode scale of a row as it was given, usable or not; `row` counts through the stack."""
    if ENCODE == "array":
        return ld_global_f32(encode_scale, 0, "nc")
    elif ENCODE == "batch":
        return ld_global_f32(encode_scale, batch, "nc")
    elif ENCODE == "row":
        return ld_global_f32(encode_scale, row, "nc")
    else:
        return encode_scale_for(encode_scale, encode_number, decode_scale, batch, row)


def quantize_stream(
    x,
    codes,
    scales,
    encode_scale,
    encode_number,
    decode_scale,
    rows,
    pieces,
    all_pieces,
    lines,
    magic,
    shift,
    x_row,
    x_matrix,
    codes_row,
    codes_matrix,
    scales_row,
    scales_matrix,
):
    # pieces, all_pieces: of a row, without and with the tile's padding. floor(n / all_pieces) = (n
    # * magic >> 32) >>
    # shift for every n here. Then bytes from a row, or a matrix, to the next; scales_row: of a row
    # of tiles in tcgen.
    # Predicates are joined by &: Python's `and` would be a branch. Index arithmetic is 32 bits wide
    # as far as it can be: at memory speed it is a sixth of all instructions.
    griddepcontrol_launch_dependents()
    batch = i64_of_u32(u32_of_i64(cuda.blockIdx.z)) if STACK else 0
    number = u32_of_i64(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    line = mulhi_u32(number, magic)
    line = shf_r(line, 0, shift)
    piece = sub_u32(number, mul_u32(line, all_pieces))
    group = shr_u32(line, 3 if ROWS == 1 else 2)
    g = and_u32(line, GROUP // ROWS - 1)
    valid = lt_u32(line, lines)
    if SCALE == "e4m3":
        block = piece
        owner = valid
    else:
        block = shr_u32(piece, 1)
        owner = valid & eq_u32(and_u32(piece, 1), 0)
    if LAYOUT == "tcgen":
        tile = shr_u32(group, 4)
        pair = and_u32(group, 15)
        low = and_u32(g, 1)
        high = shr_u32(g, 1)
        row = add_u32(add_u32(shl_u32(tile, 7), shl_u32(pair, 1)), add_u32(low, shl_u32(high, 5)))
        place = add_u32(add_u32(shl_u32(pair, 5), shl_u32(low, 4)), shl_u32(high, 2))
        place = add_u32(place, add_u32(shl_u32(shr_u32(block, 2), 9), and_u32(block, 3)))
        scale_at = i64_of_u32(tile) * i64_of_u32(scales_row) + i64_of_u32(place)
        row_step = 128 // ROWS
        scale_step = 16 // ROWS
    else:
        row = add_u32(shl_u32(group, 3), g)
        scale_at = i64_of_u32(row) * i64_of_u32(scales_row) + i64_of_u32(block)
        row_step = GROUP // ROWS
        scale_step = i64_of_u32(scales_row) * row_step
    real = valid & lt_u32(piece, pieces)
    piece_bytes = 64 if INPUT == "float32" else 32
    half = piece_bytes // 2
    x_at = batch * x_matrix + i64_of_u32(row) * i64_of_u32(x_row) + i64_of_u32(piece) * piece_bytes
    x_step = i64_of_u32(x_row) * row_step
    code_piece = 8 if ELEMENT == "e2m1" else 16
    codes_at = (
        batch * codes_matrix
        + i64_of_u32(row) * i64_of_u32(codes_row)
        + i64_of_u32(piece) * code_piece
    )
    codes_step = i64_of_u32(codes_row) * row_step
    scale_at += batch * scales_matrix
    flat = batch * i64_of_u32(rows)
    griddepcontrol_wait()
    if ROWS == 1:
        if not vote_any(WARP, real & lt_u32(row, rows)):
            store_scale(scales, scale_at, 0, owner, row, rows)
            return
    # Lanes without work read element 0 and write nothing: a branch around the loads would cost
    # moves. Loads run ahead.
    live0 = real & lt_u32(row, rows)
    flat0 = flat + i64_of_u32(row) if live0 else 0
    g0 = encode_scale_at(encode_scale, encode_number, decode_scale, batch, flat0)
    at0 = x_at if live0 else 0
    a0 = load_half_piece(x, at0)
    b0 = load_half_piece(x, at0 + half)
    if ROWS > 1:
        row1 = add_u32(row, row_step)
        live1 = real & lt_u32(row1, rows)
        g1 = g0
        if ENCODE == "row":
            flat1 = flat + i64_of_u32(row1) if live1 else 0
            g1 = encode_scale_at(encode_scale, encode_number, decode_scale, batch, flat1)
        at1 = x_at + x_step if live1 else 0
        a1 = load_half_piece(x, at1)
        b1 = load_half_piece(x, at1 + half)
    c0, r0, usual0 = quick_factors(g0)
    q0, holds0, amax0 = scale_of_piece(a0, b0, live0, scales, scale_at, owner, row, rows, c0, r0)
    hold = holds0 & usual0
    if ROWS > 1:
        c1, r1, usual1 = (c0, r0, usual0) if ENCODE != "row" else quick_factors(g1)
        q1, holds1, amax1 = scale_of_piece(
            a1, b1, live1, scales, scale_at + scale_step, owner, row1, rows, c1, r1
        )
        hold = hold & holds1 & usual1
    # One branch for all rows: the compiler interleaves only what has no branch between.
    # Lanes without work compute on element 0, whatever it is.
    if ELEMENT == "e2m1" and hold:
        low0 = scaled_codes(a0, q0)
        high0 = scaled_codes(b0, q0)
        if ROWS > 1:
            low1 = scaled_codes(a1, q1)
            high1 = scaled_codes(b1, q1)
        st_global_v2_u32_if(codes, codes_at, low0, high0, live0)
        if ROWS > 1:
            st_global_v2_u32_if(codes, codes_at + codes_step, low1, high1, live1)
    else:
        if live0:
            c0, r0 = exact_factors(g0)
            byte, q0 = block_scale(amax0, c0, r0)
            if ELEMENT == "e2m1":
                store_scale(scales, scale_at, byte, owner, row, rows)
            store_codes(codes, codes_at, widen(a0), widen(b0), q0)
        if ROWS > 1:
            if live1:
                c1, r1 = exact_factors(g1)
                byte, q1 = block_scale(amax1, c1, r1)
                if ELEMENT == "e2m1":
                    store_scale(scales, scale_at + scale_step, byte, owner, row1, rows)
                store_codes(codes, codes_at + codes_step, widen(a1), widen(b1), q1)
    # By exact factors: r need not be the reciprocal of what counts as 1.
    if ENCODE == "row":
        # Once a row: by the thread of its first piece.
        if eq_u32(piece, 0):
            if live0:
                decode_scale[flat0] = exact_factors(g0)[1]
            if ROWS > 1:
                if live1:
                    decode_scale[flat1] = exact_factors(g1)[1]
    elif ENCODE == "batch":
        if number == 0:
            decode_scale[batch] = exact_factors(g0)[1]
    elif ENCODE != "amax":
        if number == 0 and batch == 0:
            decode_scale[0] = exact_factors(g0)[1]


QUANTIZE_STREAM = Kernel(
    "quantize_stream",
    quantize_stream,
    ("u8*", "u8*", "u8*", "f32*", "f32", "f32*")
    + ("u32", "u32", "u32", "u32", "u32", "u32", "u32", "i64", "u32", "i64", "u32", "i64"),
    {
        **ELEMENT_CONSTANTS,
        "ALIGNED": (True,),
        "ENCODE": ("none", "scalar", "array", "batch", "row", "amax"),
        "ROWS": (1, 2),
        "STACK": (False, True),
        "BLOCKS_PER_SM": (8, 10, 12, 16),
    },
    threads=THREADS,
)

_NVFP4 = {"ELEMENT": "e2m1", "SCALE": "e4m3", "ROUNDING": "rceil", "BLOCKS_PER_SM": 10}
_MXFP4 = {"ELEMENT": "e2m1", "SCALE": "e8m0", "ROUNDING": "rceil", "BLOCKS_PER_SM": 12}
_MXFP8 = {"ELEMENT": "e4m3", "SCALE": "e8m0", "ROUNDING": "rceil", "BLOCKS_PER_SM": 12}
_COMMON = {
    "INPUT": "bfloat16",
    "ALIGNED": True,
    "LAYOUT": "tcgen",
    "UNIT": True,
    "ENCODE": "none",
    "STACK": False,
}

VARIANTS = (
    {**_COMMON, **_NVFP4, "ROWS": 2},
    {**_COMMON, **_MXFP4, "ROWS": 2},
    {**_COMMON, **_MXFP8, "ROWS": 2},
)
SLOW_VARIANTS = (
    {**_COMMON, **_NVFP4, "ROWS": 1, "BLOCKS_PER_SM": 16},
    {**_COMMON, **_NVFP4, "ROWS": 2, "INPUT": "float16", "UNIT": False, "ENCODE": "array"},
    {**_COMMON, **_NVFP4, "ROWS": 2, "INPUT": "float32", "LAYOUT": "linear", "BLOCKS_PER_SM": 8},
    {**_COMMON, **_MXFP4, "ROWS": 2, "ROUNDING": "even", "LAYOUT": "linear"},
    {**_COMMON, **_MXFP8, "ROWS": 1, "ELEMENT": "e5m2", "BLOCKS_PER_SM": 16},
    {**_COMMON, **_NVFP4, "ROWS": 2, "UNIT": False, "ENCODE": "row", "STACK": True},
)
