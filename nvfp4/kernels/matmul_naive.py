"""Products, slow and obvious: one thread an element, k ascending, every operation rounded once.

These are the reference kernels, for every pair of formats and every layout; their results are the
golden model's bit for bit, whatever the operands hold. Threads lie along the columns (x) and rows
(y) of the result. Dense: blocks of threads along row groups (x) and column groups (y), in strides
of the grid. Grouped: a block of threads serves a tile of 128 rows of one range (``groups``); rows
without an expert, without a source and of no range are written as 0.

A format as the result's type: the values, in float32 after the epilogue, are quantised here, with
an encode scale of 1. The threads of a block of elements lie beside each other in a warp (blockDim.x
is 32), and padding is written as 0.

Constraints: depth is a multiple of both operands' blocks; quantised, the columns of the result are
one of its block; for a grouped product rows < 2^32.

Compile-time constants: those of ``products``; A_ELEMENT, A_SCALE, A_LAYOUT and B_ELEMENT, B_SCALE,
B_LAYOUT; OUTPUT (a dtype, or "codes": then ELEMENT, SCALE and LAYOUT are the result's); the index
dtypes of ``groups``, where STARTS is that of the result's tile starts, and A_STARTS that of A's.
"""

from __future__ import annotations

import functools

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import abs_f32, mul_rn
from ..ptx.convert import e2m1x2_of_f32, e4m3x2_of_f32, e5m2x2_of_f32
from ..ptx.memory import st_global_u8
from ..ptx.warp import shfl_xor_f32, vote_any
from .elements import store_one
from .grouped_quantize import clear_tile
from .groups import expert_of, find_tile, load_index, row_of_none, source_row
from .products import (
    add_products8,
    decode_of_b,
    epilogue,
    factor_of_row,
    first_of_pair,
    matrix_scales,
    operand8,
    pair_epilogue,
    result_columns,
    row_units,
    scale_of_piece,
    second_of_pair,
)
from .quantize import NO_SCALE
from .scales import SIXTH, block_scale, tcgen_place
from .warps import amax_of_lanes, lane_count, mask_of, thread_index

A_ELEMENT = "none"
A_SCALE = "e8m0"
A_LAYOUT = "linear"
B_ELEMENT = "e2m1"
B_SCALE = "e8m0"
B_LAYOUT = "tcgen"
OUTPUT = "bfloat16"
ELEMENT = "e2m1"
SCALE = "e8m0"
LAYOUT = "tcgen"
PAIR = "none"
A_STARTS = "none"
STARTS = "none"

ZERO = np.float32(0.0)
ONE = np.float32(1.0)


def dot(a, a_scales, a_at, a_scale_row, b, b_scales, b_at, b_scales_at, n, depth):
    """The sum over k of a[k] * sa * b[k] * sb, k ascending."""
    total = ZERO
    sa = ONE
    piece = 0
    while piece * 16 < depth:
        k = piece * 16
        if A_ELEMENT != "none":
            sa = scale_of_piece(a_scales, 0, a_scale_row, piece, depth, A_SCALE, A_LAYOUT)
        sb = scale_of_piece(b_scales, b_scales_at, n, piece, depth, B_SCALE, B_LAYOUT)
        for half in range(2):
            v = operand8(a, a_at, k + half * 8, A_ELEMENT, sa)
            w = operand8(b, b_at, k + half * 8, B_ELEMENT, sb)
            total = add_products8(total, v, w)
        piece += 1
    return total


def product(
    a, a_scales, a_at, a_scale_row, b, b_scales, b_decode, expert, n, columns, depth, row_factor
):
    """One element of the product, times its factor."""
    b_at = (expert * columns + n) * row_units(depth, B_ELEMENT)
    b_scales_at = expert * matrix_scales(columns, depth, B_SCALE, B_LAYOUT)
    total = dot(a, a_scales, a_at, a_scale_row, b, b_scales, b_at, b_scales_at, n, depth)
    return mul_rn(total, mul_rn(row_factor, decode_of_b(b_decode, expert, n, columns)))


