"""Quantisation of a matrix, or of a stack of them.

One thread takes a piece of 16 columns; two of them make a block of an MX format and find its
maximum together. Threads lie along the columns (x) and rows (y), blocks of threads along row groups
(x), column groups (y) and matrices (z), each axis in strides of the grid, so that any grid is
right. In the tcgen layout rows and columns go on to the end of the last tile, so that padding gets
its zero.

Constraints: columns is a multiple of the format's block; for the MX formats blockDim.x is even;
with ENCODE "row_amax" blockDim.x is a power of two up to 32 and gridDim.y is 1. With ALIGNED, x,
its strides and codes are multiples of 16 bytes. Rows, columns and strides may be as large as
memory: all index arithmetic has 64 bits.

Compile-time constants beside those of ``elements`` and ``scales``: LAYOUT, and ENCODE, where the
encode scale g comes from: "none" (1), "scalar" (a parameter), "array" (one in memory), "batch" (one
a matrix), "row" (one a row), "amax" (from the maximum that the kernel ``amax`` left in
decode_scale), "row_amax" (from the row, here).
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import max_nan_f32, mul_rn, rcp_rn
from ..ptx.bits import float_as_uint
from ..ptx.memory import red_max_global_u32, st_global_u8
from ..ptx.warp import redux_max_u32, shfl_xor_f32, vote_any
from .elements import ZEROS, amax8, code_bytes, load8, store_codes
from .scales import SIXTH, block_scale, encode_scale_of_amax, tcgen_place, usable
from .warps import amax_of_lanes, lane_count, mask_of, thread_index

LAYOUT = "tcgen"
ENCODE = "none"
SCALE = "e8m0"

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
NO_SCALE = 0


def encode_scale_for(encode_scale, encode_number, decode_scale, batch, row):
    """The encode scale of a row; `row` counts through the whole stack."""
    if ENCODE == "none":
        return ONE
    elif ENCODE == "scalar":
        return usable(encode_number)
    elif ENCODE == "array":
        return usable(encode_scale[0])
    elif ENCODE == "batch":
        return usable(encode_scale[batch])
    elif ENCODE == "row":
        return usable(encode_scale[row])
    else:
        return encode_scale_of_amax(decode_scale[0])


def row_amax(x, at, columns, mask):
    """Largest magnitude of a row of `columns` (0: none), found by the threads of a row together."""
    amax = ZERO
    column = cuda.threadIdx.x * 16
    while column < columns:
        amax = max_nan_f32(amax, amax8(load8(x, at + column)))
        amax = max_nan_f32(amax, amax8(load8(x, at + column + 8)))
        column += cuda.blockDim.x * 16
    return amax_of_lanes(mask, amax, cuda.blockDim.x)


def quantize_piece(x, x_at, read, codes, codes_at, write, c, r, mask):
    """Quantise a piece, zeros where not `read`; codes where `write`; return its scale byte."""
    if read:
        v = load8(x, x_at)
        w = load8(x, x_at + 8)
    else:
        v = ZEROS
        w = ZEROS
    amax = max_nan_f32(amax8(v), amax8(w))
    if SCALE == "e8m0":
        amax = max_nan_f32(amax, shfl_xor_f32(mask, amax, 1))
    byte, q = block_scale(amax, c, r)
    if write:
        store_codes(codes, codes_at, v, w, q)
    return byte


def must_quantize(mask, row_has_codes):
    """Whether this thread quantises in its row; the threads of a block of elements agree."""
    if SCALE == "e4m3":
        return row_has_codes
    else:
        return vote_any(mask, row_has_codes)


def block_of_piece(piece):
    """The block that a piece belongs to."""
    if SCALE == "e4m3":
        return piece
    else:
        return piece >> 1


def padded_pieces(columns):
    """Pieces of a row, with those of the last tile's padding."""
    pieces = columns // 16
    if LAYOUT == "linear":
        return pieces
    elif SCALE == "e4m3":
        return (pieces + 3) // 4 * 4
    else:
        return (pieces + 7) // 8 * 8


