"""Quantisation by ranges of rows, one range an expert: the seeds' grouped kernel.

A block of threads serves one tile of 128 scale rows and some groups of columns. It finds the tile's
range by a search of its warps over the offsets (``groups``), which says the rows, the expert and so
the encode scale, and where the scales go; then it quantises as ``quantize`` does. Blocks of tiles
that no range owns zero their scale tile and the codes of 128 of the rows that no range has. So
every byte is written once, whatever the offsets hold.

Constraints: as in ``quantize``; rows < 2^32; gridDim.x at least ``layouts.allocated_tiles(rows,
groups)`` and at least `tiles`.

Compile-time constants: those of ``quantize`` and ``groups``; ENCODE may be "none", "scalar",
"array", "expert" (one an expert), "row" (one a row of the result) or "row_amax".
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import mul_rn, rcp_rn
from ..ptx.memory import st_global_u8
from .elements import code_bytes
from .groups import expert_of, find_tile, load_index, row_of_none, source_row
from .quantize import (
    ELEMENT_CONSTANTS,
    NO_SCALE,
    block_of_piece,
    must_quantize,
    owns_scale,
    padded_pieces,
    quantize_piece,
    row_amax,
    tiles_across,
)
from .scales import SIXTH, encode_scale_of_amax, tcgen_place, usable
from .warps import lane_count, mask_of, thread_index

LAYOUT = "tcgen"
ENCODE = "none"
STARTS = "none"

ONE = np.float32(1.0)


def encode_scale_of(encode_scale, encode_number, expert):
    """The encode scale of a range, 1 where it is switched off."""
    if ENCODE == "scalar":
        return usable(encode_number) if expert >= 0 else ONE
    elif ENCODE == "array":
        return usable(encode_scale[0]) if expert >= 0 else ONE
    elif ENCODE == "expert":
        return usable(encode_scale[expert]) if expert >= 0 else ONE
    else:
        return ONE


def store_range_scales(decode_scale, encode_scale, encode_number, expert_ids, groups, experts):
    """Write the decode scale of every range, each by one thread of the grid."""
    threads = cuda.blockDim.x * cuda.blockDim.y
    i = cuda.blockIdx.x * threads + thread_index()
    while i < groups:
        expert = expert_of(expert_ids, i, experts)
        decode_scale[i] = rcp_rn(encode_scale_of(encode_scale, encode_number, expert))
        i += cuda.gridDim.x * threads


def clear_tile(scales, tile, columns):
    """Zero a tile row of scales, together with the blocks beside this one."""
    threads = cuda.blockDim.x * cuda.blockDim.y
    width = tiles_across(columns) * 512
    at = cuda.blockIdx.y * threads + thread_index()
    while at < width:
        st_global_u8(scales, tile * width + at, 0, "")
        at += cuda.gridDim.y * threads


def grouped_quantize(
    x,
    codes,
    scales,
    row_offsets,
    expert_ids,
    row_indices,
    tile_starts,
    encode_scale,
    encode_number,
    decode_scale,
    input_rows,
    rows,
    columns,
    row_stride,
    groups,
    experts,
    tiles,
):
    mask = mask_of(lane_count())
    tile = cuda.blockIdx.x + 0
    owner, first_tile, start, stop, used, head, tail, taken = find_tile(
        row_offsets, tile_starts, groups, rows, tile
    )
    if ENCODE != "row" and ENCODE != "row_amax":
        if cuda.blockIdx.y == 0:
            store_range_scales(
                decode_scale, encode_scale, encode_number, expert_ids, groups, experts
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
    pieces = columns // 16
    all_pieces = padded_pieces(columns)
    width = code_bytes(columns)
    g = encode_scale_of(encode_scale, encode_number, expert)
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
        live = source >= 0
        row_at = source * row_stride
        if ENCODE == "row_amax":
            g = encode_scale_of_amax(row_amax(x, row_at, columns if live else 0, mask))
        elif ENCODE == "row":
            g = usable(encode_scale[row]) if mine and expert >= 0 else ONE
        r = rcp_rn(g)
        c = mul_rn(g, SIXTH)
        if ENCODE == "row" or ENCODE == "row_amax":
            if mine and cuda.blockIdx.y == 0 and cuda.threadIdx.x == 0:
                decode_scale[row] = r
        busy = must_quantize(mask, mine)
        column_group = cuda.blockIdx.y * cuda.blockDim.x
        while column_group < all_pieces:
            piece = column_group + cuda.threadIdx.x
            real = piece < pieces
            codes_at = row * width + code_bytes(piece * 16)
            byte = NO_SCALE
            if busy:
                byte = quantize_piece(
                    x,
                    row_at + piece * 16,
                    live and real,
                    codes,
                    codes_at,
                    mine and real,
                    c,
                    r,
                    mask,
                )
            if owns_scale(piece):
                block = block_of_piece(piece)
                if LAYOUT == "linear":
                    if mine and real:
                        st_global_u8(scales, row * block_of_piece(pieces) + block, byte, "")
                elif has_scales and local < 128 and piece < all_pieces:
                    place = tcgen_place((scale_tile << 7) + local, block, tiles_across(columns))
                    st_global_u8(scales, place, byte, "")
            column_group += cuda.gridDim.y * cuda.blockDim.x
        row_group += cuda.blockDim.y
    if LAYOUT == "tcgen" and STARTS != "none":
        if taken == 0 and tile < tiles:
            clear_tile(scales, tile, columns)


INDEX_DTYPES = ("int32", "int64", "uint32")

GROUPED_QUANTIZE = Kernel(
    "grouped_quantize",
    grouped_quantize,
    (
        *("u8*", "u8*", "u8*", "u8*", "u8*", "u8*", "u8*"),
        *("f32*", "f32", "f32*", "i64", "i64", "i64", "i64", "i64", "i64", "i64"),
    ),
    {
        **ELEMENT_CONSTANTS,
        "ENCODE": ("none", "scalar", "array", "expert", "row", "row_amax"),
        "OFFSETS": INDEX_DTYPES,
        "IDS": ("none", "int32", "int64"),
        "INDICES": ("none", "int32", "int64"),
        "STARTS": ("none", *INDEX_DTYPES),
    },
)

_COMMON = {"INPUT": "bfloat16", "ROUNDING": "rceil", "ALIGNED": True, "LAYOUT": "tcgen"}
_ALL_ARRAYS = {"OFFSETS": "int64", "IDS": "int64", "INDICES": "int32", "STARTS": "uint32"}
_OFFSETS_ONLY = {"OFFSETS": "int32", "IDS": "none", "INDICES": "none", "STARTS": "none"}

VARIANTS = {
    "grouped_quantize": (
        {
            **_COMMON,
            **_ALL_ARRAYS,
            "ELEMENT": "e2m1",
            "SCALE": "e4m3",
            "UNIT": False,
            "ENCODE": "expert",
        },
        {
            **_COMMON,
            **_OFFSETS_ONLY,
            "ELEMENT": "e4m3",
            "SCALE": "e8m0",
            "UNIT": True,
            "ENCODE": "none",
        },
    ),
}
SLOW_VARIANTS = {
    "grouped_quantize": (
        *(
            {
                **_COMMON,
                **_ALL_ARRAYS,
                "ELEMENT": "e2m1",
                "SCALE": "e4m3",
                "UNIT": False,
                "ENCODE": encode,
            }
            for encode in ("scalar", "array", "row", "row_amax")
        ),
        {
            **_COMMON,
            **_OFFSETS_ONLY,
            **{"ELEMENT": "e5m2", "SCALE": "e8m0", "UNIT": True, "ENCODE": "none"},
            **{"LAYOUT": "linear", "ALIGNED": False, "INPUT": "float32", "OFFSETS": "uint32"},
        },
    ),
}