def element(
    a,
    a_scales,
    a_at,
    a_scale_row,
    b,
    b_scales,
    b_decode,
    expert,
    row,
    column,
    columns,
    depth,
    row_factor,
    e0,
    e1,
    e2,
    e3,
):
    """One element of the result, in float32."""
    n = first_of_pair(column, columns)
    value = product(
        a, a_scales, a_at, a_scale_row, b, b_scales, b_decode, expert, n, columns, depth, row_factor
    )
    if PAIR == "none":
        return np.float32(epilogue(value, row, column, expert, e0, e1, e2, e3))
    else:
        n = second_of_pair(column, columns)
        up = product(
            a,
            a_scales,
            a_at,
            a_scale_row,
            b,
            b_scales,
            b_decode,
            expert,
            n,
            columns,
            depth,
            row_factor,
        )
        return np.float32(pair_epilogue(value, up, row, column, expert, e0, e1, e2, e3))


# A result of codes -------------------------------------------------------------------------------


def result_block():
    """Columns of the result that share a scale."""
    if SCALE == "e4m3":
        return 16
    else:
        return 32


def result_k_tiles(width):
    """Tiles of 4 blocks in a row of the result."""
    if SCALE == "e4m3":
        return (width + 63) // 64
    else:
        return (width + 127) // 128


def all_columns(width):
    """Columns that threads visit: with tcgen scales, up to the end of the last tile."""
    if OUTPUT == "codes" and LAYOUT == "tcgen":
        return result_k_tiles(width) * 4 * result_block()
    else:
        return width


def store_code(out, at, value, q, mask, write):
    """Write the code of a value as number `at` of all; the next lane has the rest of a byte."""
    scaled = mul_rn(value, q)
    if ELEMENT == "e2m1":
        above = shfl_xor_f32(mask, scaled, 1)
        if write and at & 1 == 0:
            st_global_u8(out, at >> 1, e2m1x2_of_f32(above, scaled), "")
    elif ELEMENT == "e4m3":
        if write:
            st_global_u8(out, at, e4m3x2_of_f32(ZERO, scaled), "")
    elif write:
        st_global_u8(out, at, e5m2x2_of_f32(ZERO, scaled), "")


