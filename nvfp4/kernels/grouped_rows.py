"""Grouped quantisation of few rows: the same bytes as ``grouped_quantize``.

A warp takes 32 * PIECES pieces of 16 columns of one row of the result, whatever its range is. So
what it reads of the input is known before the range is, and it asks for the input first; the range
is found meanwhile, by each warp for itself: ranges that end before the row are counted, and their
tiles, both in one sum over the lanes. Where no input is waited for, nothing is gained: large calls
go through ``grouped_stream``, whose blocks take more rows for one search.

Scales that a tile has beside those of its rows are zeroed by the warps of its first row, byte for
byte those that no row has; tiles that no range uses by the block of that number.

Constraints: ALIGNED; tcgen; no tile_starts; fewer than 1025 ranges; rows below 2^27; a row of x and
of the result below 4 GB. Grid: (chunks of 64 pieces, the larger of rows / 2 / PIECES and tiles).

Compile-time constants beside those of ``grouped_quantize`` and ``stream``: PIECES, a thread's, 1 or
2; STEPS, how many times 32 ranges there may be, 1, 2, 4, 8, or 32: these in rounds of eight.
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
    le_u32,
    lt_u32,
    max_nan_f32,
    min_u32,
    mul_u32,
    ne_u32,
    or_u32,
    select_f32,
    select_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.memory import (
    ld_global_f32,
    st_global_u8_if,
    st_global_u32,
    st_global_v2_u32_if,
    st_global_v4_u32,
)
from ..ptx.warp import ballot, redux_add_u32, shfl_idx_u32, shfl_xor_f32, syncwarp, vote_all
from .elements import encode_e2m1x8
from .grouped_pieces import (
    lane_of,
    offset_at,
    range_tiles,
    source_of,
    store_float8,
    store_pieces,
    store_scales_of_ranges,
)
from .grouped_quantize import INDEX_DTYPES
from .groups import expert_of, load_index
from .quantize import ELEMENT_CONSTANTS
from .scales import block_scale
from .stream import (
    amax_piece,
    exact_factors,
    load_half_piece_early,
    quick_factors,
    quick_scale,
    scaled_codes,
    widen,
)

INPUT = "bfloat16"
ELEMENT = "e2m1"
SCALE = "e4m3"
ENCODE = "none"
OFFSETS = "int32"
PIECES = 1
STEPS = 8

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
WARP = 0xFFFFFFFF
THREADS = 128
CHUNK = 64  # pieces that a block takes of a row
COUNT = 2048  # more than there are ranges: numbers of ranges and of tiles share a word


def load_ranges(row_offsets, i, groups):
    """Where the ranges i, i + 32... of a round begin, and then where they end.

    Beyond the ranges: of one without rows.
    """
    j = add_u32(i, 1)
    if STEPS == 1:
        return bound(row_offsets, i, 0, groups), bound(row_offsets, j, 0, groups)
    elif STEPS == 2:
        return (
            bound(row_offsets, i, 0, groups),
            bound(row_offsets, i, 32, groups),
            bound(row_offsets, j, 0, groups),
            bound(row_offsets, j, 32, groups),
        )
    elif STEPS == 4:
        return (
            bound(row_offsets, i, 0, groups),
            bound(row_offsets, i, 32, groups),
            bound(row_offsets, i, 64, groups),
            bound(row_offsets, i, 96, groups),
            bound(row_offsets, j, 0, groups),
            bound(row_offsets, j, 32, groups),
            bound(row_offsets, j, 64, groups),
            bound(row_offsets, j, 96, groups),
        )
    else:
        return (
            bound(row_offsets, i, 0, groups),
            bound(row_offsets, i, 32, groups),
            bound(row_offsets, i, 64, groups),
            bound(row_offsets, i, 96, groups),
            bound(row_offsets, i, 128, groups),
            bound(row_offsets, i, 160, groups),
            bound(row_offsets, i, 192, groups),
            bound(row_offsets, i, 224, groups),
            bound(row_offsets, j, 0, groups),
            bound(row_offsets, j, 32, groups),
            bound(row_offsets, j, 64, groups),
            bound(row_offsets, j, 96, groups),
            bound(row_offsets, j, 128, groups),
            bound(row_offsets, j, 160, groups),
            bound(row_offsets, j, 192, groups),
            bound(row_offsets, j, 224, groups),
        )


def bound(row_offsets, i, more, groups):
    """Offset i + more, or the last one."""
    return offset_at(row_offsets, min_u32(add_u32(i, more), groups))


def note_range(known, lower, upper, row):
    """Add a range to what a lane knows of its ranges.

    That is: whether offsets never decrease; how many ranges end at `row` or before, and COUNT times
    their tiles; all tiles; first row and end of the range that has `row`, equal if none has.
    """
    own = range_tiles(lower, upper)
    ended = le_u32(upper, row)
    has = le_u32(lower, row) & lt_u32(row, upper)
    return (
        known[0] & le_u32(lower, upper),
        add_u32(known[1], select_u32(ended, add_u32(mul_u32(own, COUNT), 1), 0)),
        add_u32(known[2], own),
        select_u32(has, lower, known[3]),
        select_u32(has, upper, known[4]),
    )


def note_ranges(known, bounds, row):
    """``note_range`` of the ranges that ``load_ranges`` has loaded."""
    if STEPS == 1:
        return note_range(known, bounds[0], bounds[1], row)
    elif STEPS == 2:
        known = note_range(known, bounds[0], bounds[2], row)
        return note_range(known, bounds[1], bounds[3], row)
    elif STEPS == 4:
        known = note_range(known, bounds[0], bounds[4], row)
        known = note_range(known, bounds[1], bounds[5], row)
        known = note_range(known, bounds[2], bounds[6], row)
        return note_range(known, bounds[3], bounds[7], row)
    else:
        known = note_range(known, bounds[0], bounds[8], row)
        known = note_range(known, bounds[1], bounds[9], row)
        known = note_range(known, bounds[2], bounds[10], row)
        known = note_range(known, bounds[3], bounds[11], row)
        known = note_range(known, bounds[4], bounds[12], row)
        known = note_range(known, bounds[5], bounds[13], row)
        known = note_range(known, bounds[6], bounds[14], row)
        return note_range(known, bounds[7], bounds[15], row)


def find_row(bounds, tail, row_offsets, groups, rows, row, lane):
    """Find the range of a row; all lanes of a full warp call it with the same row.

    bounds, tail: the first round, and the last offset. Returns its number (-1: none) in 64 bits; in
    32 its first row, the one behind its last, its first tile, and the tiles of all ranges.
    """
    none = sub_u32(lane, lane)
    known = note_ranges((le_u32(lane, 31), none, none, none, none), bounds, row)
    if STEPS > 8:
        all_groups = u32_of_i64(groups)
        i = add_u32(lane, 256)
        while lt_u32(i, add_u32(all_groups, lane)):
            known = note_ranges(known, load_ranges(row_offsets, i, all_groups), row)
            i = add_u32(i, 256)
    if not vote_all(WARP, known[0] & le_u32(tail, u32_of_i64(rows))):
        return find_row_slowly(row_offsets, groups, rows, row)
    before = redux_add_u32(WARP, known[1])
    used = redux_add_u32(WARP, known[2])
    votes = ballot(WARP, lt_u32(known[3], known[4]))
    source = lane_of(or_u32(votes, 0x80000000))
    start = shfl_idx_u32(WARP, known[3], source)
    stop = shfl_idx_u32(WARP, known[4], source)
    owner = i64_of_u32(and_u32(before, COUNT - 1)) if ne_u32(votes, 0) else -1
    return owner, start, stop, shr_u32(before, 11), used


def find_row_slowly(row_offsets, groups, rows, row):
    """``find_row`` for any offsets: they count as ``groups`` says."""
    reach = min(max(load_index(row_offsets, 0, OFFSETS), 0), rows)
    wanted = i64_of_u32(row)
    owner = -1
    start = 0
    stop = 0
    first_tile = 0
    used = 0
    i = 0
    while i < groups:
        upper = min(max(load_index(row_offsets, i + 1, OFFSETS), reach), rows)
        if reach <= wanted and wanted < upper:
            owner = i
            start = reach
            stop = upper
            first_tile = used
        used += (upper - reach + 127) >> 7
        reach = upper
        i += 1
    return owner, u32_of_i64(start), u32_of_i64(stop), u32_of_i64(first_tile), u32_of_i64(used)


def zero_tile(scales, tile_at, chunk, across, thread):
    """Zero this block's part of a tile's scales."""
    k_tiles = 16 if SCALE == "e4m3" else 8
    at = tile_at + i64_of_u32(shl_u32(and_u32(thread, 31), 4))
    k = i64_of_u32(add_u32(mul_u32(chunk, k_tiles), shr_u32(thread, 5)))
    end = min(i64_of_u32(mul_u32(add_u32(chunk, 1), k_tiles)), across)
    while k < end:
        st_global_v4_u32(scales, at + k * 512, 0, 0, 0, 0, "")
        k += THREADS // 32


def zero_beside(scales, tile_at, chunk, across, count, thread):
    """Zero the scales of a tile that its `count` rows leave over.

    The warps of a row do it together: two, or one of two pieces a thread.
    """
    k_tiles = 16 if SCALE == "e4m3" else 8
    warps = 2 // PIECES
    row = and_u32(thread, 31)
    at = tile_at + i64_of_u32(shl_u32(row, 4))
    k = i64_of_u32(add_u32(mul_u32(chunk, k_tiles), and_u32(shr_u32(thread, 5), warps - 1)))
    end = min(i64_of_u32(mul_u32(add_u32(chunk, 1), k_tiles)), across)
    # Sixteen bytes are those of rows `row` + {0, 32, 64, 96}.
    while k < end:
        if le_u32(count, row):
            st_global_v4_u32(scales, at + k * 512, 0, 0, 0, 0, "")
        else:
            if le_u32(count, add_u32(row, 32)):
                st_global_u32(scales, at + k * 512 + 4, 0, "")
            if le_u32(count, add_u32(row, 64)):
                st_global_u32(scales, at + k * 512 + 8, 0, "")
            if le_u32(count, add_u32(row, 96)):
                st_global_u32(scales, at + k * 512 + 12, 0, "")
        k += warps


def encode_scale_at(encode_scale, encode_number, expert, row):
    """The encode scale of a row as it was given, 1 where its range is switched off."""
    g = ONE
    if ENCODE != "none":
        if expert >= 0:
            if ENCODE == "scalar":
                g = encode_number
            elif ENCODE == "array":
                g = ld_global_f32(encode_scale, 0, "nc")
            elif ENCODE == "expert":
                g = ld_global_f32(encode_scale, expert, "nc")
            else:
                g = ld_global_f32(encode_scale, i64_of_u32(row), "nc")
    return g


def quick_scale_of(a, b, live, g):
    """Scale byte of a piece, q, whether they hold, and amax."""
    amax = select_f32(live, amax_piece(a, b), ZERO)
    if SCALE == "e8m0":
        amax = max_nan_f32(amax, shfl_xor_f32(WARP, amax, 1))
    c, r, usual = quick_factors(g)
    byte, q, holds = quick_scale(amax, c, r)
    return byte, q, holds & usual, amax


def exact_scale(amax, g):
    """Scale byte of a block and q by the general rules."""
    c, r = exact_factors(g)
    return block_scale(amax, c, r)


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
        store_float8(codes, at, a, b, q, live, mine)


def grouped_rows(
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
    # across: 512-byte tiles of a row of tiles. tiles: rows of tiles that the scales have.
    thread = u32_of_i64(cuda.threadIdx.x)
    chunk = u32_of_i64(cuda.blockIdx.x)
    number = u32_of_i64(cuda.blockIdx.y)
    lane = and_u32(thread, 31)
    # The row is the same for all lanes of a warp.
    if PIECES == 1:
        row = add_u32(mul_u32(number, 2), shr_u32(thread, 6))
        piece = add_u32(mul_u32(chunk, CHUNK), and_u32(thread, CHUNK - 1))
    else:
        row = add_u32(mul_u32(number, 4), shr_u32(thread, 5))
        piece = add_u32(mul_u32(chunk, CHUNK), lane)
    all_rows = u32_of_i64(rows)
    all_input = u32_of_i64(input_rows)
    there = lt_u32(row, all_rows)
    real0 = lt_u32(piece, pieces)
    real1 = lt_u32(add_u32(piece, 32), pieces)
    piece_bytes = 64 if INPUT == "float32" else 32
    half = piece_bytes // 2
    x_piece = i64_of_u32(piece) * piece_bytes
    all_groups = u32_of_i64(groups)
    griddepcontrol_wait()
    # What is asked for first may be what comes first.
    tail = offset_at(row_offsets, all_groups)
    bounds = load_ranges(row_offsets, lane, all_groups)
    source, found = source_of(row_indices, row if there else 0, all_input)
    source_at = i64_of_u32(source) * i64_of_u32(x_row) + x_piece
    found = found & there
    at = source_at if real0 & found else 0
    a0 = load_half_piece_early(x, at)
    b0 = load_half_piece_early(x, at + half)
    if PIECES > 1:
        at = source_at + 32 * piece_bytes if real1 & found else 0
        a1 = load_half_piece_early(x, at)
        b1 = load_half_piece_early(x, at + half)
    # Keeps the compiler from moving the loads behind the search.
    syncwarp(WARP)
    # Not before: with many small grids at once each takes twice as long.
    griddepcontrol_launch_dependents()
    owner, start, stop, first_tile, used = find_row(
        bounds, tail, row_offsets, groups, rows, row, lane
    )
    expert = -1
    if owner >= 0:
        expert = expert_of(expert_ids, owner, experts)
    g = encode_scale_at(encode_scale, encode_number, expert, row)
    live0 = real0 & found & (expert >= 0)
    live1 = real1 & found & (expert >= 0)
    wide_across = i64_of_u32(across)
    tile_bytes = wide_across * 512
    local = sub_u32(row, start)
    tile_at = i64_of_u32(add_u32(first_tile, shr_u32(local, 7))) * tile_bytes
    local = and_u32(local, 127)
    # While the input is under way: what no row has.
    if owner >= 0 and eq_u32(local, 0):
        count = sub_u32(stop, row)
        if lt_u32(count, 128):
            zero_beside(scales, tile_at, chunk, wide_across, count, thread)
    if le_u32(used, number) and i64_of_u32(number) < tiles:
        zero_tile(scales, i64_of_u32(number) * tile_bytes, chunk, wide_across, thread)
    owns0 = lt_u32(piece, all_pieces) & (owner >= 0)
    owns1 = lt_u32(add_u32(piece, 32), all_pieces) & (owner >= 0)
    if SCALE == "e4m3":
        block = piece
        next_scale = 32 // 4 * 512
    else:
        block = shr_u32(piece, 1)
        next_scale = 32 // 8 * 512
        first = eq_u32(and_u32(piece, 1), 0)
        owns0 = owns0 & first
        owns1 = owns1 & first
    place = add_u32(shl_u32(and_u32(local, 31), 4), shl_u32(shr_u32(local, 5), 2))
    place = add_u32(place, add_u32(shl_u32(shr_u32(block, 2), 9), and_u32(block, 3)))
    scale_at = tile_at + i64_of_u32(place)
    code_bytes = 8 if ELEMENT == "e2m1" else 16
    codes_at = i64_of_u32(row) * i64_of_u32(codes_row) + i64_of_u32(piece) * code_bytes
    byte0, q0, held, amax0 = quick_scale_of(a0, b0, live0, g)
    if PIECES > 1:
        byte1, q1, held1, amax1 = quick_scale_of(a1, b1, live1, g)
        held = held & held1
    if ELEMENT == "e2m1" and not held:
        byte0, q0 = exact_scale(amax0, g)
        if PIECES > 1:
            byte1, q1 = exact_scale(amax1, g)
    st_global_u8_if(scales, scale_at, byte0, owns0)
    if PIECES > 1:
        st_global_u8_if(scales, scale_at + next_scale, byte1, owns1)
        store_pieces(
            codes,
            codes_at,
            codes_at + 32 * code_bytes,
            a0,
            b0,
            a1,
            b1,
            q0,
            q1,
            held,
            live0,
            live1,
            real0 & there,
            real1 & there,
        )
    else:
        store_piece(codes, codes_at, a0, b0, q0, held, live0, real0 & there)
    if ENCODE == "row":
        if eq_u32(piece, 0) and there:
            decode_scale[i64_of_u32(row)] = exact_factors(g)[1]
    elif eq_u32(chunk, 0):
        # Blocks that have no row, if there are such: nothing is behind what they load for it.
        blocks = i64_of_u32(cuda.gridDim.y)
        base = (rows + (2 * PIECES - 1)) // (2 * PIECES)
        if base >= blocks:
            base = 0
        if i64_of_u32(number) >= base:
            store_scales_of_ranges(
                decode_scale,
                encode_scale,
                encode_number,
                expert_ids,
                groups,
                experts,
                i64_of_u32(number) - base,
                blocks - base,
            )


GROUPED_ROWS = Kernel(
    "grouped_rows",
    grouped_rows,
    (
        *("u8*", "u8*", "u8*", "u8*", "u8*", "u8*", "f32*", "f32", "f32*"),
        *("i64", "i64", "i64", "i64", "u32", "u32", "u32", "u32", "u32", "i64"),
    ),
    {
        **ELEMENT_CONSTANTS,
        "ALIGNED": (True,),
        "LAYOUT": ("tcgen",),
        "ENCODE": ("none", "scalar", "array", "expert", "row"),
        "OFFSETS": INDEX_DTYPES,
        "IDS": ("none", "int32", "int64"),
        "INDICES": ("none", "int32", "int64"),
        "STARTS": ("none",),
        "PIECES": (1, 2),
        "STEPS": (1, 2, 4, 8, 32),
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
    "STARTS": "none",
    "BLOCKS_PER_SM": 10,
}
_NVFP4 = {"ELEMENT": "e2m1", "SCALE": "e4m3", "UNIT": False, "ENCODE": "expert"}
_MXFP8 = {"ELEMENT": "e4m3", "SCALE": "e8m0", "UNIT": True, "ENCODE": "none"}

VARIANTS = (
    {
        **{**_COMMON, **_NVFP4, "IDS": "int32", "INDICES": "none", "PIECES": 1, "STEPS": 8},
        "BLOCKS_PER_SM": 12,
    },
    {**_COMMON, **_NVFP4, "IDS": "none", "INDICES": "int32", "PIECES": 2, "STEPS": 1},
    {**_COMMON, **_MXFP8, "IDS": "none", "INDICES": "none", "PIECES": 2, "STEPS": 32},
)
