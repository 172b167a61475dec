"""Grouped quantisation at the speed of memory: the same bytes as ``grouped_quantize``.

A block of 128 threads takes 64 pieces of 16 columns (half of its threads each) of some rows of one
tile of 128. Its warps first find the tile's range, each by itself: every lane adds up the tiles of
a run of ranges, one scan over the lanes tells the run that has the tile, a second one, over the
ranges of that run, tells the range. Then the block goes over its rows as ``quantize_stream`` does,
two neighbouring ones a thread at a time. Where a tile is not full, the block zeroes its part of the
scales first.

Constraints: ALIGNED; no tile_starts; fewer than 1025 ranges; rows below 2^31; a row of x and of the
result below 4 GB; gridDim.y / SPLIT at least ``layouts.allocated_tiles(rows, groups)``. Grid:
(chunks of 64 pieces, tiles * SPLIT), where SPLIT = 16 / PAIRS.

Compile-time constants beside those of ``grouped_quantize`` and ``stream``: PAIRS, pairs of
rows {2i, 2i + 1} (times four: + {0, 32, 64, 96}) that a block takes: 16, 8, 4, 2, 1.
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
    max_u32,
    min_u32,
    mul_rn,
    mul_u32,
    rcp_rn,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.memory import st_global_u8_if, st_global_v4_u32
from .grouped_pieces import (
    factors_of_row,
    find_tile_quickly,
    load_pair,
    row_from,
    scales_of_pair,
    store_pieces,
    store_scales_of_ranges,
    store_zeros,
)
from .grouped_quantize import INDEX_DTYPES, encode_scale_of
from .groups import expert_of
from .quantize import ELEMENT_CONSTANTS
from .scales import SIXTH

INPUT = "bfloat16"
ELEMENT = "e2m1"
SCALE = "e4m3"
LAYOUT = "tcgen"
ENCODE = "none"
PAIRS = 4

ONE = np.float32(1.0)
THREADS = 128
CHUNK = 64  # pieces that a block takes of a row


def zero_scales(scales, tile_at, share, chunk, across, thread):
    """Zero this block's part of a tile's scales: 32 * PAIRS bytes of each of its 512-byte tiles."""
    k_tiles = 16 if SCALE == "e4m3" else 8
    i = thread
    while i < k_tiles * 2 * PAIRS:
        k = chunk * k_tiles + i // (2 * PAIRS)
        if k < across:
            at = tile_at + k * 512 + share * (32 * PAIRS) + i % (2 * PAIRS) * 16
            st_global_v4_u32(scales, at, 0, 0, 0, 0, "")
        i += THREADS


def row_in_tile(share, line):
    """The first of the two rows of a line of this block, of 128."""
    pair = add_u32(mul_u32(share, PAIRS), shr_u32(line, 2))
    return add_u32(shl_u32(pair, 1), shl_u32(and_u32(line, 3), 5))


def lines_of(share, count):
    """Lines of this block that have one of the first `count` rows of a tile.

    Rows of a pair are those of the pair's number times two and further on: from there on, none is
    among them.
    """
    first = mul_u32(share, PAIRS)
    pairs = min_u32(shr_u32(add_u32(count, 1), 1), add_u32(first, PAIRS))
    return shl_u32(sub_u32(max_u32(pairs, first), first), 2)


def grouped_stream(
    x,
    codes,
    scales,
    row_offsets,
    expert_ids,
    row_indices,
    encode_scale,
    encode_number,
    decode_scale,
    input_rows,
    rows,
    groups,
    experts,
    pieces,
    all_pieces,
    x_row,
    codes_row,
    across,
    tiles,
):
    # across: 512-byte tiles (tcgen) or blocks (linear) of a row. tiles: that the scales have.
    griddepcontrol_launch_dependents()
    thread = u32_of_i64(cuda.threadIdx.x)
    chunk = u32_of_i64(cuda.blockIdx.x)
    split = 16 // PAIRS
    tile = i64_of_u32(u32_of_i64(cuda.blockIdx.y // split))
    share = u32_of_i64(cuda.blockIdx.y % split)
    piece = add_u32(mul_u32(chunk, CHUNK), and_u32(thread, CHUNK - 1))
    beside = shr_u32(thread, 6)
    real = lt_u32(piece, pieces)
    owner = lt_u32(piece, all_pieces)
    if SCALE == "e4m3":
        block = piece
    else:
        block = shr_u32(piece, 1)
        owner = owner & eq_u32(and_u32(piece, 1), 0)
    block_at = add_u32(shl_u32(shr_u32(block, 2), 9), and_u32(block, 3))
    piece_bytes = 64 if INPUT == "float32" else 32
    x_piece = i64_of_u32(piece) * piece_bytes
    codes_piece = i64_of_u32(piece) * (8 if ELEMENT == "e2m1" else 16)
    all_rows = u32_of_i64(rows)
    all_input = u32_of_i64(input_rows)
    griddepcontrol_wait()
    range_of, first_tile, start, stop, used, head, tail = find_tile_quickly(
        row_offsets, groups, rows, tile, and_u32(thread, 31)
    )
    if ENCODE != "row":
        if eq_u32(chunk, 0) & eq_u32(share, 0):
            store_scales_of_ranges(
                decode_scale,
                encode_scale,
                encode_number,
                expert_ids,
                groups,
                experts,
                tile,
                cuda.gridDim.y // split,
            )
    expert = -1
    if range_of >= 0:
        expert = expert_of(expert_ids, range_of, experts)
        first_row = add_u32(start, shl_u32(sub_u32(u32_of_i64(tile), first_tile), 7))
        count = min_u32(sub_u32(stop, first_row), 128)
    else:
        # Most often there are no rows of none, but the blocks of a tile for them.
        first_row = shl_u32(sub_u32(u32_of_i64(tile), used), 7)
        others = add_u32(head, sub_u32(all_rows, tail))
        count = min_u32(sub_u32(max_u32(others, first_row), first_row), 128)
    unowned = range_of < 0
    tile_at = tile * (i64_of_u32(across) * 512)
    if LAYOUT == "tcgen":
        if (lt_u32(count, 128) or expert < 0) and tile < tiles:
            zero_scales(
                scales,
                tile_at,
                i64_of_u32(share),
                i64_of_u32(chunk),
                i64_of_u32(across),
                i64_of_u32(thread),
            )
            cuda.syncthreads()
    line = beside
    if expert < 0:
        # Rows of no range, or of one that is switched off.
        lines = lines_of(share, count)
        while lt_u32(line, lines):
            local = row_in_tile(share, line)
            line = add_u32(line, 2)
            row0 = row_from(first_row, local, unowned, head, tail)
            row1 = row_from(first_row, add_u32(local, 1), unowned, head, tail)
            mine0 = lt_u32(local, count) & lt_u32(row0, all_rows)
            mine1 = lt_u32(add_u32(local, 1), count) & lt_u32(row1, all_rows)
            codes0 = i64_of_u32(row0) * i64_of_u32(codes_row) + codes_piece
            codes1 = i64_of_u32(row1) * i64_of_u32(codes_row) + codes_piece
            store_zeros(codes, codes0, real & mine0)
            store_zeros(codes, codes1, real & mine1)
            if LAYOUT == "linear":
                scale0 = i64_of_u32(row0) * i64_of_u32(across) + i64_of_u32(block)
                scale1 = i64_of_u32(row1) * i64_of_u32(across) + i64_of_u32(block)
                st_global_u8_if(scales, scale0, 0, owner & mine0)
                st_global_u8_if(scales, scale1, 0, owner & mine1)
            if ENCODE == "row":
                if eq_u32(piece, 0):
                    if mine0:
                        decode_scale[i64_of_u32(row0)] = ONE
                    if mine1:
                        decode_scale[i64_of_u32(row1)] = ONE
        return
    g = encode_scale_of(encode_scale, encode_number, expert)
    c0 = mul_rn(g, SIXTH)
    r0 = rcp_rn(g)
    c1 = c0
    r1 = r0
    lines = lines_of(share, count)
    while lt_u32(line, lines):
        local = row_in_tile(share, line)
        line = add_u32(line, 2)
        # The same for all lanes of a warp.
        if lt_u32(local, count):
            row0 = add_u32(first_row, local)
            row1 = add_u32(row0, 1)
            mine1 = lt_u32(add_u32(local, 1), count)
            a0, b0, a1, b1, live0, live1 = load_pair(
                x, row_indices, row0, row1, True, mine1, row0, real, all_input, x_row, x_piece
            )
            if ENCODE == "row":
                c0, r0 = factors_of_row(encode_scale, row0)
                c1, r1 = factors_of_row(encode_scale, row1 if mine1 else row0)
                if eq_u32(piece, 0):
                    decode_scale[i64_of_u32(row0)] = r0
                    if mine1:
                        decode_scale[i64_of_u32(row1)] = r1
            codes0 = i64_of_u32(row0) * i64_of_u32(codes_row) + codes_piece
            if LAYOUT == "tcgen":
                place = add_u32(shl_u32(and_u32(local, 31), 4), shl_u32(shr_u32(local, 5), 2))
                scale0 = tile_at + i64_of_u32(add_u32(block_at, place))
                scale_step = 16
            else:
                scale0 = i64_of_u32(row0) * i64_of_u32(across) + i64_of_u32(block)
                scale_step = i64_of_u32(across)
            owner1 = owner & mine1
            byte0, byte1, q0, q1, held = scales_of_pair(
                a0, b0, a1, b1, live0, live1, c0, r0, c1, r1
            )
            st_global_u8_if(scales, scale0, byte0, owner)
            st_global_u8_if(scales, scale0 + scale_step, byte1, owner1)
            store_pieces(
                codes,
                codes0,
                codes0 + i64_of_u32(codes_row),
                a0,
                b0,
                a1,
                b1,
                q0,
                q1,
                held,
                live0,
                live1,
                real,
                real & mine1,
            )


GROUPED_STREAM = Kernel(
    "grouped_stream",
    grouped_stream,
    (
        *("u8*", "u8*", "u8*", "u8*", "u8*", "u8*", "f32*", "f32", "f32*"),
        *("i64", "i64", "i64", "i64", "u32", "u32", "u32", "u32", "u32", "i64"),
    ),
    {
        **ELEMENT_CONSTANTS,
        "ALIGNED": (True,),
        "ENCODE": ("none", "scalar", "array", "expert", "row"),
        "OFFSETS": INDEX_DTYPES,
        "IDS": ("none", "int32", "int64"),
        "INDICES": ("none", "int32", "int64"),
        "STARTS": ("none",),
        "PAIRS": (1, 2, 4, 8, 16),
        "BLOCKS_PER_SM": (8, 10),
    },
    threads=THREADS,
)

_COMMON = {
    "INPUT": "bfloat16",
    "ALIGNED": True,
    "LAYOUT": "tcgen",
    "ROUNDING": "rceil",
    "OFFSETS": "int32",
    "IDS": "int32",
    "STARTS": "none",
    "PAIRS": 4,
}
_NVFP4 = {"ELEMENT": "e2m1", "SCALE": "e4m3", "UNIT": False, "ENCODE": "expert", "INDICES": "none"}
_MXFP8 = {"ELEMENT": "e4m3", "SCALE": "e8m0", "BLOCKS_PER_SM": 8}

# Ten blocks a processor have 48 registers a thread, too few on sm_120a for CUDA 13.0's assembler.
_TEN = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a")

VARIANTS = (
    {**_COMMON, **_NVFP4, "BLOCKS_PER_SM": 10, "ARCHITECTURES": _TEN},
    {**_COMMON, **_NVFP4, "BLOCKS_PER_SM": 8, "ARCHITECTURES": ("sm_120a", "sm_121a")},
    {**_COMMON, **_MXFP8, "UNIT": True, "ENCODE": "none", "INDICES": "int32"},
)