def store_result(out, out_scales, row, column, width, value, write, scale_row, write_scale, mask):
    """Write an element of the result, and the scale of its block; all lanes of a warp call it.

    `scale_row` is the row of the scales in their layout.
    """
    if OUTPUT != "codes":
        if write:
            store_one(out, row * width + column, value)
    else:
        byte = NO_SCALE
        if vote_any(mask, write):
            amax = amax_of_lanes(mask, abs_f32(value), result_block())
            byte, q = block_scale(amax, SIXTH, ONE)
            store_code(out, row * width + column, value, q, mask, write)
        block = column // result_block()
        if write_scale and column % result_block() == 0:
            if LAYOUT == "linear":
                st_global_u8(out_scales, scale_row * (width // result_block()) + block, byte, "")
            else:
                st_global_u8(
                    out_scales, tcgen_place(scale_row, block, result_k_tiles(width)), byte, ""
                )


# Bodies ------------------------------------------------------------------------------------------


def matmul(
    a,
    a_scales,
    a_decode,
    b,
    b_scales,
    b_decode,
    alpha,
    alpha_number,
    out,
    out_scales,
    out_decode,
    e0,
    e1,
    e2,
    e3,
    rows,
    columns,
    depth,
    a_stride,
):
    mask = mask_of(lane_count())
    width = result_columns(columns)
    wide = all_columns(width)
    high = rows
    if OUTPUT == "codes":
        if LAYOUT == "tcgen":
            high = (rows + 127) // 128 * 128
        if cuda.blockIdx.x == 0 and cuda.blockIdx.y == 0 and thread_index() == 0:
            out_decode[0] = ONE
    row_group = cuda.blockIdx.x * cuda.blockDim.y
    while row_group < high:
        row = row_group + cuda.threadIdx.y
        inside = row < rows
        row_factor = ONE
        if inside:
            row_factor = factor_of_row(alpha, alpha_number, a_decode, 0, row, 0)
        column_group = cuda.blockIdx.y * cuda.blockDim.x
        while column_group < wide:
            column = column_group + cuda.threadIdx.x
            live = inside and column < width
            value = ZERO
            if live:
                value = element(
                    a,
                    a_scales,
                    row * a_stride,
                    row,
                    b,
                    b_scales,
                    b_decode,
                    0,
                    row,
                    column,
                    columns,
                    depth,
                    row_factor,
                    e0,
                    e1,
                    e2,
                    e3,
                )
            scaled = row < high and column < wide
            store_result(out, out_scales, row, column, width, value, live, row, scaled, mask)
            column_group += cuda.gridDim.y * cuda.blockDim.x
        row_group += cuda.gridDim.x * cuda.blockDim.y


def grouped_matmul(
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
    out_scales,
    out_decode,
    out_tile_starts,
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
    out_tiles,
):
    mask = mask_of(lane_count())
    tile = cuda.blockIdx.x + 0
    # The tiles of the result, which must all be written; those of A are only read.
    owner, first_tile, start, stop, used, head, tail, taken = find_tile(
        row_offsets, out_tile_starts, groups, rows, tile
    )
    width = result_columns(columns)
    wide = all_columns(width)
    expert = -1
    a_tile = tile
    out_tile = tile
    if owner >= 0:
        expert = expert_of(expert_ids, owner, experts)
        if A_STARTS != "none":
            a_tile = load_index(tile_starts, owner, A_STARTS) + tile - first_tile
        if STARTS != "none":
            out_tile = load_index(out_tile_starts, owner, STARTS) + tile - first_tile
    elif STARTS != "none":
        out_tile = -1
    if A_LAYOUT == "tcgen":
        if a_tile < 0 or a_tile >= tiles:
            expert = -1
    if OUTPUT == "codes" and cuda.blockIdx.y == 0:
        threads = cuda.blockDim.x * cuda.blockDim.y
        i = tile * threads + thread_index()
        while i < groups:
            out_decode[i] = ONE
            i += cuda.gridDim.x * threads
    row_group = 0
    while row_group < 128:
        local = row_group + cuda.threadIdx.y
        if owner >= 0:
            row = start + ((tile - first_tile) << 7) + local
            mine = local < 128 and row < stop
        else:
            row = row_of_none(((tile - used) << 7) + local, head, tail)
            mine = local < 128 and row < rows
        source = -1
        if mine and expert >= 0:
            source = source_row(row_indices, row, input_rows)
        row_factor = ONE
        a_scale_row = source
        if source >= 0:
            row_factor = factor_of_row(alpha, alpha_number, a_decode, expert, source, owner)
            if A_LAYOUT == "tcgen":
                a_scale_row = (a_tile << 7) + local
        column_group = cuda.blockIdx.y * cuda.blockDim.x
        while column_group < wide:
            column = column_group + cuda.threadIdx.x
            value = ZERO
            if source >= 0 and column < width:
                value = element(
                    a,
                    a_scales,
                    source * a_stride,
                    a_scale_row,
                    b,
                    b_scales,
                    b_decode,
                    expert,
                    row,
                    column,
                    columns,
                    depth,
                    row_factor,
                    e0,
                    e1,
                    e2,
                    e3,
                )
            write = mine and column < width
            if LAYOUT == "linear":
                store_result(out, out_scales, row, column, width, value, write, row, write, mask)
            else:
                scaled = local < 128 and column < wide and out_tile >= 0 and out_tile < out_tiles
                scale_row = (out_tile << 7) + local
                store_result(
                    out, out_scales, row, column, width, value, write, scale_row, scaled, mask
                )
            column_group += cuda.gridDim.y * cuda.blockDim.x
        row_group += cuda.blockDim.y
    if OUTPUT == "codes" and LAYOUT == "tcgen" and STARTS != "none":
        if taken == 0 and tile < out_tiles:
            clear_tile(out_scales, tile, width)


# Kernels -----------------------------------------------------------------------------------------

#: Parameter type of an array of an epilogue, by its dtype.
EPILOGUE_TYPES = {
    "float32": "f32*",
    "float16": "f16*",
    "bfloat16": "bf16*",
    "int32": "i32*",
    "int64": "i64*",
    "uint8": "u8*",
}
#: Arrays that an epilogue may have.
EPILOGUE_ARRAYS = 4

_ELEMENTS = ("e2m1", "e4m3", "e5m2")
_SCALES = ("e4m3", "e8m0")
_LAYOUTS = ("linear", "tcgen")
_INDICES = ("int32", "int64", "uint32")
_CONSTANTS = {
    "A_ELEMENT": ("none", *_ELEMENTS),
    "A_SCALE": _SCALES,
    "A_LAYOUT": _LAYOUTS,
    "B_ELEMENT": _ELEMENTS,
    "B_SCALE": _SCALES,
    "B_LAYOUT": _LAYOUTS,
    "INPUT": ("bfloat16", "float16"),
    "ALIGNED": (False, True),
    "ALPHA": ("value", "array", "expert"),
    "DECODE_A": ("none", "scalar", "row", "group"),
    "DECODE_B": ("scalar", "row", "batch", "batch_row"),
    "PAIR": ("none", "halves", "interleaved"),
    "OUTPUT": ("bfloat16", "float16", "float32", "codes"),
    "ELEMENT": _ELEMENTS,
    "SCALE": _SCALES,
    "LAYOUT": _LAYOUTS,
    "ROUNDING": ("rceil",),
    "UNIT": (True,),
}
_OPERANDS = ("u8*", "u8*", "f32*", "u8*", "u8*", "f32*")


@functools.cache
def matmul_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The dense kernel for an epilogue with arrays of these dtypes."""
    parameters = (
        *_OPERANDS,
        *("f32*", "f32", "u8*", "u8*", "f32*"),
        *_epilogue_types(arrays),
        *("i64", "i64", "i64", "i64"),
    )
    return Kernel("matmul_naive", matmul, parameters, _CONSTANTS)


@functools.cache
def grouped_matmul_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The grouped kernel for an epilogue with arrays of these dtypes."""
    parameters = (
        *_OPERANDS,
        *("u8*", "u8*", "u8*", "u8*"),
        *("f32*", "f32", "u8*", "u8*", "f32*", "u8*"),
        *_epilogue_types(arrays),
        *("i64", "i64", "i64", "i64", "i64", "i64", "i64", "i64", "i64"),
    )
    constants = {
        **_CONSTANTS,
        "OFFSETS": (*_INDICES, *[f"counts_{dtype}" for dtype in _INDICES]),
        "IDS": ("none", "int32", "int64"),
        "INDICES": ("none", "int32", "int64"),
        "STARTS": ("none", *_INDICES),
        "A_STARTS": ("none", *_INDICES),
    }
    return Kernel("grouped_matmul_naive", grouped_matmul, parameters, constants)


def _epilogue_types(arrays):
    types = [EPILOGUE_TYPES[dtype] for dtype in arrays]
    return (*types, *["u8*"] * (EPILOGUE_ARRAYS - len(types)))


MATMUL = matmul_kernel()
GROUPED_MATMUL = grouped_matmul_kernel()


def epilogue_function(fn, arrays: int, pair: bool):
    """The caller's function as the kernels call it, with as many arrays as there are parameters."""
    # One function an arity: a kernel cannot pass a tuple of pointers of different types.
    if pair:
        return (
            lambda gate, up, row, column, expert, e0, e1, e2, e3: fn(gate, up, row, column, expert),
            lambda gate, up, row, column, expert, e0, e1, e2, e3: fn(
                gate, up, row, column, expert, e0
            ),
            lambda gate, up, row, column, expert, e0, e1, e2, e3: fn(
                gate, up, row, column, expert, e0, e1
            ),
            lambda gate, up, row, column, expert, e0, e1, e2, e3: fn(
                gate, up, row, column, expert, e0, e1, e2
            ),
            lambda gate, up, row, column, expert, e0, e1, e2, e3: fn(
                gate, up, row, column, expert, e0, e1, e2, e3
            ),
        )[arrays]
    return (
        lambda value, row, column, expert, e0, e1, e2, e3: fn(value, row, column, expert),
        lambda value, row, column, expert, e0, e1, e2, e3: fn(value, row, column, expert, e0),
        lambda value, row, column, expert, e0, e1, e2, e3: fn(value, row, column, expert, e0, e1),
        lambda value, row, column, expert, e0, e1, e2, e3: fn(
            value, row, column, expert, e0, e1, e2
        ),
        lambda value, row, column, expert, e0, e1, e2, e3: fn(
            value, row, column, expert, e0, e1, e2, e3
        ),
    )[arrays]


_NVFP4_B = {"B_ELEMENT": "e2m1", "B_SCALE": "e4m3", "B_LAYOUT": "tcgen"}
_MXFP8_B = {"B_ELEMENT": "e4m3", "B_SCALE": "e8m0", "B_LAYOUT": "linear"}
_NVFP4_A = {"A_ELEMENT": "e2m1", "A_SCALE": "e4m3", "A_LAYOUT": "tcgen"}
_PLAIN_A = {"A_ELEMENT": "none", "A_SCALE": "e8m0", "A_LAYOUT": "linear", "DECODE_A": "none"}
_PRODUCT = {"INPUT": "bfloat16", "ALIGNED": False, "ALPHA": "value", "PAIR": "none"}
_VALUES = {"OUTPUT": "bfloat16", "ELEMENT": "e2m1", "SCALE": "e8m0", "LAYOUT": "linear"}
_CODES = {"OUTPUT": "codes", "ELEMENT": "e2m1", "SCALE": "e4m3", "LAYOUT": "tcgen"}
_QUANTIZE = {"ROUNDING": "rceil", "UNIT": True}
_DENSE = {**_PRODUCT, **_QUANTIZE, "DECODE_B": "scalar"}
_GROUPED = {**_PRODUCT, **_QUANTIZE, "DECODE_B": "batch", "ALPHA": "expert", "OFFSETS": "int32"}
_NO_ARRAYS = {"IDS": "none", "INDICES": "none", "STARTS": "none", "A_STARTS": "none"}
_ARRAYS = {"IDS": "int32", "INDICES": "none", "STARTS": "int32", "A_STARTS": "int32"}

VARIANTS = {
    "matmul_naive": (
        {**_DENSE, **_NVFP4_A, **_NVFP4_B, **_VALUES, "DECODE_A": "scalar"},
        {**_DENSE, **_PLAIN_A, **_MXFP8_B, **_CODES, "PAIR": "halves"},
    ),
    "grouped_matmul_naive": (
        {**_GROUPED, **_PLAIN_A, **_NVFP4_B, **_VALUES, **_NO_ARRAYS, "INDICES": "int32"},
        {**_GROUPED, **_NVFP4_A, **_MXFP8_B, **_CODES, **_ARRAYS, "DECODE_A": "group"},
    ),
}
_COUNTED = {**_NO_ARRAYS, "OFFSETS": "counts_int32", "DECODE_A": "group"}
SLOW_VARIANTS = {
    "grouped_matmul_naive": ({**_GROUPED, **_NVFP4_A, **_NVFP4_B, **_CODES, **_COUNTED},),
}