def tiles_across(columns):
    """Tiles of 4 blocks in a row."""
    if SCALE == "e4m3":
        return (columns + 63) // 64
    else:
        return (columns + 127) // 128


def scale_bytes(rows, columns):
    """Bytes of the scales of one matrix."""
    if LAYOUT == "linear":
        return rows * block_of_piece(columns // 16)
    else:
        return (rows + 127) // 128 * tiles_across(columns) * 512


def scale_place(row, block, columns):
    """Byte of a scale in the scales of its matrix."""
    if LAYOUT == "linear":
        return row * block_of_piece(columns // 16) + block
    else:
        return tcgen_place(row, block, tiles_across(columns))


def owns_scale(piece):
    """Whether the thread of this piece writes the scale of its block."""
    if SCALE == "e4m3":
        return True
    else:
        return piece & 1 == 0


def quantize(
    x,
    codes,
    scales,
    encode_scale,
    encode_number,
    decode_scale,
    rows,
    columns,
    batches,
    row_stride,
    batch_stride,
):
    mask = mask_of(lane_count())
    pieces = columns // 16
    all_pieces = padded_pieces(columns)
    all_rows = rows
    if LAYOUT == "tcgen":
        all_rows = (rows + 127) // 128 * 128
    width = code_bytes(columns)
    matrix_scales = scale_bytes(rows, columns)
    first = cuda.blockIdx.x == 0 and cuda.blockIdx.y == 0 and thread_index() == 0
    if ENCODE == "none" or ENCODE == "scalar" or ENCODE == "array":
        if first and cuda.blockIdx.z == 0:
            decode_scale[0] = rcp_rn(
                encode_scale_for(encode_scale, encode_number, decode_scale, 0, 0)
            )
    batch = cuda.blockIdx.z + 0
    while batch < batches:
        if ENCODE == "batch":
            if first:
                decode_scale[batch] = rcp_rn(usable(encode_scale[batch]))
        row_group = cuda.blockIdx.x * cuda.blockDim.y
        while row_group < all_rows:
            row = row_group + cuda.threadIdx.y
            inside = row < rows
            flat_row = batch * rows + row
            row_at = batch * batch_stride + row * row_stride
            if ENCODE == "row_amax":
                g = encode_scale_of_amax(row_amax(x, row_at, columns if inside else 0, mask))
            elif inside:
                g = encode_scale_for(encode_scale, encode_number, decode_scale, batch, flat_row)
            else:
                g = ONE
            r = rcp_rn(g)
            c = mul_rn(g, SIXTH)
            if ENCODE == "row" or ENCODE == "row_amax":
                if inside and cuda.blockIdx.y == 0 and cuda.threadIdx.x == 0:
                    decode_scale[flat_row] = r
            busy = must_quantize(mask, inside)
            column_group = cuda.blockIdx.y * cuda.blockDim.x
            while column_group < all_pieces:
                piece = column_group + cuda.threadIdx.x
                live = inside and piece < pieces
                codes_at = flat_row * width + code_bytes(piece * 16)
                byte = NO_SCALE
                if busy:
                    byte = quantize_piece(
                        x, row_at + piece * 16, live, codes, codes_at, live, c, r, mask
                    )
                if row < all_rows and piece < all_pieces and owns_scale(piece):
                    place = scale_place(row, block_of_piece(piece), columns)
                    st_global_u8(scales, batch * matrix_scales + place, byte, "")
                column_group += cuda.gridDim.y * cuda.blockDim.x
            row_group += cuda.gridDim.x * cuda.blockDim.y
        batch += cuda.gridDim.z


# The maximum of a whole tensor -------------------------------------------------------------------


def amax_clear(decode_scale):
    """Zero, from which the maximum starts."""
    decode_scale[0] = ZERO


def amax(x, decode_scale, rows, columns, batches, row_stride, batch_stride):
    """Leave the largest magnitude of x in decode_scale, NaN if there is one, in any order."""
    largest = ZERO
    batch = cuda.blockIdx.z + 0
    while batch < batches:
        row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        while row < rows:
            at = batch * batch_stride + row * row_stride
            column = (cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x) * 16
            while column < columns:
                largest = max_nan_f32(largest, amax8(load8(x, at + column)))
                largest = max_nan_f32(largest, amax8(load8(x, at + column + 8)))
                column += cuda.gridDim.y * cuda.blockDim.x * 16
            row += cuda.gridDim.x * cuda.blockDim.y
        batch += cuda.gridDim.z
    # The patterns of magnitudes are ordered as the values, NaN above infinity.
    pattern = redux_max_u32(mask_of(lane_count()), float_as_uint(largest))
    if thread_index() % 32 == 0:
        red_max_global_u32(decode_scale, 0, pattern)


def amax_finish(decode_scale):
    """Replace the maximum by the decode scale."""
    decode_scale[0] = rcp_rn(encode_scale_of_amax(decode_scale[0]))


#: The values that the constants shared by all quantisers may take.
ELEMENT_CONSTANTS = {
    "INPUT": ("bfloat16", "float16", "float32"),
    "ELEMENT": ("e2m1", "e4m3", "e5m2"),
    "SCALE": ("e4m3", "e8m0"),
    "ROUNDING": ("rceil", "floor", "ceil", "even"),
    "UNIT": (False, True),
    "ALIGNED": (False, True),
    "LAYOUT": ("linear", "tcgen"),
}

QUANTIZE = Kernel(
    "quantize",
    quantize,
    ("u8*", "u8*", "u8*", "f32*", "f32", "f32*", "i64", "i64", "i64", "i64", "i64"),
    {
        **ELEMENT_CONSTANTS,
        "ENCODE": ("none", "scalar", "array", "batch", "row", "amax", "row_amax"),
    },
)
AMAX_CLEAR = Kernel("amax_clear", amax_clear, ("f32*",))
AMAX = Kernel(
    "amax",
    amax,
    ("u8*", "u32*", "i64", "i64", "i64", "i64", "i64"),
    {"INPUT": ELEMENT_CONSTANTS["INPUT"], "ALIGNED": (False, True)},
)
AMAX_FINISH = Kernel("amax_finish", amax_finish, ("f32*",))

_NVFP4 = {"ELEMENT": "e2m1", "SCALE": "e4m3", "ROUNDING": "rceil"}
_MXFP4 = {"ELEMENT": "e2m1", "SCALE": "e8m0", "ROUNDING": "rceil"}
_MXFP8_E4M3 = {"ELEMENT": "e4m3", "SCALE": "e8m0", "ROUNDING": "rceil"}
_MXFP8_E5M2 = {"ELEMENT": "e5m2", "SCALE": "e8m0", "ROUNDING": "rceil"}
_BF16 = {"INPUT": "bfloat16", "ALIGNED": True, "LAYOUT": "tcgen"}
_F32 = {"INPUT": "float32", "ALIGNED": False, "LAYOUT": "linear"}
_F16 = {"INPUT": "float16", "ALIGNED": True, "LAYOUT": "linear"}

VARIANTS = {
    "quantize": (
        {**_NVFP4, **_BF16, "UNIT": True, "ENCODE": "none"},
        {**_NVFP4, **_F16, "UNIT": False, "ENCODE": "row_amax"},
        {**_MXFP4, **_F32, "UNIT": True, "ENCODE": "none", "ROUNDING": "even"},
        {**_MXFP8_E4M3, **_BF16, "UNIT": True, "ENCODE": "none"},
    ),
    "amax": ({"INPUT": "bfloat16", "ALIGNED": True}, {"INPUT": "float32", "ALIGNED": False}),
}
SLOW_VARIANTS = {
    "quantize": (
        *(
            {**_NVFP4, **_F32, "UNIT": False, "ENCODE": e}
            for e in ("scalar", "array", "batch", "row", "amax")
        ),
        {**_MXFP4, **_BF16, "UNIT": False, "ENCODE": "scalar"},
        {**_MXFP8_E5M2, **_F16, "UNIT": True, "ENCODE": "none", "ROUNDING": "floor"},
        {**_MXFP8_E5M2, **_F16, "UNIT": True, "ENCODE": "none", "ROUNDING": "ceil"},
    ),
}
