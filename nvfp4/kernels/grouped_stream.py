"""Grouped quantisation at the speed of memory: the same bytes as ``grouped_quantize``.

A block of 128 threads takes 64 pieces of 16 columns (half of its threads a row, two neighbouring
rows at a time) of some rows of one tile of 128. Its warps first find the tile's range, each by
itself: every lane adds up the tiles of a run of ranges, one scan over the lanes tells the run that
has the tile, a second one, over the ranges of that run, tells the range. Then it goes over its
rows as ``quantize_stream`` does, a pair of rows that lie 64 apart at a time. Where a tile is not
full, the block zeroes its part of the scales first.

Constraints: ALIGNED; no tile_starts; fewer than 1025 ranges; a row of x and of the result below
4 GB; gridDim.y / SPLIT at least ``layouts.allocated_tiles(rows, groups)``. Grid: (chunks of 64
pieces, tiles * SPLIT), where SPLIT = 16 / PAIRS.

Compile-time constants beside those of ``grouped_quantize`` and ``quantize_stream``: PAIRS, pairs of
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
    max_nan_f32,
    mul_rn,
    rcp_rn,
    select_f32,
    select_u32,
    shl_u32,
    shr_u32,
    u32_of_i64,
)
from ..ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.memory import (
    st_global_u8_if,
    st_global_v2_u32_if,
    st_global_v4_u32,
    st_global_v4_u32_if,
)
from ..ptx.warp import ballot, shfl_idx_u32, shfl_xor_f32, vote_all
from .elements import encode_e2m1x8, encode_float8x4
from .grouped_quantize import INDEX_DTYPES, encode_scale_of
from .groups import (
    expert_of,
    find_tile,
    load_index,
    lowest_lane,
    row_of_none,
    running_sum,
    source_row,
)
from .quantize import ELEMENT_CONSTANTS
from .quantize_stream import amax_piece, load_half_piece, quick_scale, scaled_codes, widen
from .scales import SIXTH, block_scale, usable

INPUT = "bfloat16"
ELEMENT = "e2m1"
SCALE = "e4m3"
LAYOUT = "tcgen"
ENCODE = "none"
OFFSETS = "int32"
PAIRS = 4

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
WARP = 0xFFFFFFFF
THREADS = 128
CHUNK = 64  # pieces that a block takes of a row
MOST_RANGES = 1024


def range_tiles(low, high):
    """Tiles of a range of rows."""
    return (high - low + 127) >> 7


def find_tile_quickly(row_offsets, groups, rows, tile, lane):
    """Find what belongs to a tile, as ``groups.find_tile`` does and with the same results.

    All lanes of a full warp call it. Offsets that decrease or leave the rows go to ``find_tile``.
    """
    per = (groups + 31) >> 5
    first = lane * per
    last = min(first + per, groups)
    low = 0
    own = 0
    good = True
    if first < last:
        low = load_index(row_offsets, first, OFFSETS)
        good = low >= 0
    i = first
    while i < last:
        # Four loads at once: one after the other they would take the time of as many.
        a = load_index(row_offsets, min(i + 1, groups), OFFSETS)
        b = load_index(row_offsets, min(i + 2, groups), OFFSETS)
        c = load_index(row_offsets, min(i + 3, groups), OFFSETS)
        d = load_index(row_offsets, min(i + 4, groups), OFFSETS)
        good = good & (a >= low) & (a <= rows)
        own += range_tiles(low, a)
        if i + 1 < last:
            good = good & (b >= a) & (b <= rows)
            own += range_tiles(a, b)
        if i + 2 < last:
            good = good & (c >= b) & (c <= rows)
            own += range_tiles(b, c)
        if i + 3 < last:
            good = good & (d >= c) & (d <= rows)
            own += range_tiles(c, d)
        low = d
        i += 4
    if not vote_all(WARP, good) or groups == 0:
        owner, first_tile, start, stop, tiles, head, tail, _ = find_tile(
            row_offsets, row_offsets, groups, rows, tile
        )
        return owner, first_tile, start, stop, tiles, head, tail
    upto = running_sum(WARP, own, lane, 32)
    before = upto - own
    tiles = i64_of_u32(shfl_idx_u32(WARP, u32_of_i64(upto), 31))
    votes = ballot(WARP, (before <= tile) & (tile < upto))
    head = load_index(row_offsets, 0, OFFSETS)
    tail = load_index(row_offsets, groups, OFFSETS)
    owner = -1
    first_tile = 0
    start = 0
    stop = 0
    if votes != 0:
        source = lowest_lane(votes)
        base = i64_of_u32(shfl_idx_u32(WARP, u32_of_i64(before), source))
        mine = source * per + lane
        inside = (lane < per) & (mine < groups)
        lower = 0
        upper = 0
        if inside:
            lower = load_index(row_offsets, mine, OFFSETS)
            upper = load_index(row_offsets, mine + 1, OFFSETS)
        own = range_tiles(lower, upper)
        before = base + running_sum(WARP, own, lane, 32) - own
        source = lowest_lane(ballot(WARP, inside & (before <= tile) & (tile < before + own)))
        owner = i64_of_u32(shfl_idx_u32(WARP, u32_of_i64(mine), source))
        first_tile = i64_of_u32(shfl_idx_u32(WARP, u32_of_i64(before), source))
        start = i64_of_u32(shfl_idx_u32(WARP, u32_of_i64(lower), source))
        stop = i64_of_u32(shfl_idx_u32(WARP, u32_of_i64(upper), source))
    return owner, first_tile, start, stop, tiles, head, tail


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
    """The first row of a line of this block, of 128; its second is 64 further."""
    pair = share * PAIRS + (line >> 2)
    return 2 * pair + (line & 1) + ((line >> 1) & 1) * 32


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
    thread = cuda.threadIdx.x + 0
    lane = thread & 31
    chunk = cuda.blockIdx.x + 0
    split = 16 // PAIRS
    tile = cuda.blockIdx.y // split
    share = cuda.blockIdx.y % split
    piece = u32_of_i64(chunk * CHUNK + (thread & (CHUNK - 1)))
    beside = thread // CHUNK
    real = lt_u32(piece, pieces)
    owner = lt_u32(piece, all_pieces)
    if SCALE == "e4m3":
        block = piece
    else:
        block = shr_u32(piece, 1)
        owner = owner & eq_u32(and_u32(piece, 1), 0)
    block_at = i64_of_u32(add_u32(shl_u32(shr_u32(block, 2), 9), and_u32(block, 3)))
    piece_bytes = 64 if INPUT == "float32" else 32
    half = piece_bytes // 2
    x_piece = i64_of_u32(piece) * piece_bytes
    codes_piece = i64_of_u32(piece) * (8 if ELEMENT == "e2m1" else 16)
    griddepcontrol_wait()
    range_of, first_tile, start, stop, used, head, tail = find_tile_quickly(
        row_offsets, groups, rows, tile, lane
    )
    if ENCODE != "row":
        if chunk == 0 and share == 0:
            store_scales_of_ranges(
                decode_scale, encode_scale, encode_number, expert_ids, groups, experts, tile
            )
    expert = -1
    if range_of >= 0:
        expert = expert_of(expert_ids, range_of, experts)
        base = start + ((tile - first_tile) << 7)
        count = min(stop - base, 128)
    else:
        base = (tile - used) << 7
        count = 128
    g = encode_scale_of(encode_scale, encode_number, expert)
    c = mul_rn(g, SIXTH)
    r = rcp_rn(g)
    tile_at = tile * (i64_of_u32(across) * 512)
    if LAYOUT == "tcgen":
        if (count < 128 or expert < 0) and tile < tiles:
            zero_scales(scales, tile_at, share, chunk, i64_of_u32(across), thread)
            cuda.syncthreads()
    step = 0
    while step < 2 * PAIRS:
        local0 = row_in_tile(share, 2 * step + beside)
        local1 = local0 + 64
        step += 1
        # The same for all lanes of a warp.
        if local0 < count:
            mine1 = local1 < count
            row0 = base + local0
            row1 = base + local1
            if range_of < 0:
                row0 = row_of_none(row0, head, tail)
                row1 = row_of_none(row1, head, tail)
            mine0 = row0 < rows
            mine1 = mine1 and row1 < rows
            source0 = -1
            source1 = -1
            if expert >= 0:
                source0 = source_row(row_indices, row0, input_rows)
                if mine1:
                    source1 = source_row(row_indices, row1, input_rows)
            if ENCODE == "row":
                g0 = usable(encode_scale[row0]) if expert >= 0 else ONE
                g1 = usable(encode_scale[row1]) if mine1 and expert >= 0 else ONE
                c0 = mul_rn(g0, SIXTH)
                r0 = rcp_rn(g0)
                c1 = mul_rn(g1, SIXTH)
                r1 = rcp_rn(g1)
                if eq_u32(piece, 0):
                    if mine0:
                        decode_scale[row0] = r0
                    if mine1:
                        decode_scale[row1] = r1
            else:
                c0 = c
                r0 = r
                c1 = c
                r1 = r
            live0 = real & (source0 >= 0)
            live1 = real & (source1 >= 0)
            at0 = source0 * i64_of_u32(x_row) + x_piece if live0 else 0
            at1 = source1 * i64_of_u32(x_row) + x_piece if live1 else 0
            codes0 = row0 * i64_of_u32(codes_row) + codes_piece
            codes1 = row1 * i64_of_u32(codes_row) + codes_piece
            if LAYOUT == "tcgen":
                # Rows of no range, or of one that is switched off, have their zeros already.
                scale0 = tile_at + block_at + ((local0 & 31) << 4) + ((local0 >> 5) << 2)
                scale1 = scale0 + 8
                owner0 = owner & (expert >= 0)
                owner1 = owner0 & (local1 < count)
            else:
                scale0 = row0 * i64_of_u32(across) + i64_of_u32(block)
                scale1 = row1 * i64_of_u32(across) + i64_of_u32(block)
                owner0 = owner & mine0
                owner1 = owner & mine1
            if expert >= 0:
                a0 = load_half_piece(x, at0)
                b0 = load_half_piece(x, at0 + half)
                a1 = load_half_piece(x, at1)
                b1 = load_half_piece(x, at1 + half)
                amax0 = select_f32(live0, amax_piece(a0, b0), ZERO)
                amax1 = select_f32(live1, amax_piece(a1, b1), ZERO)
                if SCALE == "e8m0":
                    amax0 = max_nan_f32(amax0, shfl_xor_f32(WARP, amax0, 1))
                    amax1 = max_nan_f32(amax1, shfl_xor_f32(WARP, amax1, 1))
                byte0, q0, holds0 = quick_scale(amax0, c0, r0)
                byte1, q1, holds1 = quick_scale(amax1, c1, r1)
                if not (holds0 & holds1):
                    if ELEMENT == "e2m1":
                        byte0, q0 = block_scale(amax0, c0, r0)
                        byte1, q1 = block_scale(amax1, c1, r1)
                st_global_u8_if(scales, scale0, byte0, owner0)
                st_global_u8_if(scales, scale1, byte1, owner1)
                held = holds0 & holds1
                store_piece(codes, codes0, a0, b0, q0, held, live0, real & mine0)
                store_piece(codes, codes1, a1, b1, q1, held, live1, real & mine1)
            else:
                store_zeros(codes, codes0, real & mine0)
                store_zeros(codes, codes1, real & mine1)
                if LAYOUT == "linear":
                    st_global_u8_if(scales, scale0, 0, owner0)
                    st_global_u8_if(scales, scale1, 0, owner1)


def store_scales_of_ranges(
    decode_scale, encode_scale, encode_number, expert_ids, groups, experts, tile
):
    """Write the decode scales of 128 ranges a tile, and those left over with tile 0."""
    i = tile * THREADS + cuda.threadIdx.x
    if i < groups:
        expert = expert_of(expert_ids, i, experts)
        decode_scale[i] = rcp_rn(encode_scale_of(encode_scale, encode_number, expert))
    if tile == 0:
        i += cuda.gridDim.y // (16 // PAIRS) * THREADS
        while i < groups:
            expert = expert_of(expert_ids, i, experts)
            decode_scale[i] = rcp_rn(encode_scale_of(encode_scale, encode_number, expert))
            i += THREADS


def store_piece(codes, at, a, b, q, held, live, mine):
    """Store the codes of a piece where it is `mine`: zeros where it is not `live`."""
    if ELEMENT == "e2m1":
        if held:
            low = scaled_codes(a, q)
            high = scaled_codes(b, q)
        else:
            low = encode_e2m1x8(widen(a), q)
            high = encode_e2m1x8(widen(b), q)
        low = select_u32(live, low, 0)
        high = select_u32(live, high, 0)
        st_global_v2_u32_if(codes, at, low, high, mine)
    else:
        v = widen(a)
        w = widen(b)
        st_global_v4_u32_if(
            codes,
            at,
            select_u32(live, encode_float8x4(v[0], v[1], v[2], v[3], q), 0),
            select_u32(live, encode_float8x4(v[4], v[5], v[6], v[7], q), 0),
            select_u32(live, encode_float8x4(w[0], w[1], w[2], w[3], q), 0),
            select_u32(live, encode_float8x4(w[4], w[5], w[6], w[7], q), 0),
            mine,
        )


def store_zeros(codes, at, mine):
    """Zero the codes of a piece."""
    if ELEMENT == "e2m1":
        st_global_v2_u32_if(codes, at, 0, 0, mine)
    else:
        st_global_v4_u32_if(codes, at, 0, 0, 0, 0, mine)


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
        "BLOCKS_PER_SM": (8, 10, 12),
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
_NVFP4 = {"ELEMENT": "e2m1", "SCALE": "e4m3", "BLOCKS_PER_SM": 10}
_MXFP8 = {"ELEMENT": "e4m3", "SCALE": "e8m0", "BLOCKS_PER_SM": 12}

VARIANTS = (
    {**_COMMON, **_NVFP4, "UNIT": False, "ENCODE": "expert", "INDICES": "none"},
    {**_COMMON, **_MXFP8, "UNIT": True, "ENCODE": "none", "INDICES": "int32"},
)
