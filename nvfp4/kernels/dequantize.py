"""From codes and scales back to values: RN(element * f32(scale) * decode_scale), and a cast.

One thread takes a piece of 16 columns, which has one scale. Threads lie along the columns (x) and
rows (y). Dense: blocks of threads along row groups (x), column groups (y) and matrices (z), each
axis in strides of the grid. Grouped: a block of threads serves a tile of 128 rows of one range, as
in ``grouped_quantize``; rows that no range has are written as 0. Padding of the scales is never
read. All index arithmetic has 64 bits.

Compile-time constants: ELEMENT, SCALE, OUTPUT, ALIGNED, LAYOUT, and DECODE, where the decode scale
comes from: "scalar", "batch" (one a matrix), "row" (one a row of the stack, or of the grouped
tensor), "group" (one a range); OFFSETS and STARTS of ``groups``.
"""

from __future__ import annotations

from .._numba import cuda
from ..program import Kernel
from ..ptx.memory import ld_global_u8
from .elements import ZEROS, code_bytes, decode8, load_codes8, store8, times8
from .groups import find_tile, load_index, row_of_none
from .quantize import ELEMENT_CONSTANTS, block_of_piece, scale_bytes, scale_place, tiles_across
from .scales import decode_scale_byte, tcgen_place

ELEMENT = "e2m1"
SCALE = "e8m0"
LAYOUT = "tcgen"
DECODE = "scalar"
STARTS = "none"


def dequantize_piece(codes, codes_at, scales, scale_at, decode, out, out_at):
    """Values of a piece."""
    factor = decode_scale_byte(ld_global_u8(scales, scale_at, ""), SCALE)
    half = code_bytes(8)
    v = times8(times8(decode8(load_codes8(codes, codes_at, ELEMENT), ELEMENT), factor), decode)
    store8(out, out_at, v)
    w = times8(
        times8(decode8(load_codes8(codes, codes_at + half, ELEMENT), ELEMENT), factor), decode
    )
    store8(out, out_at + 8, w)


def dequantize(codes, scales, decode_scale, out, rows, columns, batches):
    pieces = columns // 16
    width = code_bytes(columns)
    matrix_scales = scale_bytes(rows, columns)
    batch = cuda.blockIdx.z + 0
    while batch < batches:
        row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        while row < rows:
            flat_row = batch * rows + row
            if DECODE == "row":
                decode = decode_scale[flat_row]
            elif DECODE == "batch":
                decode = decode_scale[batch]
            else:
                decode = decode_scale[0]
            piece = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
            while piece < pieces:
                dequantize_piece(
                    codes,
                    flat_row * width + code_bytes(piece * 16),
                    scales,
                    batch * matrix_scales + scale_place(row, block_of_piece(piece), columns),
                    decode,
                    out,
                    flat_row * columns + piece * 16,
                )
                piece += cuda.gridDim.y * cuda.blockDim.x
            row += cuda.gridDim.x * cuda.blockDim.y
        batch += cuda.gridDim.z


def grouped_dequantize(
    codes, scales, decode_scale, row_offsets, tile_starts, out, rows, columns, groups, tiles
):
    tile = cuda.blockIdx.x + 0
    owner, first_tile, start, stop, used, head, tail, _ = find_tile(
        row_offsets, tile_starts, groups, rows, tile
    )
    pieces = columns // 16
    width = code_bytes(columns)
    scale_tile = tile
    if owner >= 0 and STARTS != "none":
        scale_tile = load_index(tile_starts, owner, STARTS) + tile - first_tile
    # Tiles beyond the scales can come from bad offsets or starts only: their rows count as
    # belonging to none.
    readable = owner >= 0
    if LAYOUT == "tcgen":
        readable = owner >= 0 and scale_tile >= 0 and scale_tile < tiles
    local = cuda.threadIdx.y + 0
    while local < 128:
        if owner >= 0:
            row = start + ((tile - first_tile) << 7) + local
            mine = row < stop
        else:
            row = row_of_none(((tile - used) << 7) + local, head, tail)
            mine = row < rows
        if mine and readable:
            if DECODE == "row":
                decode = decode_scale[row]
            elif DECODE == "group":
                decode = decode_scale[owner]
            else:
                decode = decode_scale[0]
            piece = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
            while piece < pieces:
                block = block_of_piece(piece)
                if LAYOUT == "linear":
                    scale_at = row * block_of_piece(pieces) + block
                else:
                    scale_at = tcgen_place((scale_tile << 7) + local, block, tiles_across(columns))
                codes_at = row * width + code_bytes(piece * 16)
                dequantize_piece(
                    codes, codes_at, scales, scale_at, decode, out, row * columns + piece * 16
                )
                piece += cuda.gridDim.y * cuda.blockDim.x
        elif mine:
            piece = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
            while piece < pieces:
                store8(out, row * columns + piece * 16, ZEROS)
                store8(out, row * columns + piece * 16 + 8, ZEROS)
                piece += cuda.gridDim.y * cuda.blockDim.x
        local += cuda.blockDim.y


_CONSTANTS = {
    "ELEMENT": ELEMENT_CONSTANTS["ELEMENT"],
    "SCALE": ELEMENT_CONSTANTS["SCALE"],
    "LAYOUT": ELEMENT_CONSTANTS["LAYOUT"],
    "OUTPUT": ("bfloat16", "float16", "float32"),
    "ALIGNED": (False, True),
}

DEQUANTIZE = Kernel(
    "dequantize",
    dequantize,
    ("u8*", "u8*", "f32*", "u8*", "i64", "i64", "i64"),
    {**_CONSTANTS, "DECODE": ("scalar", "batch", "row")},
)
GROUPED_DEQUANTIZE = Kernel(
    "grouped_dequantize",
    grouped_dequantize,
    ("u8*", "u8*", "f32*", "u8*", "u8*", "u8*", "i64", "i64", "i64", "i64"),
    {
        **_CONSTANTS,
        "DECODE": ("scalar", "row", "group"),
        "OFFSETS": ("int32", "int64", "uint32"),
        "STARTS": ("none", "int32", "int64", "uint32"),
    },
)

_NVFP4 = {
    "ELEMENT": "e2m1",
    "SCALE": "e4m3",
    "LAYOUT": "tcgen",
    "OUTPUT": "bfloat16",
    "ALIGNED": True,
}
_E5M2 = {
    "ELEMENT": "e5m2",
    "SCALE": "e8m0",
    "LAYOUT": "linear",
    "OUTPUT": "float32",
    "ALIGNED": False,
}

VARIANTS = {
    "dequantize": ({**_NVFP4, "DECODE": "scalar"}, {**_E5M2, "DECODE": "row"}),
    "grouped_dequantize": (
        {**_NVFP4, "DECODE": "group", "OFFSETS": "int32", "STARTS": "none"},
        {**_E5M2, "DECODE": "row", "OFFSETS": "int64", "STARTS": "int32"},
    ),
}
SLOW_VARIANTS = {
    "dequantize": (
        {**_NVFP4, "DECODE": "batch", "OUTPUT": "float16"},
        {**_NVFP4, "DECODE": "scalar", "ELEMENT": "e4m3", "SCALE": "e8m0"},
    ),
}
